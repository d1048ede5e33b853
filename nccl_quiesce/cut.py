"""The decisions of the cut: pure, from reports to orders. docs/consistent-cut.md has the argument.

The rules, each one a method, in the order in which they are tried:

1. `Gate.owed`: a rank that is behind on a lane goes on with its calls on that lane, as far as is needed (`Cut.needs`).
2. `Gate.pushed`: a rank that is behind goes on with other calls, if they seem in the way (`Cut.pushing`).
3. `Cut.slid`: when nothing has moved for a while, one held call in the whole job goes on.
4. `Cut.accepted`: nobody behind, nobody inside, all streams dry: the cut.
5. The deadline ends it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from moorage.nccl_quiesce.model import (
    Abort,
    Accept,
    Admit,
    Decision,
    Drain,
    Lane,
    Snapshot,
    Wait,
)
from moorage.nccl_quiesce.picture import Held, Picture

Orders: TypeAlias = dict[int, tuple[int, ...]]  #: for each rank the tickets of calls that may go on


def _each(orders: Orders) -> set[Held]:
    return {(rank, ticket) for rank, tickets in orders.items() for ticket in tickets}


class Settings(msgspec.Struct, frozen=True):
    """Times in seconds.

    ``patience``: how long nothing must move while somebody is behind until that is a stall. ``dry``: the same while the
    streams drain; there may be long kernels in them, which nobody sees move, and what slides adds to them. ``growth``:
    where a slide could make things worse, nothing must have moved for this share of the time since the gates closed.
    ``pushing``: for which share of the deadline rule 2 is in force.
    """

    deadline: float = 60.0
    patience: float = 0.02
    dry: float = 1.0
    growth: float = 0.05
    pushing: float = 0.5


class Memory(msgspec.Struct, frozen=True):
    """What is carried from one round to the next. Times as ``now`` counts them."""

    began: float
    moved_at: float
    mark: tuple[int, int] = (-1, -1)
    slides: int = 0
    waiting: dict[Held, int] = {}  #: calls held or inside, numbered in the order in which they were first seen
    draining: bool = False
    worked_at: float = 0.0  #: when a thread with work for a stream slid last, or draining began
    thawed: frozenset[Held] = frozenset()  #: creations that were let through in spite of the drain order


class Cut:
    """The rules. ``seed`` decides between equals.

    Invariants:

    * Safety: `Accept` only for reports of one drain round in which all lanes agree, no thread is inside (but for
      destroys, and creations that stand still and that no member has finished), and no stream has work. While gates are
      closed counts grow only by orders, after a report only below what is needed, and an order is given only when all
      reports to the last one are in; so reports taken at different instants are as good as one instant.
    * Needs only grow, so those of an order are never too high.
    * Economy: rule 1 never lets a rank past what some other rank was let in to, but for the rest of a group or graph.
    * One at a time: a slide is one call, unless all of its calls wait whole.
    * Progress of time: at or after the deadline the decision is `Accept` or `Abort`.
    """

    picture: type[Picture] = Picture

    def __init__(self, settings: Settings | None = None, *, seed: int = 0) -> None:
        self.settings = settings or Settings()
        self.seed = seed

    def begin(self, now: float) -> Memory:
        """The gates are being closed."""
        return Memory(began=now, moved_at=now)

    def decide(self, memory: Memory, snapshots: Mapping[int, Snapshot], now: float) -> tuple[Memory, Decision]:
        """One round: ``snapshots`` of all ranks for the same round, all taken after its orders were obeyed."""
        picture = self.picture(snapshots)
        memory = self._noted(memory, snapshots, now)
        entering = any(snapshot.entering for snapshot in snapshots.values())
        ready = not (
            picture.behind or entering or picture.blocking() or picture.unfinished() or self.thawing(memory, picture)
        )
        if ready and memory.draining and self.accepted(picture):
            return memory, Accept(picture.plan())
        if (abort := self.aborted(memory, picture, now)) is not None:
            return memory, abort
        if ready and not memory.draining:
            return msgspec.structs.replace(memory, draining=True, moved_at=now, worked_at=now), Drain()
        needs, push = self.needs(picture), self.pushing(memory, now)
        orders, slide = self.finishing(memory, picture) if memory.draining else {}, False
        if not orders and (held := self.slid(memory, picture, now)) is not None:
            orders, slide = self.slides(memory, picture, held), True
        if not orders:
            return memory, Wait(needs, push)
        return msgspec.structs.replace(
            memory,
            moved_at=now,
            slides=memory.slides + slide,
            worked_at=now if slide and _each(orders) & picture.work() else memory.worked_at,
            thawed=memory.thawed.union(picture.standing() & _each(orders)),
        ), Admit(orders, slide, needs, push)

    # ---- the rules

    def needs(self, picture: Picture) -> dict[int, dict[Lane, int]]:
        """What rules 1 and 2 go by: for each rank that is behind its lanes and what they need."""
        return {rank: {lane: short.need for lane, short in shorts.items()} for rank, shorts in picture.behind.items()}

    def finishing(self, memory: Memory, picture: Picture) -> Orders:
        """While draining, creations that some members have come through for the others."""
        orders: Orders = {}
        for rank, ticket in sorted(picture.standing(picture.unfinished()) - memory.thawed):
            orders[rank] = (*orders.get(rank, ()), ticket)
        return orders

    def thawing(self, memory: Memory, picture: Picture) -> set[Held]:
        """Creations that were let through and have not come through: they no longer stand still, so they must end."""
        return picture.standing() & memory.thawed

    def pushing(self, memory: Memory, now: float) -> bool:
        """Whether rule 2 is in force. It guesses, so it must end some time; where it does not help a slide does."""
        return now - memory.began < self.settings.pushing * self.settings.deadline

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        """Rule 3. One held call, or None while there is still patience.

        In a true stall the held call that comes first in the program's order waits whole (`Picture.whole`): each of
        its partners stands at the gate as well, or would be waiting for something still earlier. So only such calls
        are let in, the longest waiting first, and every other time one of a rank that a blocked descriptor points to,
        if any does. That leaves nobody behind who was not, even if the stall was none.

        A drain order holds more than the gates do: threads with work for a stream, and creations that all members have
        come to. A stream may wait for one of these, so they wait whole as well (`worked`).

        When none waits whole, somebody is still running, or the program has no order; then any held call, but with
        patience that grows.
        """
        still = now - memory.moved_at
        if still < self.patience(memory):
            return None
        pool = self.eligible(picture)
        if memory.draining:
            pool |= picture.standing(picture.coming()) - memory.thawed
            pool = self.worked(memory, picture, now) or pool - picture.work()
        if not pool:
            if still < self.settings.growth * (now - memory.began):
                return None
            pool = {(rank, call.ticket) for rank, s in picture.snapshots.items() for call in s.held if not call.submits}
        hinted = {held for held in pool if held[0] in self._pointed_to(picture)} if memory.slides % 2 == 0 else set()
        return min(hinted or pool, key=lambda held: (memory.waiting[held], self._lot(memory, held)), default=None)

    def slides(self, memory: Memory, picture: Picture, held: Held) -> Orders:
        """With a call that waits whole goes one of every other rank that is behind and has one.

        They do not harm each other, and ranks of different groups need not wait for each other's slides. In a process
        whose threads take turns (forward here, backward there) rule 2 often knows of none.
        """
        orders: Orders = {}
        whole = set() if memory.draining else self.eligible(picture)
        for rank, ticket in sorted(whole) if held in whole else ():
            if rank in picture.behind:
                orders.setdefault(rank, (ticket,))
        return orders | {held[0]: (held[1],)}

    def eligible(self, picture: Picture) -> set[Held]:
        """Which calls slide first: those that make nobody wait for a rank that is elsewhere."""
        return picture.whole()

    def worked(self, memory: Memory, picture: Picture, now: float) -> set[Held]:
        """While draining: threads with work for a stream slide with patience that grows.

        Until the next order such a thread submits as much as it likes, and the stream may need longer for that than the
        next slide takes to come. So streams get ever more time between two of these.
        """
        due = now - memory.worked_at >= max(self.settings.dry, self.settings.growth * (now - memory.began))
        return picture.work() if due else set()

    def patience(self, memory: Memory) -> float:
        """How long nothing must have moved, in seconds."""
        return self.settings.dry if memory.draining else self.settings.patience

    def accepted(self, picture: Picture) -> bool:
        """Rule 4, the last condition: all streams are dry."""
        return not any(snapshot.undrained for snapshot in picture.snapshots.values())

    def aborted(self, memory: Memory, picture: Picture, now: float) -> Abort | None:
        """Rule 5: the deadline; or at once when a rank that has exited is behind, which nothing can mend."""
        behind = tuple(short for shorts in picture.behind.values() for short in shorts.values())
        lost = tuple(short for short in behind if picture.snapshots[short.rank].exited)
        if lost:
            return Abort(f"{lost[0]}, and it has exited", lost)
        if now - memory.began < self.settings.deadline:
            return None
        inside = tuple(picture.blocking())
        streams = tuple((rank, name) for rank, s in picture.snapshots.items() for name in s.undrained)
        if behind:
            reason = str(behind[0]) + (f", and {len(behind) - 1} more" if len(behind) > 1 else "")
        elif inside:
            reason = f"a call of rank {inside[0][0]} does not return from NCCL"
        elif streams:
            reason = f"stream {streams[0][1]} of rank {streams[0][0]} does not drain"
        else:
            reason = "the ranks would have needed a little more time"
        return Abort(f"no cut within {self.settings.deadline:g} s: {reason}", behind, inside, streams)

    # ---- inner parts

    def _pointed_to(self, picture: Picture) -> set[int]:
        """Ranks that somebody waits for, beginning with the ranks that are behind or whose streams have work."""
        found: set[int] = set()
        queue = [*picture.behind, *(rank for rank, s in picture.snapshots.items() if s.undrained or s.inside)]
        while queue:
            for other in picture.snapshots[queue.pop()].waits_for:
                if other not in found and other in picture.snapshots:
                    found.add(other)
                    queue.append(other)
        return found

    def _noted(self, memory: Memory, snapshots: Mapping[int, Snapshot], now: float) -> Memory:
        mark = (sum(s.moves for s in snapshots.values()), sum(len(s.undrained) for s in snapshots.values()))
        held = [(rank, call.ticket) for rank, s in snapshots.items() for call in (*s.held, *s.inside)]
        following = max(memory.waiting.values(), default=0) + 1
        waiting = {key: memory.waiting.get(key, following) for key in held}
        moved_at = now if mark != memory.mark else memory.moved_at
        return msgspec.structs.replace(memory, mark=mark, waiting=waiting, moved_at=moved_at)

    def _lot(self, memory: Memory, held: Held) -> float:
        return random.Random(f"{self.seed}:{memory.slides}:{held}").random()
