"""One round's decision, for random reports against a plain reading of the rules; deadlines, lost ranks, plans."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from moorage.nccl_quiesce.cut import Cut, Memory, Settings
from moorage.nccl_quiesce.model import (
    Abort,
    Accept,
    Admit,
    Call,
    Creation,
    Decision,
    Drain,
    Handle,
    Lane,
    Plan,
    Snapshot,
    Wait,
)
from moorage.nccl_quiesce.picture import Picture

RANKS = 3
GROUPS = {"all": (0, 1, 2), "pair": (0, 2)}  #: the rank of each member
SETTINGS = Settings(deadline=100.0, patience=1.0, dry=1.0)


def lanes() -> list[tuple[int, Lane]]:
    """Every lane, with its rank."""
    found = []
    for name, ranks in GROUPS.items():
        for member, rank in enumerate(ranks):
            found.append((rank, Lane(name, member, "collective")))
            for peer in range(len(ranks)):
                if peer != member:
                    found += [(rank, Lane(name, member, "send", peer)), (rank, Lane(name, member, "receive", peer))]
    return found


LANES = lanes()


def reports(rng: random.Random) -> dict[int, Snapshot]:
    """Often a cut but for one thing, sometimes anything."""
    wild = rng.random() < 0.3
    counts = {lane: rng.randint(0, 2) if wild else 1 for _, lane in LANES}
    for _ in range(rng.choice((0, 0, 1))):
        counts[rng.choice(LANES)[1]] = rng.randint(0, 2)
    held: dict[int, list[Call]] = {rank: [] for rank in range(RANKS)}
    inside: dict[int, list[Call]] = {rank: [] for rank in range(RANKS)}
    for ticket, (rank, lane) in enumerate(rng.sample(LANES, rng.choice((0, 1, 2))), 1):
        held[rank].append(Call(ticket, rng.randrange(2), {lane: 1}))
    if rng.random() < 0.2:
        rank, lane = rng.choice(LANES)
        inside[rank].append(Call(9, 0, {lane: 1}))
    elif rng.random() < 0.2:
        inside[rng.randrange(RANKS)].append(Call(9, 0, destroys=True))
    handles: dict[int, list[Handle]] = {rank: [] for rank in range(RANKS)}
    states = [rng.choice(("creating", "ready", "gone")) if wild else rng.choice(("creating", "ready"))] * 2
    if rng.random() < 0.3:
        states[0] = rng.choice(("creating", "ready", "gone"))
    for name, ranks in GROUPS.items():
        for member, rank in enumerate(ranks):
            handles[rank].append(Handle(name, member, len(ranks)))
    for member, state in enumerate(states[: rng.choice((1, 2, 2, 2))]):
        handles[member].append(Handle("new", member, 2, state))  # type: ignore[arg-type]
        if state == "creating":
            inside[member].append(Call(7, 1, creates=(Creation("new", member, 2),)))
    return {
        rank: Snapshot(
            1,
            5,
            rank,
            admitted={lane: counts[lane] for owner, lane in LANES if owner == rank and counts[lane]},
            held=tuple(held[rank]),
            inside=tuple(inside[rank]),
            entering=int(rng.random() < 0.05),
            handles=tuple(handles[rank]),
            users={"all": 0, "pair": 1},
            undrained=("s",) if rng.random() < 0.1 else (),
        )
        for rank in range(RANKS)
    }


def whole(snapshots: dict[int, Snapshot]) -> bool:
    """No operation is half issued, nobody may issue or submit any, no communicator is made in part."""
    counts = {lane: count for s in snapshots.values() for lane, count in s.admitted.items()}
    for name, ranks in GROUPS.items():
        members = range(len(ranks))
        if len({counts.get(Lane(name, member, "collective"), 0) for member in members}) > 1:
            return False
        for one in members:
            for two in members:
                if counts.get(Lane(name, one, "send", two), 0) != counts.get(Lane(name, two, "receive", one), 0):
                    return False
    new = [handle for s in snapshots.values() for handle in s.handles if handle.communicator == "new"]
    states = {handle.state for handle in new}
    if "creating" in states and states != {"creating"}:
        return False
    if "creating" not in states and len(new) == 1:
        return False
    calls = [call for s in snapshots.values() for call in s.inside]
    return not (any(call.lanes for call in calls) or any(s.entering for s in snapshots.values()))


def decide(snapshots: dict[int, Snapshot], *, draining: bool, now: float = 0.0) -> tuple[Memory, Decision]:
    cut = Cut(SETTINGS)
    memory = msgspec.structs.replace(cut.begin(0.0), draining=draining)
    return cut.decide(memory, snapshots, now)


def test_a_cut_is_accepted_exactly_when_nothing_is_half_done_and_all_streams_are_dry() -> None:
    accepted = 0
    for seed in range(6000):
        snapshots = reports(random.Random(seed))
        dry = not any(snapshot.undrained for snapshot in snapshots.values())
        _, decision = decide(snapshots, draining=True)
        assert isinstance(decision, Accept) == (whole(snapshots) and dry), seed
        _, before = decide(snapshots, draining=False)
        assert isinstance(before, Drain) == whole(snapshots), seed
        accepted += isinstance(decision, Accept)
    assert 500 < accepted < 5000


def test_needs_are_told_to_exactly_those_who_are_behind() -> None:
    for seed in range(2000):
        snapshots = reports(random.Random(seed))
        _, decision = decide(snapshots, draining=False)
        if not isinstance(decision, Wait | Admit):
            continue
        counts = {lane: count for s in snapshots.values() for lane, count in s.admitted.items()}
        told: dict[Any, Any] = {}
        for rank, lane in LANES:
            ranks = GROUPS[lane.communicator]
            others = (
                [lane.partner] if lane.kind != "collective" else [lane._replace(member=m) for m in range(len(ranks))]
            )
            need = max(counts.get(other, 0) for other in others)
            if counts.get(lane, 0) < need:
                told.setdefault(rank, {})[lane] = need
        assert decision.needs == told, seed


def test_whatever_the_reports_the_deadline_decides() -> None:
    for seed in range(1000):
        snapshots = reports(random.Random(seed))
        for draining in (False, True):
            _, decision = decide(snapshots, draining=draining, now=100.0)
            assert isinstance(decision, Abort | Accept), seed


def test_a_slide_is_one_call_or_whole_ones_and_only_after_nothing_has_moved() -> None:
    for seed in range(1000):
        snapshots = reports(random.Random(seed))
        cut, draining = Cut(SETTINGS), seed % 2 == 0
        memory = msgspec.structs.replace(cut.begin(0.0), draining=draining)
        memory, first = cut.decide(memory, snapshots, 0.0)
        assert not (isinstance(first, Admit) and first.slide)
        memory, second = cut.decide(memory, snapshots, 20.0)
        if isinstance(second, Admit) and second.slide:
            for rank, (ticket,) in second.orders.items():
                assert ticket in {call.ticket for call in (*snapshots[rank].held, *snapshots[rank].inside)}
            if len(second.orders) > 1:
                assert {(rank, ticket) for rank, (ticket,) in second.orders.items()} <= Picture(snapshots).whole()
            assert memory.slides == 1


def two(first: Snapshot, second: Snapshot) -> dict[int, Snapshot]:
    return {0: first, 1: second}


HANDLES = [(Handle("c", member, 2),) for member in (0, 1)]
COLLECTIVES = [Lane("c", member, "collective") for member in (0, 1)]


def test_an_exited_rank_that_is_behind_ends_the_attempt_at_once() -> None:
    snapshots = two(
        Snapshot(1, 1, 0, admitted={COLLECTIVES[0]: 2}, handles=HANDLES[0]),
        Snapshot(1, 1, 1, admitted={COLLECTIVES[1]: 1}, handles=HANDLES[1], exited=True),
    )
    _, decision = decide(snapshots, draining=False)
    assert isinstance(decision, Abort)
    assert "rank 1 is behind on communicator c as member 1: 1 of 2 collectives, and it has exited" in decision.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"admitted": {}}, "rank 1 is behind on communicator c as member 1: 0 of 2 collectives"),
        ({"admitted": {COLLECTIVES[1]: 2}, "inside": (Call(1, 0, {COLLECTIVES[1]: 1}),)}, "a call of rank 1 does not"),
        ({"admitted": {COLLECTIVES[1]: 2}, "undrained": ("0x5",)}, "stream 0x5 of rank 1 does not drain"),
    ],
)
def test_an_abort_names_what_was_in_the_way(changes: dict[str, object], reason: str) -> None:
    first = Snapshot(1, 1, 0, admitted={COLLECTIVES[0]: 2}, handles=HANDLES[0])
    second = Snapshot(1, 1, 1, handles=HANDLES[1], **changes)  # type: ignore[arg-type]
    _, decision = decide(two(first, second), draining=True, now=100.0)
    assert isinstance(decision, Abort)
    assert reason in decision.reason
    assert decision.behind or decision.inside or decision.undrained


def test_the_plan_names_what_is_rebuilt_made_again_and_left_alone() -> None:
    states = {"b": ("ready", "ready"), "a": ("ready", "ready"), "n": ("creating", "creating"), "w": ("gone", "ready")}
    snapshots = two(
        *(
            Snapshot(
                1,
                1,
                rank,
                handles=tuple(Handle(name, rank, 2, pair[rank]) for name, pair in states.items()),  # type: ignore[arg-type]
                inside=(Call(1, 0, creates=(Creation("n", rank, 2),)),),
            )
            for rank in (0, 1)
        )
    )
    _, decision = decide(snapshots, draining=True)
    assert decision == Accept(Plan(rebuild=("a", "b"), again=("n",), widowed=("w",)))
