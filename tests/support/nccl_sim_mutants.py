"""The cut with one rule taken away, each as a class of its own. Every one of these must be caught."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from moorage.nccl_quiesce.cut import Cut, Memory, Orders
from moorage.nccl_quiesce.model import Abort, Call, Lane, Plan, Snapshot
from moorage.nccl_quiesce.picture import Held, Picture

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


class PushedForEver(Cut):
    """Rule 2 is in force until the end."""

    def pushing(self, memory: Memory, now: float) -> bool:
        return True


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

    def finishing(self, memory: Memory, picture: Picture) -> Orders:
        return {}


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


class OneSlides(Cut):
    """Rule 3 takes one call in the whole job, also of those that wait whole."""

    def slides(self, memory: Memory, picture: Picture, held: Held) -> Orders:
        return {held[0]: (held[1],)}


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


class NoPatience(Cut):
    """Rule 3 does not wait until nothing has moved for a while."""

    def patience(self, memory: Memory) -> float:
        return 0.0


# ---- ending


class WetStreams(Cut):
    """Streams are not looked at."""

    def accepted(self, picture: Picture) -> bool:
        return True


class NoDeadline(Cut):
    """Rule 5 is missing."""

    def aborted(self, memory: Memory, picture: Picture, now: float) -> Abort | None:
        return None


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
    PushedForEver,
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
    OneSlides,
    NewestSlides,
    OnlyHints,
    NoGrowth,
    NoPatience,
    WetStreams,
    NoDeadline,
]
