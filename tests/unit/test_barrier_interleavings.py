"""Every order of the steps of coordinators, workers and whoever raises the incarnation, against a model of etcd.

Each invariant is checked after every step, so it holds also when any of the processes dies at that step and never goes
on: a coordinator between any two writes, a worker before or after its vote.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, cast

import msgspec
import pytest

from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.decision import Step
from moorage.barrier.kv import Compare
from moorage.barrier.twophase import Attempts, decide
from moorage.errors import Conflict, Fenced, NotFound
from moorage.records import AttemptStart, IncarnationRecord, Keys, Outcome, Vote
from tests.support.etcd_model import ModelClient, ModelEtcd
from tests.support.interleave import Run, explore, gate, sample

KEYS, JOB = Keys("c"), "j"
COMMITTED = KEYS.job(JOB) + "test-committed"
Made = tuple["World", Mapping[str, Coroutine[Any, Any, Any]]]


def incarnation_record(number: int) -> bytes:
    return msgspec.json.encode(IncarnationRecord(incarnation=number, placement=["a"] * 2))


class World:
    """etcd, and what has been seen of it."""

    def __init__(self, pods: int, *, started: bool = True) -> None:
        self.etcd = ModelEtcd()
        self.start = AttemptStart(attempt=1, incarnation=5, pods=pods, kind="resume", deadline_seconds=1)
        self.outcome: Outcome | None = None
        self.seen_votes: dict[int, Vote] = {}
        self.etcd.txn([], [op.put(KEYS.incarnation(JOB), incarnation_record(5))])
        self.elect("first")
        if started:
            self.etcd.txn([], [op.put(KEYS.start(JOB, 1), msgspec.json.encode(self.start))])

    def elect(self, name: str) -> Compare:
        """Make ``name`` the one leader, at once; returns its fence."""
        key = KEYS.leader + name
        self.etcd.txn([], [op.delete_prefix(KEYS.leader)])
        revision = self.etcd.txn([], [op.put(key, b"")]).revision
        return cmp.create_revision(key, revision)

    def fence(self, name: str) -> Compare:
        key = KEYS.leader + name
        return cmp.create_revision(key, self.etcd.keys[key].create_revision)

    def attempts(self) -> Attempts:
        """What a process of its own has: a client, and a memory that begins empty."""
        return Attempts(cast(EtcdClient, ModelClient(self.etcd, gate)), KEYS, JOB)

    def votes(self, step: Step = "captured") -> dict[int, Vote]:
        found = (self.etcd.keys.get(KEYS.vote(JOB, 1, step, pod)) for pod in range(self.start.pods))
        return {pod: msgspec.json.decode(kv.value, type=Vote) for pod, kv in enumerate(found) if kv}


def check(world: World) -> None:
    """The barrier's invariants at one instant."""
    found = world.etcd.keys.get(KEYS.outcome(JOB, 1))
    standing = msgspec.json.decode(found.value, type=Outcome) if found else None
    created = world.outcome is None and standing is not None
    if world.outcome is not None:
        if standing is None:
            left = [key for key in world.etcd.keys if key.startswith(KEYS.attempt(JOB, 1))]
            assert not left, "the outcome went before the attempt's other keys"
        else:
            assert standing == world.outcome, "an outcome was changed"
    elif standing is not None:
        # It was created in this very step.
        world.outcome = standing
        if standing.kind != "abort":
            assert KEYS.leader + standing.by in world.etcd.keys, "concluded by one who no longer leads"
            record = msgspec.json.decode(world.etcd.keys[KEYS.incarnation(JOB)].value, type=IncarnationRecord)
            assert record.incarnation == world.start.incarnation == standing.incarnation
            votes = world.votes()
            assert KEYS.start(JOB, 1) in world.etcd.keys
            assert len(votes) == world.start.pods and all(vote.ok for vote in votes.values())
    votes = world.votes()
    if KEYS.start(JOB, 1) in world.etcd.keys:
        assert {pod: votes.get(pod) for pod in world.seen_votes} == world.seen_votes, "a vote was changed"
        if world.outcome is not None and not created:
            assert votes == world.seen_votes, "a pod was captured after the outcome"
    else:
        assert not votes, "a vote for an attempt that is not there"
    world.seen_votes = votes
    committed = world.etcd.keys.get(COMMITTED)
    assert (committed is not None) == (world.outcome is not None and world.outcome.by in ("first", "second"))


async def coordinator(world: World, name: str, *, late: bool = False, forget: bool = False) -> Outcome | str | None:
    attempts, fence = world.attempts(), world.fence(name)
    votes = await attempts.votes(1, "captured")
    decision = decide(world.start, votes, outcome=None, past_deadline=late, lost=set())
    if decision.kind is None:
        return None
    mine = Outcome(kind=decision.kind, incarnation=5, attempt=1, by=name)
    try:
        standing = await attempts.conclude(mine, fence=[fence], also=[op.put(COMMITTED, name.encode())])
    except (Fenced, NotFound):
        return "fenced"
    if forget:
        await attempts.forget(1)
    return standing


async def successor(world: World, *, forget: bool = False) -> Outcome | str | None:
    """A second coordinator: takes the lead at any moment, and ends the attempt one way or the other."""
    await gate("elect")
    world.elect("second")
    return await coordinator(world, "second", late=True, forget=forget)


async def worker(world: World, pod: int, *votes: Vote, aborts: bool) -> tuple[list[bool], Outcome | None]:
    attempts = world.attempts()
    cast_ = [await attempts.vote("captured", vote) for vote in votes]
    try:
        return cast_, await attempts.abort(1, 5, "late", f"w{pod}") if aborts else None
    except NotFound:
        return cast_, None


async def keeper(world: World) -> None:
    """The same coordinator's housekeeping: forgets the attempt as soon as it has an outcome."""
    with contextlib.suppress(Conflict):
        await world.attempts().forget(1)


async def raise_incarnation(world: World) -> None:
    await gate("raise")
    world.etcd.txn([], [op.put(KEYS.incarnation(JOB), incarnation_record(6))])


async def rewrite_incarnation(world: World) -> None:
    """The record is written anew, with the same number: that fences nobody."""
    await gate("rewrite")
    world.etcd.txn([], [op.put(KEYS.incarnation(JOB), incarnation_record(5))])


def yes(pod: int, ok: bool = True) -> Vote:
    return Vote(pod=pod, incarnation=5, attempt=1, ok=ok)


def end(run: Run[World]) -> None:
    """All who learnt of an outcome learnt of the one that stands; and whoever asks now is answered."""
    for result in run.results.values():
        told = result[1] if isinstance(result, tuple) else result
        if isinstance(told, Outcome):
            assert told == run.world.outcome
    if KEYS.start(JOB, 1) in run.world.etcd.keys:
        finish = Run(lambda: (run.world, {"late": worker(run.world, 0, aborts=True)}), check)
        while finish.runnable:
            finish.step("late")
        assert finish.results["late"][1] == run.world.outcome
    assert run.world.etcd.largest_txn <= 8


def one_pod() -> Made:
    world = World(1)
    return world, {
        "first": coordinator(world, "first"),
        "second": successor(world),
        "w0": worker(world, 0, yes(0), aborts=True),
    }


def two_pods_and_a_newer_incarnation() -> Made:
    world = World(2)
    return world, {
        "first": coordinator(world, "first"),
        "w0": worker(world, 0, yes(0), aborts=False),
        "w1": worker(world, 1, yes(1), aborts=True),
        "raiser": raise_incarnation(world),
    }


def a_doubled_and_a_refusing_vote() -> Made:
    world = World(1)
    return world, {
        "first": coordinator(world, "first", late=True),
        "w0": worker(world, 0, yes(0), yes(0, ok=False), aborts=False),
        "w0 again": worker(world, 0, yes(0, ok=False), yes(0), aborts=False),
    }


def forgotten_beside_late_votes() -> Made:
    world = World(1)
    return world, {
        "second": successor(world, forget=True),
        "w0": worker(world, 0, yes(0), aborts=True),
        "w0 again": worker(world, 0, yes(0), aborts=False),
    }


def forgotten_beside_a_late_coordinator() -> Made:
    world = World(1)
    return world, {
        "first": coordinator(world, "first", late=True),
        "w0": worker(world, 0, yes(0), aborts=True),
        "keeper": keeper(world),
    }


@pytest.mark.parametrize(
    "make",
    [
        one_pod,
        two_pods_and_a_newer_incarnation,
        a_doubled_and_a_refusing_vote,
        forgotten_beside_late_votes,
        forgotten_beside_a_late_coordinator,
    ],
)
def test_every_order_of_steps_keeps_the_invariants(make: Callable[[], Made]) -> None:
    outcomes = set()

    def judge(run: Run[World]) -> None:
        end(run)
        outcomes.add(run.world.outcome.kind if run.world.outcome else None)

    assert explore(make, check, judge) > 50
    assert {"resume", "abort"} <= outcomes


def test_a_record_of_the_same_incarnation_written_anew_fences_nobody() -> None:
    def make() -> Made:
        world = World(1)
        processes = {
            "first": coordinator(world, "first", late=True),
            "w0": worker(world, 0, yes(0), aborts=False),
            "rewriter": rewrite_incarnation(world),
        }
        return world, processes

    def judge(run: Run[World]) -> None:
        end(run)
        assert isinstance(run.results["first"], Outcome)

    assert explore(make, check, judge) > 50


def crowd() -> Made:
    world = World(3)
    old = Vote(pod=2, incarnation=4, attempt=1)
    return world, {
        "first": coordinator(world, "first"),
        "second": successor(world),
        "w0": worker(world, 0, yes(0), yes(0), aborts=False),
        "w1": worker(world, 1, yes(1), aborts=True),
        "w2": worker(world, 2, old, yes(2), aborts=False),
        "w2 as it was": worker(world, 2, old, aborts=False),
    }


@pytest.mark.parametrize("kills", [0.0, 0.1])
def test_random_orders_of_a_crowd_with_deaths_keep_the_invariants(kills: float) -> None:
    seen = set()

    def judge(run: Run[World]) -> None:
        end(run)
        seen.add(run.world.outcome.kind if run.world.outcome else None)

    for seed in range(1500):
        sample(crowd, check, judge, seed=seed, kills=kills)
    assert {"resume", "abort"} <= seen


async def starter(world: World, name: str, start: AttemptStart) -> str:
    try:
        await world.attempts().start(start, fence=[world.fence(name)], also=[op.put(KEYS.state(JOB), name.encode())])
    except (Fenced, Conflict) as error:
        return type(error).__name__
    return "started"


def test_of_two_starters_at_most_one_starts_and_only_while_it_leads() -> None:
    def make() -> Made:
        world = World(1, started=False)

        async def second() -> str:
            await gate("elect")
            world.elect("second")
            other = AttemptStart(attempt=1, incarnation=5, pods=1, kind="stop", deadline_seconds=1)
            return await starter(world, "second", other)

        processes = {"first": starter(world, "first", world.start), "second": second(), "r": raise_incarnation(world)}
        return world, processes

    seen = set()

    def judge(run: Run[World]) -> None:
        results = (run.results["first"], run.results["second"])
        seen.add(results)
        assert results.count("started") <= 1
        assert (KEYS.start(JOB, 1) in run.world.etcd.keys) == ("started" in results)
        assert (KEYS.state(JOB) in run.world.etcd.keys) == ("started" in results)

    began = False

    def fenced(world: World) -> None:
        nonlocal began
        if KEYS.start(JOB, 1) not in world.etcd.keys:
            began = False
        elif not began:
            began = True
            by = world.etcd.keys[KEYS.state(JOB)].value.decode()
            assert KEYS.leader + by in world.etcd.keys, "started by one who no longer leads"
            assert world.etcd.keys[KEYS.incarnation(JOB)].value == incarnation_record(5)

    explore(make, fenced, judge)
    assert {("started", "Conflict"), ("Fenced", "started"), ("Fenced", "Fenced")} <= seen
