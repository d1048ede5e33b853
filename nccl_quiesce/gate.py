"""What stands at the entry of NCCL in each process: the counts and the gate. The reference for the library in the pod.

No locks here: each method is one step that nothing interrupts. Two threads may be between two methods at any time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

from moorage.nccl_quiesce.model import Call, Creation, Handle, Lane, Order, Phase, Snapshot


class Gate:
    """Counts calls, holds them while it is closed, lets them go on by ticket.

    A call takes `enter`, `look`, `settle`, then (once it was let in) NCCL, then `leave`. ``let_in`` is called with each
    ticket that an order admits, or that was held when the gate opens; ``thawed`` when creations that stood still may go
    on.

    Invariants:

    * Seen first: from `enter` on, before it looks at the gate, a call is in the report: as entering until `settle`,
      then as held, or as inside and counted in ``admitted`` until `leave`. So every report after the closing shows
      whatever looked at the gate while it was open. (A library without locks counts at `enter`, and takes off in a
      report what is held and what has not settled.)
    * While the gate is closed ``admitted`` grows only by the tickets of an order, and as long as a count is below what
      the newest order says that it needs. So no more when all counts are what is needed.
    * `obey` carries out each round at most once, whatever is late, doubled or lost; an attempt that is over stays over.
    * Calls under stream capture never come here; destroys do not either, except to be seen (`destroy`).
    """

    def __init__(self, rank: int, let_in: Callable[[int], None], thawed: Callable[[], None] = lambda: None) -> None:
        self.rank = rank
        self._let_in, self._thawed = let_in, thawed
        self.attempt = self.round = self.moves = 0
        self.phase: Phase = "open"
        self.admitted: dict[Lane, int] = {}
        self.held: dict[int, Call] = {}
        self.entering: dict[int, Call] = {}
        self.inside: dict[int, Call] = {}
        self.handles: dict[tuple[str, int], Handle] = {}
        self.users: dict[str, int] = {}
        self.exited = False
        self._thaw: set[int] = set()  #: creations that may come through
        self._free: dict[int, Call] = {}  #: threads that may submit work until the next order
        self._needs: dict[Lane, int] = {}
        self._push = False
        self._tickets = itertools.count(1)

    # ---- what the job's threads do

    def enter(
        self, thread: int, lanes: dict[Lane, int], creates: tuple[Creation, ...] = (), *, destroys: bool = False
    ) -> int:
        """Show a call, before the gate is looked at; returns its ticket."""
        call = Call(next(self._tickets), thread, lanes, creates, destroys)
        self.moves += 1
        self.entering[call.ticket] = call
        return call.ticket

    def look(self) -> bool:
        """Whether the gate is open just now. The thread may be interrupted before it acts on the answer."""
        return self.phase == "open"

    def settle(self, ticket: int, was_open: bool) -> bool:
        """Act on the look: True: the call goes on, counted; False: it is held, and ``let_in`` will name it.

        A gate that was closed is looked at again, in the same step that holds the call: it may have opened meanwhile.
        """
        call = self.entering.pop(ticket)
        self.moves += 1
        if was_open or call.destroys or self.phase == "open" or self._goes_on(call):
            self._begin(call)
            return True
        self.held[ticket] = call
        return False

    def leave(self, ticket: int) -> None:
        """The call returned from NCCL; what it created is the job's from now on."""
        self.moves += 1
        call = self.inside.pop(ticket)
        for creation in call.creates:
            self._handle(creation, "ready")
            self.users.setdefault(creation.communicator, call.thread)

    def submit(self, thread: int) -> int | None:
        """A thread has work for a stream. None: it may submit it; otherwise it is held, and ``let_in`` will name this.

        One step with the submission itself: a library counts a thread between the two as entering.
        """
        if self.phase != "drain" or thread in self._free:
            return None
        self.moves += 1
        ticket = next(self._tickets)
        self.held[ticket] = Call(ticket, thread, submits=True)
        return ticket

    def destroy(self, communicator: str, member: int) -> None:
        """The job gave a member up; its counts stay."""
        self.moves += 1
        old = self.handles[communicator, member]
        self.handles[communicator, member] = Handle(communicator, member, old.size, "gone")

    def take_back(self, ticket: int) -> None:
        """A creation that no member finished is undone, as if it had never entered."""
        self.moves += 1
        for creation in self.inside.pop(ticket).creates:
            del self.handles[creation.communicator, creation.member]

    # ---- what the coordinator does

    def stands(self, ticket: int) -> bool:
        """Whether a creation must not come through: its result is not looked at."""
        return self.phase == "drain" and ticket not in self._thaw

    def obey(self, order: Order, undrained: Callable[[], tuple[str, ...]]) -> Snapshot | None:
        """Carry out an order and report; None for an order that is out of date."""
        if (order.attempt, order.round) < (self.attempt, self.round):
            return None
        if (order.attempt, order.round) > (self.attempt, self.round):
            if order.attempt > self.attempt:
                self._thaw.clear()
            self.attempt, self.round = order.attempt, order.round
            self.phase = order.phase
            self._free.clear()
            self._needs, self._push = order.needs, order.push
            for ticket in order.admit if order.phase != "open" else tuple(self.held):
                if ticket in self.held:
                    self._admit(ticket)
                elif ticket in self.inside:
                    self._thaw.add(ticket)
            for ticket, call in tuple(self.held.items()) if self._needs else ():
                if ticket in self.held and self._goes_on(call):
                    self._admit(ticket)
            if order.admit or order.phase == "open":
                self._thawed()
        return self.report(undrained() if self.phase == "drain" else ())

    def report(self, undrained: tuple[str, ...] = (), waits_for: tuple[int, ...] = ()) -> Snapshot:
        """The process as it is now."""
        return Snapshot(
            attempt=self.attempt,
            round=self.round,
            rank=self.rank,
            admitted=dict(self.admitted),
            held=tuple(self.held.values()),
            entering=len(self.entering) + len(self._free),
            inside=tuple(self.inside.values()),
            handles=tuple(self.handles.values()),
            users=dict(self.users),
            waits_for=waits_for,
            moves=self.moves,
            undrained=undrained,
            exited=self.exited,
        )

    # ---- inner parts

    def _goes_on(self, call: Call) -> bool:
        """Whether a call goes on at a closed gate: rules 1 and 2 of the cut, as far as needs are known here."""
        behind = [lane for lane, need in self._needs.items() if self.admitted.get(lane, 0) < need]
        return bool(behind) and (self.owed(call, behind) or (self._push and self.pushed(call, behind)))

    def owed(self, call: Call, behind: list[Lane]) -> bool:
        """Rule 1. A call on a lane on which the process is behind; of a group or graph any lane counts."""
        return any(lane in call.lanes for lane in behind)

    def pushed(self, call: Call, behind: list[Lane]) -> bool:
        """Rule 2. The call that is missing will come from some thread, and one that is held may be in its way.

        It most likely is if that thread used such a communicator last. If another thread did, that one is running, or
        blocked inside NCCL by a partner that is behind, and comes by itself. Moving the wrong thread takes the rank
        ahead elsewhere, its partners fall behind, and two ranks could push each other for ever.
        """
        return any(self.users.get(lane.communicator) == call.thread for lane in behind)

    def _admit(self, ticket: int) -> None:
        call = self.held.pop(ticket)
        self.moves += 1
        if call.submits:
            self._free[call.thread] = call
        else:
            self._begin(call)
        self._let_in(ticket)

    def _begin(self, call: Call) -> None:
        self.inside[call.ticket] = call
        for lane, number in call.lanes.items():
            self.admitted[lane] = self.admitted.get(lane, 0) + number
            self.users[lane.communicator] = call.thread
        for creation in call.creates:
            self._handle(creation, "creating")

    def _handle(self, creation: Creation, state: Literal["creating", "ready"]) -> None:
        key = creation.communicator, creation.member
        self.handles[key] = Handle(*key, creation.size, state)
