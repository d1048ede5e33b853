"""The decisions of the cut: pure, from reports to orders. docs/consistent-cut.md has the argument.

The rules, each one a method, in the order in which they are tried:

1. `Cut.owed`: a rank that is behind on a lane gets as many of its held calls on that lane as it is behind, no more.
2. `Cut.pushed`: a rank that is behind and holds no such call gets one of its held calls, if that surely stands in the
way.
3. `Cut.slid`: when nothing has moved for a while, one held call in the whole job goes on.
4. `Cut.accepted`: nobody behind, nobody inside, all streams dry: the cut.
5. The deadline ends it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from moorage.nccl_quiesce.model import (
    Abort,
    Accept,
    Admit,
    Call,
    Decision,
    Drain,
    Resume,
    Snapshot,
    Wait,
)
from moorage.nccl_quiesce.picture import Held, Picture


class Settings(msgspec.Struct, frozen=True):
    """Times in seconds.

    ``patience``: nothing moves for so long: a stall, where a hint says who is waited for. ``growth``: without a hint
    also
    this share of the time since the gates closed, so that a job with slow ranks outruns the slides in the end.
    ``doubt``: how many times longer than that when no operation waits whole, which hardly is a true stall.
    """

    deadline: float = 60.0
    patience: float = 0.02
    growth: float = 0.05
    doubt: float = 4.0


class Memory(msgspec.Struct, frozen=True):
    """What is carried from one round to the next."""

    began: float
    moved_at: float
    mark: tuple[int, int] = (-1, -1)
    draining: bool = False
    drain_after: float = 0.0
    slides: int = 0
    waiting: dict[Held, int] = {}  #: held calls, numbered in the order in which they were first seen


class Cut:
    """The rules. ``ranks``: all ranks of the job; ``seed`` decides between equals.

    Invariants:

    * Safety: `Accept` only for reports of one drain round in which all lanes agree, no thread is inside (but for
    destroys
      and creations that no member has finished), and no stream has work. While gates are closed counts grow only by
      orders, and an order is given only when all reports to the last one are in; so reports taken at different instants
      are as good as one instant.
    * Economy: rule 1 never lets a rank past what some other rank was let in to.
    * One at a time: a slide is one call, and nothing else is ordered in that round.
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
        ready = not picture.behind and not picture.blocking() and not picture.unfinished()
        if ready and memory.draining and self.accepted(picture):
            return memory, Accept(picture.plan())
        if (abort := self.aborted(memory, picture, now)) is not None:
            return memory, abort
        if ready and not memory.draining:
            if now < memory.drain_after:
                return memory, Wait()
            return msgspec.structs.replace(memory, draining=True, moved_at=now), Drain()
        if picture.behind and (orders := self._orders(picture, memory)):
            return self._moved(memory, now), Admit(orders)
        if memory.draining and (picture.unfinished() or self.stopped(memory, picture, now)):
            pause = max(self.settings.patience, self.settings.growth * (now - memory.began))
            return msgspec.structs.replace(self._moved(memory, now), drain_after=now + pause), Resume()
        if (held := self.slid(memory, picture, now)) is not None:
            slides = memory.slides + 1
            return msgspec.structs.replace(self._moved(memory, now), slides=slides), Admit({held[0]: (held[1],)}, True)
        return memory, Wait()

    # ---- the rules

    def owed(self, picture: Picture, rank: int) -> list[int]:
        """Rule 1. Tickets in the order of entry, on each lane at most as many operations as the rank is behind.

        A call that touches several lanes (a group, a graph) goes on when the rank is behind on any of them.
        """
        left = {lane: short.need - short.count for lane, short in picture.behind[rank].items()}
        tickets = []
        for call in picture.snapshots[rank].held:
            if any(left.get(lane, 0) > 0 for lane in call.lanes):
                tickets.append(call.ticket)
                for lane, number in call.lanes.items():
                    left[lane] = left.get(lane, 0) - number
        return tickets

    def pushed(self, picture: Picture, rank: int, lanes: set[str]) -> int | None:
        """Rule 2. ``lanes``: communicators that the rank is behind on (empty: it is awaited in a creation).

        The call that is missing will come from some thread. If the thread that used such a communicator last is held
        elsewhere, that call is in the way. If another thread did, and it is not held, it may be just coming: moving the
        wrong thread takes the rank ahead elsewhere, its partners fall behind, and two ranks can push each other for
        ever.
        When all threads of the rank that use NCCL are held or inside, one of them must move.
        """
        snapshot = picture.snapshots[rank]
        if not snapshot.held:
            return None
        users = {snapshot.users[name] for name in lanes if name in snapshot.users}
        for call in snapshot.held:
            if call.thread in users:
                return call.ticket
        if len(snapshot.held) + len(snapshot.inside) < snapshot.threads:
            return None
        return snapshot.held[0].ticket

    def slid(self, memory: Memory, picture: Picture, now: float) -> Held | None:
        """Rule 3. One held call, or None while there is still patience.

        In a true stall the held call that comes first in the program's order waits whole (`Picture.whole`): each of its
        partners stands at the gate as well, or would be waiting for something still earlier. So only such calls are
        let in, the longest waiting first, and every other time one of a rank that a blocked descriptor points to, if
        any
        does. When none waits whole somebody is probably still running: after more patience any held call, those first
        whose communicators have nobody behind.
        """
        still = now - memory.moved_at
        if still < self.settings.patience:
            return None
        candidates = {(rank, call.ticket): call for rank, s in picture.snapshots.items() for call in s.held}
        if not candidates:
            return None
        patience = max(self.settings.patience, self.settings.growth * (now - memory.began))
        pool = self.eligible(picture, candidates)
        if not pool:
            patience *= self.settings.doubt
            pool = self.undisturbed(picture, candidates) or set(candidates)
        hinted = {held for held in pool if held[0] in self._pointed_to(picture)} if memory.slides % 2 == 0 else set()
        if not hinted and still < patience:
            return None
        return min(hinted or pool, key=lambda held: (memory.waiting[held], self._lot(memory, held)))

    def stopped(self, memory: Memory, picture: Picture, now: float) -> bool:
        """Whether a stall while draining may be the drain order's own doing, which stops more than the gates do.

        A stream can wait for a thread that stands in a creation, or that has work for a stream and may not submit it.
        """
        if now - memory.moved_at < self.settings.patience:
            return False
        return picture.coming() or any(snapshot.stopped for snapshot in picture.snapshots.values())

    def eligible(self, picture: Picture, candidates: Mapping[Held, Call]) -> set[Held]:
        """Calls that may be let in without making anybody wait for a rank that is elsewhere."""
        return picture.whole()

    def undisturbed(self, picture: Picture, candidates: Mapping[Held, Call]) -> set[Held]:
        """Calls on communicators with nobody behind."""
        disturbed = {lane.communicator for shorts in picture.behind.values() for lane in shorts}
        return {
            held for held, call in candidates.items() if not any(lane.communicator in disturbed for lane in call.lanes)
        }

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

    def _orders(self, picture: Picture, memory: Memory) -> dict[int, tuple[int, ...]]:
        orders: dict[int, tuple[int, ...]] = {}
        queue: list[tuple[int, set[str]]] = []
        for rank, shorts in picture.behind.items():
            if tickets := self.owed(picture, rank):
                orders[rank] = tuple(tickets)
            else:
                queue.append((rank, {lane.communicator for lane in shorts}))
        seen = set(picture.behind)
        while queue:
            rank, lanes = queue.pop()
            if (ticket := self.pushed(picture, rank, lanes)) is not None:
                orders[rank] = (ticket,)
            for other in picture.awaited(rank) - seen:
                seen.add(other)
                queue.append((other, set()))
        return orders

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
        held = [(rank, call.ticket) for rank, s in snapshots.items() for call in s.held]
        following = max(memory.waiting.values(), default=0) + 1
        waiting = {key: memory.waiting.get(key, following) for key in held}
        moved_at = now if mark != memory.mark else memory.moved_at
        return msgspec.structs.replace(memory, mark=mark, waiting=waiting, moved_at=moved_at)

    def _moved(self, memory: Memory, now: float) -> Memory:
        return msgspec.structs.replace(memory, moved_at=now, draining=False)

    def _lot(self, memory: Memory, held: Held) -> float:
        return random.Random(f"{self.seed}:{memory.slides}:{held}").random()
