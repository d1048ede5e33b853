"""What is concluded after a lost answer is compared with what truly happened, over random transactions and meddlers."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from moorage.barrier import cmp, op, settle
from moorage.barrier.kv import Compare, KeyValue, Op, PutOp
from tests.support.etcd_model import ModelEtcd

KEYS = ["a", "b", "c"]
Revisions = dict[str, tuple[int, int]]  # create, mod


@st.composite
def transactions(draw: st.DrawFn, revisions: Revisions, value: bytes) -> tuple[list[Compare], list[Op]]:
    compare: list[Compare] = []
    success: list[Op] = []
    for key in KEYS:
        condition = draw(st.sampled_from(["none", "absent", "exists", "mod", "create"]))
        if condition == "absent":
            compare.append(cmp.absent(key))
        elif condition == "exists":
            compare.append(cmp.exists(key))
        elif condition != "none":
            made, written = revisions.get(key, (0, 0))
            compare.append(cmp.mod_revision(key, written) if condition == "mod" else cmp.create_revision(key, made))
        action = draw(st.sampled_from(["none", "put", "delete"]))
        if action == "put":
            success.append(op.put(key, value))
        elif action == "delete":
            success.append(op.delete(key))
    return compare, success


@given(st.data())
def test_of_two_copies_of_a_self_fencing_transaction_at_most_one_succeeds(data: st.DataObject) -> None:
    etcd = ModelEtcd()
    for key in data.draw(st.lists(st.sampled_from(KEYS))):
        etcd.txn([], [op.put(key, b"old")])
    revisions = {key: (kv.create_revision, kv.mod_revision) for key, kv in etcd.keys.items()}
    compare, success = data.draw(transactions(revisions, b"mine"))
    assume(settle.own_fences(compare, success))
    if etcd.txn(compare, success).succeeded:
        assert not etcd.txn(compare, success).succeeded


@given(st.data())
def test_the_judgement_after_a_lost_answer_is_never_wrong(data: st.DataObject) -> None:
    etcd = ModelEtcd()
    for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=3)):
        etcd.txn([], [op.put(key, b"old")])
    revisions = {key: (kv.create_revision, kv.mod_revision) for key, kv in etcd.keys.items()}
    compare, success = data.draw(transactions(revisions, b"mine"))
    assume(settle.own_fences(compare, success))
    sent = data.draw(st.booleans())
    first = etcd.txn(compare, success) if sent else None
    executed = first.revision if first and first.succeeded else 0
    meddled = data.draw(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(["put", "delete"])), max_size=3))
    created = {o.key: etcd.keys[o.key].create_revision for o in success if isinstance(o, PutOp) and o.key in etcd.keys}
    for key, action in meddled:
        etcd.txn([], [op.put(key, b"other") if action == "put" else op.delete(key)])
    again = etcd.txn(compare, success, [op.get(key) for key in settle.to_read(compare, success)])
    if again.succeeded:
        return
    seen: dict[str, KeyValue | None] = dict(zip(settle.to_read(compare, success), again.gets, strict=True))
    verdict = settle.applied(compare, success, seen)
    removed = any(
        etcd.keys.get(key) is None or etcd.keys[key].create_revision != revision for key, revision in created.items()
    )
    if verdict:
        assert executed == verdict
    if verdict == 0 and not removed:
        assert not executed
    fresh = all(kv is None or kv.version == 1 for kv in seen.values())
    if not meddled and fresh and any(isinstance(o, PutOp) for o in success):
        assert verdict == executed, "nobody meddled, so it can be told"


@pytest.mark.parametrize(
    ("compare", "success", "fenced"),
    [
        ([cmp.absent("a")], [op.put("a", b"")], True),
        ([cmp.mod_revision("a", 4)], [op.put("a", b"")], True),
        ([cmp.mod_revision("a", 0)], [op.put("a", b"")], True),
        ([cmp.create_revision("a", 4)], [op.delete("a")], True),
        ([cmp.create_revision("a/b", 4)], [op.delete_prefix("a/")], True),
        ([cmp.create_revision("a", 4)], [op.put("a", b"")], False),  # holds again afterwards
        ([cmp.value("a", b"x")], [op.put("a", b"y")], False),  # can hold again
        ([cmp.exists("a")], [op.delete("a")], False),
        ([cmp.absent("a")], [op.put("b", b"")], False),
        ([], [op.put("a", b"")], False),
    ],
)
def test_which_transactions_fence_themselves(compare: list[Compare], success: list[Op], fenced: bool) -> None:
    assert bool(settle.own_fences(compare, success)) == fenced
