"""The conversation between the coordinator and the gates: rounds of orders and reports until there is a cut or none.

Without clock, socket or task: messages and times go in, messages come out. `driver.run` drives it over a transport.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from moorage.nccl_quiesce.cut import Cut
from moorage.nccl_quiesce.model import Abort, Accept, Admit, Drain, Lane, Order, Phase, Snapshot, Wait

#: What goes out: the rank that it is for, and its order.
Outgoing = list[tuple[int, Order]]


class Pace(msgspec.Struct, frozen=True):
    """Times in seconds. While nothing happens, rounds come after ``shortest``, then ever later, up to ``longest``.

    ``again``: an order is sent again when no report came for so long.
    """

    shortest: float = 0.0005
    longest: float = 0.02
    again: float = 0.1


class Rounds:
    """One attempt to cut one job, without I/O.

    Each method takes the time and returns what is to be sent. A round is over when every rank has reported to its
    order; only then is the next one decided, from these reports alone. Hence:

    * A doubled or late report changes nothing: the first one of the current round counts.
    * A lost order or report costs `Pace.again`; the gate obeys each round once, however often it is sent.
    * Orders in flight are always of one round, so a decision never meets reports from before an order it has given.
    * Whatever happens, at the deadline there is a decision, also when ranks do not answer at all.

    ``result`` is None until the attempt is decided. After `Accept` the gates stay closed until `release`; after
    `Abort` they are told to open at once, again and again until all have confirmed (``released``).
    """

    def __init__(self, ranks: Iterable[int], *, attempt: int, cut: Cut, pace: Pace | None = None) -> None:
        self.ranks = frozenset(ranks)
        self.attempt, self.cut, self.pace = attempt, cut, pace or Pace()
        self.round = self.slides = 0
        self.result: Accept | Abort | None = None
        self.released = False
        #: When `tick` must be called next.
        self.wake = 0.0
        self._orders: dict[int, Order] = {}
        self._reports: dict[int, Snapshot] = {}
        self._last: dict[int, Snapshot] = {}  #: all reports of the last round that is over
        self._sent = 0.0
        self._next: Wait | Drain | None = None
        self._needs: dict[int, dict[Lane, int]] = {}  #: of the last orders
        self._pause = self.pace.shortest

    def start(self, now: float) -> Outgoing:
        """Close the gates."""
        self.memory = self.cut.begin(now)
        return self._send("cut", {}, now)

    def release(self, now: float) -> Outgoing:
        """Open the gates: after a cut, once the communicators stand again, or to give the attempt up.

        Without an accepted cut the attempt is over: whatever reports still come, no cut follows.
        """
        if self.result is None:
            self.result = Abort("given up")
        self._next = None
        return self._send("open", {}, now)

    def receive(self, report: Snapshot, now: float) -> Outgoing:
        """A report came in."""
        current = report.attempt == self.attempt and report.round == self.round and report.rank in self.ranks
        if not current or report.rank in self._reports or self._next is not None or self.released:
            return []
        self._reports[report.rank] = report
        if len(self._reports) < len(self.ranks):
            return []
        if self.result is not None:
            self.released = self._orders[report.rank].phase == "open"
            self.wake = float("inf")
            return []
        self._last = self._reports
        self.memory, decision = self.cut.decide(self.memory, self._reports, now)
        if isinstance(decision, Accept | Abort):
            return self._end(decision, now)
        if isinstance(decision, Admit):
            self.slides += decision.slide
        elif isinstance(decision, Drain) or decision.needs == self._needs:
            # Nothing is new: leave the ranks a little time.
            self._next = decision
            self._pause = min(2 * self._pause, self.pace.longest) if self.memory.moved_at < now else self.pace.shortest
            self.wake = min(now + self._pause, self._deadline)
            return []
        return self._order(decision, now)

    def tick(self, now: float) -> Outgoing:
        """Time has passed: the next round is due, or an order is to be sent again, or the deadline is over."""
        if now < self.wake or self.released:
            return []
        if self._next is not None:
            decision, self._next = self._next, None
            return self._order(decision, now)
        missing = sorted(self.ranks - self._reports.keys())
        if self.result is None and now >= self._deadline:
            return self._end(self._overdue(missing, now), now)
        self.wake = self._soon(now)
        return [(rank, self._orders[rank]) for rank in missing]

    def _overdue(self, missing: list[int], now: float) -> Abort:
        """The deadline in the midst of a round: what the round before says, and who is silent."""
        abort = None
        if self._last:
            abort = self.cut.aborted(self.memory, self.cut.picture(self._last), now)
        if abort is not None and now - self._sent < self.pace.again:
            return abort
        names = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        silent = f"no cut in time: no report from rank {names}"
        return Abort(silent) if abort is None else msgspec.structs.replace(abort, reason=silent)

    @property
    def _deadline(self) -> float:
        return self.memory.began + self.cut.settings.deadline

    def _soon(self, now: float) -> float:
        soon = now + self.pace.again
        return soon if self.result is not None or now >= self._deadline else min(soon, self._deadline)

    def _order(self, decision: Wait | Admit | Drain, now: float) -> Outgoing:
        phase: Phase = "drain" if self.memory.draining else "cut"
        if isinstance(decision, Drain):
            return self._send(phase, {}, now)
        admit = decision.orders if isinstance(decision, Admit) else {}
        orders = {
            rank: Order(self.attempt, self.round + 1, phase, admit.get(rank, ()), needs, decision.push)
            if (needs := decision.needs.get(rank, {}))
            else Order(self.attempt, self.round + 1, phase, admit.get(rank, ()))
            for rank in admit.keys() | decision.needs.keys()
        }
        self._pause = self.pace.shortest if isinstance(decision, Admit) else self._pause
        return self._send(phase, orders, now, decision.needs)

    def _send(
        self,
        phase: Phase,
        special: dict[int, Order],
        now: float,
        needs: dict[int, dict[Lane, int]] | None = None,
    ) -> Outgoing:
        self.round += 1
        self._needs = needs or {}
        self._reports = {}
        self._sent = now
        common = Order(self.attempt, self.round, phase)
        self._orders = {rank: special.get(rank, common) for rank in sorted(self.ranks)}
        self.wake = self._soon(now)
        return list(self._orders.items())

    def _end(self, result: Accept | Abort, now: float) -> Outgoing:
        self.result = result
        if isinstance(result, Abort):
            return self.release(now)
        self.wake = float("inf")
        return []
