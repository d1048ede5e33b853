"""The cut with one rule taken away, each as a class of its own. Every one of these must be caught."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moorage.nccl_quiesce.cut import Cut, Memory, Orders
from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Abort, Call, Creation, Lane, Plan, Snapshot
from moorage.nccl_quiesce.picture import Held, Picture
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


# ---- needs


class HeldRaisesNeed(Cut):
    """What is held at the gate counts as needed."""

    class picture(Picture):
        def counted(self, snapshot: Snapshot) -> Mapping[Lane, int]:
            counts = dict(snapshot.admitted)
            for call in snapshot.held:
                for lane, number in call.lanes.items():
                    counts[lane] = counts.get(lane, 0) + number
            return counts

        def _behind(self):  # type: ignore[no-untyped-def]
            wanted, self.counts = self.need(), dict(self.counts)
            needs = list(wanted)
            self.counts = {lane: n for s in self.snapshots.values() for lane, n in s.admitted.items()}
            self.need = lambda: iter(needs)  # type: ignore[method-assign]
            return super()._behind()


class OwnCountsOnly(Cut):
    """Nobody is behind: the needs of others are not looked at."""

    class picture(Picture):
        def need(self) -> Iterator[tuple[Lane, int]]:
            return iter(())


class SendsNeedNoReceives(Cut):
    """Only collectives raise needs."""

    class picture(Picture):
        def need(self) -> Iterator[tuple[Lane, int]]:
            return (pair for pair in super().need() if pair[0].kind == "collective")


class SendsOnly(Cut):
    """Receives do not raise what their sender needs."""

    class picture(Picture):
        def need(self) -> Iterator[tuple[Lane, int]]:
            return (pair for pair in super().need() if pair[0].kind != "send")


class InsideIsFine(Cut):
    """Threads inside NCCL do not stand in the way of a cut."""

    class picture(Picture):
        def blocking(self) -> list[tuple[int, Call]]:
            return []


class HalfMadeIsFine(Cut):
    """A communicator that some members have and others do not is no obstacle."""

    class picture(Picture):
        def unfinished(self) -> set[str]:
            return set()


class CreationsBlock(Cut):
    """A creation that no member has finished is waited for, not taken back."""

    class picture(Picture):
        def takeable(self, call: Call) -> bool:
            return call.destroys


class CreationsAreLeft(Cut):
    """Creations that no member has finished are not taken back."""

    class picture(Picture):
        def plan(self) -> Plan:
            return msgspec.structs.replace(super().plan(), again=())


class DestroysBlock(Cut):
    """A destroy that waits for other members is waited for."""

    class picture(Picture):
        def takeable(self, call: Call) -> bool:
            return not call.destroys and super().takeable(call)


# ---- moving


class NothingOwed(Cut):
    """Rule 1 is missing."""

    def owed(self, picture: Picture, rank: int) -> list[int]:
        return []


class AnyCallOwed(Cut):
    """Rule 1 lets in whatever a rank that is behind holds, on any communicator."""

    def owed(self, picture: Picture, rank: int) -> list[int]:
        return [call.ticket for call in picture.snapshots[rank].held]


class NobodyPushed(Cut):
    """Rule 2 is missing."""

    def pushed(self, picture: Picture, rank: int) -> int | None:
        return None


class AnyThreadPushed(Cut):
    """Rule 2 takes any held call of the rank, whichever thread it is of."""

    def pushed(self, picture: Picture, rank: int) -> int | None:
        held = picture.snapshots[rank].held
        return held[0].ticket if held else None


class NoSlide(Cut):
    """Rule 3 is missing."""

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        return None


class NoSlideWhileDraining(Cut):
    """A stream that does not drain is not a stall."""

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        return None if memory.draining else super().slid(memory, picture, now)


class CreationsStandForEver(Cut):
    """What a drain order stops besides the gates, creations, never slides."""

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        picture.coming = set  # type: ignore[method-assign]
        return super().slid(memory, picture, now)


class HalfMadeStandForEver(Cut):
    """A creation that came through at some members stands still at the others."""

    def orders(self, memory: Memory, picture: Picture, now: float) -> Orders:
        return super().orders(msgspec.structs.replace(memory, draining=False), picture, now)


class WorkIsHeldForEver(Cut):
    """Threads with work for a stream, which only a drain order holds, never slide."""

    def worked(self, memory: Memory, picture: Picture, now: float) -> set[Held]:
        return set()


class WorkSlidesLikeCalls(Cut):
    """Threads with work for a stream slide as often as calls do."""

    def worked(self, memory: Memory, picture: Picture, now: float) -> set[Held]:
        return picture.whole()


class ThawedIsFine(Cut):
    """A creation that was let through may be taken back all the same."""

    def thawing(self, memory: Memory, picture: Picture) -> set[Held]:
        return set()


class AnyCreationSlides(Cut):
    """A creation slides as soon as one of the communicators in its group can come through."""

    class picture(Picture):
        def _made_together(self) -> Iterator[set[str]]:
            return iter(())


class NoHints(Cut):
    """Rule 3 does not look at whom anybody waits for."""

    def _pointed_to(self, picture: Picture) -> set[int]:
        return set()


class AnySlides(Cut):
    """Rule 3 takes any held call, those first whose communicators have nobody behind, and at random among these."""

    def eligible(self, picture: Picture) -> set[Held]:
        disturbed = {lane.communicator for shorts in picture.behind.values() for lane in shorts}
        calls = {(rank, call.ticket): call for rank, s in picture.snapshots.items() for call in s.held}
        calm = {held for held, call in calls.items() if not disturbed & {lane.communicator for lane in call.lanes}}
        return calm or set(calls)

    def _noted(self, memory: Memory, snapshots: Mapping[int, Snapshot], now: float) -> Memory:
        noted = super()._noted(memory, snapshots, now)
        return msgspec.structs.replace(noted, waiting=dict.fromkeys(noted.waiting, 0))


class NewestSlides(Cut):
    """Rule 3 takes the call that has waited for the shortest time."""

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        waiting = {held: -number for held, number in memory.waiting.items()}
        return super().slid(msgspec.structs.replace(memory, waiting=waiting), picture, now)


class OnlyHints(Cut):
    """Rule 3 follows hints every time, not every other time."""

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        return super().slid(msgspec.structs.replace(memory, slides=0), picture, now)


class NoGrowth(Cut):
    """Patience does not grow."""

    def __init__(self, *arguments, **named) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*arguments, **named)
        self.settings = msgspec.structs.replace(self.settings, growth=0.0)


# ---- ending


class WetStreams(Cut):
    """Streams are not looked at."""

    def accepted(self, picture: Picture) -> bool:
        return True


class NoDeadline(Cut):
    """Rule 5 is missing."""

    def aborted(self, memory: Memory, picture: Picture, now: float) -> Abort | None:
        return None


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
]
CUTS: list[type[Cut]] = [
    HeldRaisesNeed,
    OwnCountsOnly,
    SendsNeedNoReceives,
    SendsOnly,
    InsideIsFine,
    HalfMadeIsFine,
    CreationsBlock,
    CreationsAreLeft,
    DestroysBlock,
    NothingOwed,
    AnyCallOwed,
    NobodyPushed,
    AnyThreadPushed,
    NoSlide,
    NoSlideWhileDraining,
    CreationsStandForEver,
    HalfMadeStandForEver,
    WorkIsHeldForEver,
    WorkSlidesLikeCalls,
    ThawedIsFine,
    AnyCreationSlides,
    NoHints,
    AnySlides,
    NewestSlides,
    OnlyHints,
    NoGrowth,
    WetStreams,
    NoDeadline,
]
