"""Gates, and conversations with them, with one rule taken away, each as a world of its own. All must be caught."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Call, Creation, Lane, Order, Snapshot
from moorage.nccl_quiesce.rounds import Outgoing, Rounds
from tests.support.nccl_sim import World
from tests.support.nccl_sim_parts import Op, Step, Thread

# ---- counting


class CountedAfterTheGate(World):
    """A call is seen and counted only after it has passed the gate."""

    class Gate(Gate):
        def report(self, *arguments: Any, **named: Any) -> Snapshot:
            entering, self.entering = self.entering, {}
            try:
                return super().report(*arguments, **named)
            finally:
                self.entering = entering

    gate = Gate


class GroupsInPieces(World):
    """The parts of a group are handed to NCCL one by one, and held in between."""

    def calls_of(self, step: Step) -> list[tuple[Op, ...]]:
        return [step[1]] if step[2] else [(op,) for op in step[1]]


class CapturesCounted(World):
    """Calls under stream capture are counted and held like any other."""

    def capture(self, thread: Thread, step: Step) -> bool:
        thread.parts = [step[1]]
        self.enter(thread)
        return True

    def begin(self, thread: Thread) -> None:
        if thread.steps[thread.at][0] == "capture":
            self.done(thread)
        else:
            super().begin(thread)


class GraphsNotCounted(World):
    """The launch of a graph is let in, but not counted as what it captured."""

    def lanes_of(self, thread: Thread) -> dict[Lane, int]:
        step = thread.steps[thread.at]
        return {} if step[0] == "call" and step[2] else super().lanes_of(thread)


class ShrinkCountedOverAll(World):
    """A shrink waits for the members that it leaves out."""

    def creations_of(self, step: Step) -> tuple[Creation, ...]:
        creations = super().creations_of(step)
        return tuple(msgspec.structs.replace(c, size=max(c.size, step[2])) for c in creations)


class CountsGoWithTheHandle(World):
    """A destroyed member takes its counts along."""

    class Gate(Gate):
        def destroy(self, communicator: str, member: int) -> None:
            super().destroy(communicator, member)
            for lane in [lane for lane in self.admitted if lane[:2] == (communicator, member)]:
                del self.admitted[lane]

    gate = Gate


class CreationsComeThrough(World):
    """A drain order does not stop creations from coming through."""

    class Gate(Gate):
        def stands(self, ticket: int) -> bool:
            return False

    gate = Gate


class StreamsFillAgain(World):
    """A drain order does not stop threads from submitting work to streams."""

    def stops(self, thread: Thread) -> bool:
        return False


class Grudging(World):
    """The gate that a thread found closed is not looked at again when the call is held."""

    class Gate(Gate):
        def settle(self, ticket: int, was_open: bool) -> bool:
            phase, self.phase = self.phase, "open" if was_open else "cut"
            try:
                return super().settle(ticket, was_open)
            finally:
                self.phase = phase

    gate = Gate


# ---- going on at a closed gate


class NothingOwed(World):
    """Rule 1 is missing."""

    class Gate(Gate):
        def owed(self, call: Call, behind: list[Lane]) -> bool:
            return False

    gate = Gate


class AnyCallOwed(World):
    """Rule 1 lets in whatever a rank that is behind holds, on any communicator."""

    class Gate(Gate):
        def owed(self, call: Call, behind: list[Lane]) -> bool:
            return True

    gate = Gate


class OwedWithoutEnd(World):
    """Rule 1 does not stop at what is needed."""

    class Gate(Gate):
        def _goes_on(self, call: Call) -> bool:
            return super()._goes_on(call) or not call.lanes.keys().isdisjoint(self._needs)

    gate = Gate


class NobodyPushed(World):
    """Rule 2 is missing."""

    class Gate(Gate):
        def pushed(self, call: Call, behind: list[Lane]) -> bool:
            return False

    gate = Gate


class AnyThreadPushed(World):
    """Rule 2 takes any held call of the rank, whichever thread it is of."""

    class Gate(Gate):
        def pushed(self, call: Call, behind: list[Lane]) -> bool:
            return True

    gate = Gate


# ---- orders and reports


class LateOrders(World):
    """A gate obeys an order that is out of date."""

    class Gate(Gate):
        def obey(self, order: Order, *arguments: Any) -> Snapshot | None:
            if (order.attempt, order.round) < (self.attempt, self.round):
                self.attempt, self.round = order.attempt, order.round - 1
            return super().obey(order, *arguments)

    gate = Gate


class LateReports(World):
    """A report to an earlier order counts as one to the last."""

    class Rounds(Rounds):
        def receive(self, report: Snapshot, now: float) -> Outgoing:
            return super().receive(msgspec.structs.replace(report, round=self.round), now)

    rounds_type = Rounds


class StandIns(World):
    """When all ranks but one have reported, the report of the round before stands in for the last one."""

    class Rounds(Rounds):
        def receive(self, report: Snapshot, now: float) -> Outgoing:
            outgoing = super().receive(report, now)
            missing = self.ranks - self._reports.keys()
            if outgoing or len(missing) != 1 or not self._last or self.result is not None:
                return outgoing
            return super().receive(msgspec.structs.replace(self._last[min(missing)], round=self.round), now)

    rounds_type = Rounds


class NeverAgain(World):
    """An order that is lost is not sent again."""

    class Rounds(Rounds):
        def tick(self, now: float) -> Outgoing:
            before = self.round
            outgoing = super().tick(now)
            return outgoing if self.round != before else []

    rounds_type = Rounds


WORLDS: list[type[World]] = [
    CountedAfterTheGate,
    GroupsInPieces,
    CapturesCounted,
    GraphsNotCounted,
    ShrinkCountedOverAll,
    CountsGoWithTheHandle,
    CreationsComeThrough,
    StreamsFillAgain,
    Grudging,
    NothingOwed,
    AnyCallOwed,
    OwedWithoutEnd,
    NobodyPushed,
    AnyThreadPushed,
    LateOrders,
    LateReports,
    StandIns,
    NeverAgain,
]
