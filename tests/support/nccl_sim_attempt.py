"""The attempts to cut a simulated job: coordinator, messages that are late, lost and doubled, teardown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from moorage.nccl_quiesce.cut import Cut
from moorage.nccl_quiesce.model import Accept, Order, Plan, Snapshot
from moorage.nccl_quiesce.rounds import Outgoing, Pace, Rounds
from tests.support.nccl_sim_fake import Nccl
from tests.support.nccl_sim_parts import Thread


class Attempts(Nccl):
    """What the coordinator does. `World` has the rest."""

    rounds_type: type[Rounds] = Rounds

    def __init__(self, cut: Callable[[int], Cut], pace: Pace, instants: list[int]) -> None:
        super().__init__()
        self.make_cut, self.pace = cut, pace
        self.instants = sorted(instants, reverse=True)
        self.attempts = 0
        self.midway = 0  #: cuts that were not just the program's end
        self.rounds: Rounds | None = None
        self.tried: list[Rounds] = []
        self.began: list[tuple[float, bool]] = []  #: per attempt: when it began, whether counts were unequal then
        self.took: list[float] = []  #: per attempt: seconds until all gates were open again
        self.rebuilding = False
        self.limit = float("inf")  #: after which lap loops end
        self.lapping: dict[int, list[Thread]] = defaultdict(list)

    def attempt(self) -> None:
        if self.rounds is not None:
            return
        self.attempts += 1
        cut = self.make_cut(self.random.randrange(1 << 30))
        self.rounds = self.rounds_type(range(self.program.ranks), attempt=self.attempts, cut=cut, pace=self.pace)
        self.tried.append(self.rounds)
        self.began.append((self.now, self._unequal()))
        self._send(self.rounds.start(self.now))

    def _unequal(self) -> bool:
        pairs: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        for lane, count in self.counts.items():
            if lane.kind == "collective":
                pairs[(lane.communicator,)].add(count)
            else:
                pairs[(lane.communicator, *sorted((lane.member, lane.peer)), lane.kind == "send")].add(count)
        return any(len(counts) > 1 for counts in pairs.values())

    def _send(self, outgoing: Outgoing) -> None:
        rounds = self.rounds
        assert rounds is not None
        for rank, order in outgoing:
            for delay in self._deliveries():
                self.later(delay, self._deliver, rounds, rank, order)
        if rounds.wake < 1e9:
            self.later(max(0.0, rounds.wake - self.now) + 1e-9, self._tick, rounds)
        if isinstance(rounds.result, Accept) and not self.rebuilding:
            self.log.append(("accept",))
            self.midway += any(thread.state != "ended" for rank in self.ranks for thread in rank.threads)
            self.rebuilding = True
            self.teardown(rounds.result.plan)
            self.later(0.001, self.rebuilt, rounds)
        if rounds.released:
            self.took.append(self.now - self.began[-1][0])
            self.rounds = None
            self.rebuilding = False
            if not self.instants:
                self.limit = max(thread.iteration for rank in self.ranks for thread in rank.threads)
                self._wake([thread for threads in self.lapping.values() for thread in threads])
                self.lapping.clear()

    def _deliveries(self) -> list[float]:
        lot, latency = self.random.random, self.program.latency
        first = latency * (0.5 + lot())
        if not self.program.loss:
            return [first]
        if lot() < self.program.loss:
            return []
        return [first, first + lot() * 20 * latency] if lot() < self.program.loss else [first]

    def _deliver(self, rounds: Rounds, number: int, order: Order) -> None:
        rank = self.ranks[number]
        report = rank.gate.obey(order, rank.undrained)
        if report is not None:
            if report.held or report.inside or rank.gate.phase == "drain" or self.program.hints != "none":
                report = rank.gate.report(report.undrained, rank.waits_for())
            for delay in self._deliveries():
                self.later(delay, self._report, rounds, report)

    def _report(self, rounds: Rounds, report: Snapshot) -> None:
        if rounds is self.rounds:
            wake = rounds.wake
            outgoing = rounds.receive(report, self.now)
            if outgoing or rounds.wake != wake or rounds.result is not None:
                self._send(outgoing)

    def _tick(self, rounds: Rounds) -> None:
        if rounds is self.rounds and not rounds.released and self.now >= rounds.wake:
            self._send(rounds.tick(self.now))

    def teardown(self, plan: Plan) -> None:
        """Destroy every communicator on all ranks at once; the checks are the fake's own."""
        for rank in self.ranks:
            if rank.undrained():
                self.problems.append(f"teardown hangs: streams {rank.undrained()} of rank {rank.number}")
            for thread in rank.threads:
                step = thread.steps[thread.at] if thread.at < len(thread.steps) else ("end",)
                if thread.state in ("inside", "created, frozen") and step[0] == "create":
                    names = {creation.communicator for creation in step[1]}
                    if names <= set(plan.again):
                        rank.gate.take_back(thread.ticket)
                        thread.life += 1
                        thread.state = "again"
                    else:
                        self.problems.append(f"teardown: {thread} is half made")
                elif thread.state == "inside" and step[0] != "destroy":
                    self.problems.append(f"teardown hangs: {thread}")
        for name in plan.again:
            self.creating.pop(name, None)
        self.torn.update(self.gone)
        for threads in self.destroying.values():
            for thread in threads:
                self.done(thread)
        self.destroying.clear()
        self.counts.clear()
        self.matches.clear()
        self.connections.clear()
        self.connected.clear()

    def rebuilt(self, rounds: Rounds) -> None:
        self.log.append(("rebuilt",))
        self._send(rounds.release(self.now))
