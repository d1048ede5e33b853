"""The model of etcd that the barrier's orders of steps are checked against does what a real etcd does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.kv import Compare, Deleted, DeleteOp, Event, KeyValue, Op, PutOp, TxnResult
from tests.support.etcd import Etcd
from tests.support.etcd_model import ModelEtcd

pytestmark = pytest.mark.root
T = TypeVar("T")
NAMES = ["a", "a/b", "a/c", "b"]
numbers = itertools.count()

keys = st.sampled_from(NAMES)
values = st.sampled_from([b"", b"1", b"2"])
ops = st.one_of(
    st.builds(op.put, keys, values),
    st.builds(op.get, keys),
    st.builds(op.delete, keys),
    st.builds(op.delete_prefix, st.sampled_from(["a/", "b"])),
)
conditions = st.tuples(st.sampled_from(["absent", "exists", "create", "mod", "value"]), keys, values, st.booleans())


def valid(branch: list[Op]) -> list[Op]:
    """Without what etcd refuses: two puts of a key, or a put beside a delete of the same key."""
    taken: set[str] = set()
    kept: list[Op] = []
    for each in branch:
        if isinstance(each, PutOp):
            clash = each.key in taken or any(
                isinstance(k, DeleteOp) and (each.key.startswith(k.key) if k.prefix else each.key == k.key)
                for k in kept
            )
            if clash:
                continue
            taken.add(each.key)
        elif isinstance(each, DeleteOp) and any(
            key.startswith(each.key) if each.prefix else key == each.key for key in taken
        ):
            continue
        kept.append(each)
    return kept


class SideBySide(RuleBasedStateMachine):
    """The same operations on both, each example under a prefix of its own; revisions differ by a constant."""

    etcd: Etcd

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client = EtcdClient(self.etcd.endpoints)
        self.prefix = f"/model/{next(numbers)}/"
        self.model = ModelEtcd()
        self.began = self.run(self.client.list(self.prefix)).revision
        self.shift = self.began - self.model.revision

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        try:
            self.run(self.same_history())
        finally:
            self.run(self.client.close())
            self.runner.close()

    def key(self, name: str) -> str:
        return self.prefix + name

    def moved(self, kv: KeyValue | None) -> KeyValue | None:
        """A key of the model as etcd should show it."""
        if kv is None:
            return None
        created, modified = kv.create_revision + self.shift, kv.mod_revision + self.shift
        return KeyValue(self.key(kv.key), kv.value, created, modified, kv.version, kv.lease)

    def real(self, each: Op) -> Op:
        if isinstance(each, PutOp):
            return op.put(self.key(each.key), each.value)
        if isinstance(each, DeleteOp):
            return DeleteOp(self.key(each.key), each.prefix)
        return op.get(self.key(each.key))

    def condition(self, kind: str, name: str, value: bytes, right: bool) -> Compare:
        """A condition on the model; ``right`` makes one on a revision that holds."""
        kv = self.model.keys.get(name)
        if kind in ("absent", "exists"):
            return cmp.absent(name) if kind == "absent" else cmp.exists(name)
        if kind == "value":
            return cmp.value(name, kv.value if kv and right else value)
        current = (kv.create_revision if kind == "create" else kv.mod_revision) if kv else 0
        make = cmp.create_revision if kind == "create" else cmp.mod_revision
        return make(name, current if right else max(1, current - 1))

    def real_condition(self, compare: Compare) -> Compare:
        value = compare.value
        if isinstance(value, int) and value:
            value += self.shift
        return Compare(self.key(compare.key), compare.target, value, compare.equal)

    @rule(
        chosen=st.lists(conditions, max_size=3),
        success=st.lists(ops, max_size=4).map(valid),
        failure=st.lists(ops, max_size=2).map(valid),
    )
    def txn(self, chosen: list[tuple[str, str, bytes, bool]], success: list[Op], failure: list[Op]) -> None:
        compare = [self.condition(*each) for each in chosen]
        expected = self.model.txn(compare, success, failure)
        result = self.run(
            self.client.txn(
                [self.real_condition(each) for each in compare],
                [self.real(each) for each in success],
                [self.real(each) for each in failure],
            )
        )
        gets = tuple(self.moved(kv) for kv in expected.gets)
        assert result == TxnResult(expected.succeeded, expected.revision + self.shift, gets)

    @rule(prefix=st.sampled_from(["", "a", "a/", "b"]))
    def list(self, prefix: str) -> None:
        expected = self.model.list(prefix)
        listing = self.run(self.client.list(self.key(prefix)))
        assert listing.revision == expected.revision + self.shift
        assert listing.items == tuple(self.moved(kv) for kv in expected.items)

    async def same_history(self) -> None:
        expected = [self.told(event) for _, events in self.model.history for event in events]
        seen: list[tuple[str, bytes | None, int]] = []
        async with aclosing(self.client.watch(self.prefix, since=self.began + 1)) as batches:
            while len(seen) < len(expected):
                batch = await asyncio.wait_for(anext(batches), 20)
                assert batch.relisted is None
                for event in batch.events:
                    key, value, revision = self.told(event)
                    seen.append((key.removeprefix(self.prefix), value, revision - self.shift))
        assert seen == expected

    @staticmethod
    def told(event: Event) -> tuple[str, bytes | None, int]:
        if isinstance(event, Deleted):
            return event.key, None, event.mod_revision
        return event.kv.key, event.kv.value, event.kv.mod_revision


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def test_the_model_and_etcd_answer_alike(etcd: Etcd) -> None:
    SideBySide.etcd = etcd
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        SideBySide,
        settings=settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=checks),
    )
