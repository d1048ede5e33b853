"""What is made anew after a cut, in which order and by whom, from what the processes say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest

from moorage.errors import CorruptData
from moorage.nccl_quiesce import control, rebuild, wire
from moorage.nccl_quiesce.control import Destroy, Process
from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.model import Accept, Call, Creation, Drain, Handle, Lane, Order, Snapshot
from tests.support.nccl_stub import report

State = Literal["creating", "ready", "gone"]


def process(
    number: int,
    handles: Mapping[tuple[str, int], tuple[int, State]],
    *,
    torn: bool = True,
    closed: bool = True,
    rank: int = -1,
    attempt: int = 4,
    again: tuple[str, ...] = (),
    widowed: tuple[str, ...] = (),
) -> Process:
    held = tuple(Handle(name, member, size, state) for (name, member), (size, state) in handles.items())
    snapshot = Snapshot(attempt=attempt, round=2, rank=rank, handles=held)
    return Process(number, number, "python", rank, closed, torn, snapshot, again, widowed)


def test_all_that_all_members_have_is_made_anew_in_one_order_by_the_lowest_member() -> None:
    found = {
        10: process(10, {("b", 1): (2, "ready"), ("a", 0): (2, "ready")}),
        11: process(11, {("a", 1): (2, "ready"), ("b", 0): (2, "ready"), ("b/s1.0", 0): (1, "ready")}),
    }
    plan = rebuild.plan(found)
    assert plan is not None
    assert plan.order == ("a", "b", "b/s1.0")
    assert {number: names.names for number, names in plan.names().items()} == {10: ("a",), 11: ("b", "b/s1.0")}
    ids = {name: name.encode() for name in plan.order}
    told = plan.make(ids)
    assert told[10] == told[11]
    assert [name for name, _ in told[10].communicators] == list(plan.order)
    assert plan.destroy(found)[10] == Destroy(4, abort=True)


def test_nobody_lacks_anything_so_nothing_is_made() -> None:
    assert rebuild.plan({1: process(1, {("a", 0): (1, "ready")}, torn=False)}) is None
    assert rebuild.plan({}) is None


def test_a_rebuild_that_was_broken_off_begins_again_with_all() -> None:
    found = {
        1: process(1, {("a", 0): (2, "ready")}, torn=False),
        2: process(2, {("a", 1): (2, "ready")}),
        3: process(3, {("new", 0): (1, "ready")}, torn=False, closed=False),
    }
    plan = rebuild.plan(found)
    assert plan is not None
    assert plan.order == ("a",)
    assert set(plan.destroy(found)) == {1, 2}, "who came later has no part in it"


def test_widows_and_creations_that_were_taken_back() -> None:
    found = {
        1: process(1, {("a", 0): (2, "ready"), ("exited", 0): (2, "ready")}, again=("id-1", "a/s2")),
        2: process(2, {("a", 1): (2, "gone")}, again=("id-1",), widowed=("a",)),
    }
    plan = rebuild.plan(found)
    assert plan is not None
    assert (plan.order, plan.widowed, plan.again) == ((), ("a", "exited"), ("a/s2", "id-1"))
    # Without having been a widow at the cut it was destroyed since: both must come to its creation once more.
    found[2] = process(2, {("a", 1): (2, "gone")}, again=("id-1",))
    later = rebuild.plan(found)
    assert later is not None and later.order == ("a",) and later.widowed == ("exited",)
    assert plan.makers == {"id-1": 1}, "a split is made from its parent and needs no id"
    told = plan.make({"id-1": b"fresh"})
    assert told[2].again == (("id-1", b"fresh"),)
    assert plan.destroy(found)[1].own == ("id-1", "a/s2")


def test_what_each_process_is_told_at_the_cut() -> None:
    found = {
        1: process(1, {("c", 0): (2, "creating")}, torn=False),
        2: process(2, {("a", 0): (1, "ready")}, torn=False),
    }
    cut = rebuild.Survivors({number: one.report for number, one in found.items()}).plan()
    told = rebuild.parts(cut, 9, found)
    assert told[1] == Destroy(9, ("c",), ("c",), ()) and told[2] == Destroy(9, ("c",), (), ())


def test_a_member_that_went_with_its_process_does_not_keep_the_others_from_a_cut() -> None:
    class Surviving(Cut):
        picture = rebuild.Survivors

    for cut, accepted in ((Surviving(Settings()), True), (Cut(Settings()), False)):
        handles = (Handle("a", 0, 2),)
        snapshots = {0: Snapshot(attempt=1, round=1, rank=0, admitted={Lane("a", 0, "collective"): 3}, handles=handles)}
        memory, decision = cut.decide(cut.begin(0.0), snapshots, 0.0)
        if accepted:
            assert isinstance(decision, Drain)
            memory, decision = cut.decide(memory, snapshots, 0.1)
        assert isinstance(decision, Accept) == accepted
        if isinstance(decision, Accept):
            assert decision.plan.widowed == ("a",) and not decision.plan.rebuild


def test_one_that_is_being_made_is_waited_for() -> None:
    half = {
        0: Snapshot(attempt=1, round=1, rank=0, handles=(Handle("a", 0, 2, "ready"),)),
        1: Snapshot(attempt=1, round=1, rank=1, handles=(Handle("a", 1, 2, "creating"),)),
    }
    assert rebuild.Survivors(half).unfinished() == {"a"}


def test_numbers_in_the_cut() -> None:
    ranks = {
        5: process(5, {}, rank=1),
        6: process(6, {("a", 0): (1, "ready")}, rank=1),
        7: process(7, {}, rank=0),
        8: process(8, {}, rank=99),
        9: process(9, {}),
    }
    assert rebuild.numbered(ranks, 4) == {6: 1, 7: 0, 5: 4, 8: 5, 9: 6}


def test_who_can_have_communicators() -> None:
    def has(env: dict[str, str], *, gpus: int, ranks: int) -> bool:
        """However the ranks are spread over pods."""
        apart = control.has_communicators(env, gpus=gpus, pods=ranks, ranks_per_pod=0)
        together = control.has_communicators(env, gpus=gpus, pods=1, ranks_per_pod=ranks)
        assert apart == together
        return together

    assert has({}, gpus=1, ranks=2) and has({}, gpus=2, ranks=1)
    assert not has({}, gpus=1, ranks=1) and not has({}, gpus=0, ranks=8)
    assert has({"MOORAGE_NCCL": "1"}, gpus=0, ranks=2) and has({"MOORAGE_NCCL": "1"}, gpus=1, ranks=1)
    assert not has({"MOORAGE_NCCL": "0"}, gpus=8, ranks=8)


def test_everything_travels() -> None:
    lane = Lane("a", 0, "send", 1)
    call = Call(3, 77, {lane: 2}, (Creation("b", 0, 2),), destroys=True)
    snapshot = Snapshot(
        attempt=1,
        round=2,
        rank=-1,
        admitted={lane: 4},
        held=(call,),
        inside=(call,),
        entering=1,
        handles=(Handle("a", 0, 2, "gone"),),
        users={"a": 77},
        moves=9,
        undrained=("s",),
    )
    one = Process(1, 2, "x", 3, closed=True, torn=False, report=snapshot, again=("b",))
    assert control.decode(control.encode(one), Process) == one
    order = Order(1, 2, "cut", (3,), {lane: 4}, push=True)
    assert control.decode(control.encode(order), Order) == order
    told = wire.from_process(wire.pack(report(8, snapshot, []))[wire.HEADER_SIZE :])
    assert isinstance(told, wire.Report) and told.snapshot(-1) == snapshot
    with pytest.raises(CorruptData, match="no Order of the consistent cut"):
        control.decode(b"\x01", Order)
