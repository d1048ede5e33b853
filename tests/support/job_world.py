"""A small world around the job state machine: nodes, pods, guards, etcd, and a coordinator that may die at any write.

Every step is one choice, so that a failing run shrinks to the shortest one. The world judges what no state alone can:
whether two incarnations run at once, and whether a committed checkpoint holds what it must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moorage.coordinator.machine import JobPolicy, JobState, Machine, new_job, resume, validate
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine import instructions as ins
from moorage.coordinator.machine.state import RESTING, decode, encode
from moorage.errors import Conflict
from moorage.records import Outcome
from tests.support.job_world_hands import Etcd, Hands, Node, Pod

HOUR = 3600.0


class Crash(Exception):
    """The coordinator died."""


class World(Hands):
    """``choose(n)`` returns a number below n; every decision of the world is one call of it."""

    def __init__(self, choose: Callable[[int], int], *, pods: int = 2, nodes: int = 3, **policy: Any) -> None:
        self.choose = choose
        self.pods_of_job = pods
        self.now = 1000.0
        self.nodes = {f"n{i}": Node() for i in range(nodes)}
        self.pods: list[Pod] = []
        self.etcd = Etcd()
        self.queue: list[ev.Event] = []
        self.inflight: dict[ins.Order, set[int]] = {}
        self.crashes = 0
        self.calm = (1, 3, 10, 40)[choose(4)]  # how much work is done between two faults
        state, found = new_job(
            job="j",
            name="train",
            owner="ann",
            pods=pods,
            policy=JobPolicy(**policy),
            now=self.now,
        )
        self.machine = Machine(state)
        self.etcd.state = encode(state)
        self._order(found)

    # -- the coordinator

    def _order(self, found: list[ins.Instruction]) -> None:
        for instruction in found:
            if isinstance(instruction, ins.Order):
                self.inflight.setdefault(instruction, set())
        wanted = set(resume(self.state))
        self.inflight = {order: done for order, done in self.inflight.items() if order in wanted}
        assert set(self.inflight) == wanted, f"orders and state disagree\n{self.machine.story()}"

    def restart(self) -> None:
        """A new coordinator: all it knows is in etcd and on the nodes."""
        self.crashes += 1
        state = decode(self.etcd.state)
        validate(state)
        self.machine = Machine(state)
        self.queue.clear()
        self.inflight = {}
        self._order(list(resume(state)))
        self.relist()

    def relist(self) -> None:
        """What a coordinator learns when it takes the job up: lost nodes, ended and missing pods."""
        state = self.state
        for seat in state.seats:
            if not self.nodes[seat.node].alive:
                self.queue.append(ev.NodeLost(time=self.now, node=seat.node))
        for number, seat in enumerate(state.seats):
            if self.nodes[seat.node].alive:
                pod = self.find(number, state.incarnation, seat.node)
                if pod is None and any(isinstance(order, ins.Load) for order in self.inflight):
                    continue  # it may not have been made yet
                if pod is None or pod.state == "killed":
                    self.queue.append(self._gone(number, state.incarnation))
                elif pod.state == "exited":
                    self.queue.append(self._exited(pod))

    def _gone(self, pod: int, incarnation: int) -> ev.Event:
        return ev.PodFailed(time=self.now, pod=pod, incarnation=incarnation, reason="it is not there")

    def _exited(self, pod: Pod) -> ev.Event:
        return ev.PodExited(time=self.now, pod=pod.pod, incarnation=pod.incarnation, code=pod.code)

    def handle(self, event: ev.Event, *, crash: int = 0) -> None:
        """``crash`` 1: the coordinator dies before the write, 2: after it, before any order."""
        after, found = self.machine.consider(event)
        if after == self.state:
            assert not found
            return
        if crash == 1:
            self.restart()
            return
        stands = self.write(after, found)
        if stands is not None:
            # The writer tells the machine of the outcome that stands, then handles the event again.
            self.handle(ev.OutcomeStands(time=self.now, outcome=stands))
            self.handle(event)
            return
        if crash == 2:
            self.restart()
            return
        self.machine.accept(event, after, found)
        self._order(found)

    def write(self, after: JobState, found: list[ins.Instruction]) -> Outcome | None:
        """One transaction. An outcome that stands already makes it fail, and is returned."""
        etcd = self.etcd
        for record in found:
            if isinstance(record, ins.Conclude) and record.outcome.attempt in etcd.outcomes:
                stands = etcd.outcomes[record.outcome.attempt]
                assert stands.kind == "abort", f"two deciders: {stands}\n{self.machine.story()}"
                return stands
        for record in sorted(found, key=lambda record: isinstance(record, ins.Commit)):
            if isinstance(record, ins.Conclude):
                etcd.outcomes[record.outcome.attempt] = record.outcome
                if record.outcome.kind != "abort":
                    votes = etcd.captured.get(record.outcome.attempt, {})
                    assert len(votes) == self.pods_of_job and all(votes.values()), "an outcome without all votes"
            elif isinstance(record, ins.CreateStart):
                assert record.start.attempt not in etcd.starts
                assert record.start.incarnation == etcd.incarnation
                etcd.starts[record.start.attempt] = record.start.kind
            elif isinstance(record, ins.Raise):
                assert record.record.incarnation == etcd.incarnation + 1, "the incarnation grows one by one"
                etcd.incarnation = record.record.incarnation
            elif isinstance(record, ins.Commit):
                self._commit(record)
        assert after.incarnation == etcd.incarnation
        assert after.latest == (etcd.checkpoints[-1] if etcd.checkpoints else "")
        etcd.state = encode(after)
        assert decode(etcd.state) == after
        return None

    def _commit(self, record: ins.Commit) -> None:
        number = record.checkpoint.attempt
        assert record.checkpoint.incarnation == self.etcd.incarnation or self.etcd.starts[number] == "stop"
        assert self.etcd.persisted.get(number) == set(range(self.pods_of_job)), "committed before it was stored"
        assert self.etcd.outcomes[number].kind == ("resume" if self.etcd.starts[number] == "resume" else "stop")
        assert not self.etcd.checkpoints or self.etcd.checkpoints[-1] < record.checkpoint.checkpoint
        self.etcd.checkpoints.append(record.checkpoint.checkpoint)

    # -- nodes and pods

    def lose(self, name: str, *, destroy: bool) -> None:
        """The node is gone: its guards have frozen its pods by the time its registration is."""
        self.nodes[name].alive = False
        self.nodes[name].destroyed |= destroy
        for pod in list(self.pods):
            if pod.node == name:
                if destroy:
                    self.pods.remove(pod)
                else:
                    pod.fenced = True
        self.queue.append(ev.NodeLost(time=self.now, node=name))

    def come_back(self, name: str) -> None:
        """Contact returns (or an empty machine of that name): guards thaw what etcd confirms, and kill the rest."""
        self.nodes[name] = Node()
        for pod in list(self.pods):
            if pod.node == name:
                pod.fenced = False
                if pod.incarnation != self.etcd.incarnation:
                    self.pods.remove(pod)

    def exit(self, pod: Pod, code: int) -> None:
        pod.state, pod.code = "exited", code
        self.queue.append(self._exited(pod))

    def running(self) -> list[Pod]:
        return [p for p in self.pods if p.state == "running" and not p.fenced]

    def check(self) -> None:
        """Invariants of the world."""
        incarnations = {p.incarnation for p in self.running()}
        assert len(incarnations) <= 1, f"two incarnations run: {self.pods}\n{self.machine.story()}"
        if incarnations:
            assert max(incarnations) <= self.etcd.incarnation
        validate(self.state)

    def persist(self) -> None:
        """A worker brings a captured pod into the store."""
        thawed = {p.pod for p in self.pods if not p.attempt and p.incarnation == self.etcd.incarnation}
        for attempt, votes in self.etcd.captured.items():
            kind, outcome = self.etcd.starts[attempt], self.etcd.outcomes.get(attempt)
            stored = self.etcd.persisted.setdefault(attempt, set())
            may = outcome.kind == "resume" if outcome else kind == "stop"
            for number in votes:
                if may and number not in stored and (kind == "stop" or number in thawed):
                    stored.add(number)
                    return

    def abort(self) -> None:
        """A worker finds that the deadline has passed."""
        for attempt in self.etcd.starts:
            self.etcd.outcomes.setdefault(
                attempt, Outcome(kind="abort", incarnation=self.etcd.incarnation, attempt=attempt, by="n0")
            )

    # -- steps

    def step(self) -> None:
        """One choice of everything that may happen."""
        choices = ["work"] * 12 + ["deliver"] * 8 + ["outcome"] * 3 + ["persist"] * 3
        choices *= self.calm
        choices += ["fail", "crash", "crash", "lose", "destroy", "back", "back", "abort", "hang", "break"]
        choices += ["ask"] * 4 + ["exit", "exit0"] * (not self.choose(3))
        getattr(self, "do_" + choices[self.choose(len(choices))])()
        self.check()

    def do_work(self) -> None:
        self._work(fail=False)

    def do_fail(self) -> None:
        self._work(fail=True)

    def _work(self, *, fail: bool) -> None:
        self.now += 0.1
        late = self.choose(10) == 0
        orders = [o for o in self.inflight if not isinstance(o, ins.Alarm) or o.what == "heartbeat" or late]
        if not orders:
            return
        event = self.work(orders[self.choose(len(orders))], fail=fail)
        if event is not None:
            self.queue.append(event)

    def do_deliver(self) -> None:
        if self.queue:
            # Answers and news come over many connections: in any order.
            event = self.queue.pop(self.choose(len(self.queue)))
            crash = {0: 1, 1: 2}.get(self.choose(4 * self.calm), 0)
            self.handle(event, crash=crash)

    def do_crash(self) -> None:
        self.restart()

    def do_lose(self) -> None:
        self._lose(destroy=False)

    def do_destroy(self) -> None:
        self._lose(destroy=True)

    def _lose(self, *, destroy: bool) -> None:
        alive = [n for n, node in self.nodes.items() if node.alive]
        if alive:
            self.lose(alive[self.choose(len(alive))], destroy=destroy)

    def do_back(self) -> None:
        gone = [n for n, node in self.nodes.items() if not node.alive]
        if gone:
            self.come_back(gone[self.choose(len(gone))])

    def do_exit(self) -> None:
        if pods := self.running():
            self.exit(pods[self.choose(len(pods))], (0, 1, 137)[self.choose(3)])

    def do_exit0(self) -> None:
        if pods := self.running():
            self.exit(pods[self.choose(len(pods))], 0)

    def do_break(self) -> None:
        """A pod's processes are gone, for no reason that it could tell."""
        if pods := self.running():
            pod = pods[self.choose(len(pods))]
            pod.state = "killed"
            self.queue.append(self._gone(pod.pod, pod.incarnation))

    def do_abort(self) -> None:
        if self.etcd.starts and max(self.etcd.starts) not in self.etcd.outcomes:
            self.abort()

    def do_outcome(self) -> None:
        pods = [p for p in self.pods if p.attempt in self.etcd.outcomes and self.nodes[p.node].alive]
        if pods:
            self.follow_outcome(pods[self.choose(len(pods))])

    def do_persist(self) -> None:
        self.persist()

    def do_hang(self) -> None:
        self.queue.append(ev.Hung(time=self.now, incarnation=self.state.incarnation, reason="nothing moves"))

    def do_ask(self) -> None:
        nodes = tuple(n for n in self.nodes if self.choose(2))
        which = self.choose(8)
        asked: ev.Asked
        if which <= 2:
            asked = ev.CheckpointAsked(time=self.now, request=f"r{self.choose(40)}")
        elif which == 3:
            asked = ev.ParkAsked(time=self.now)
        elif which == 4:
            asked = ev.MoveAsked(time=self.now, nodes=nodes or tuple(self.nodes))
        elif which == 5:
            asked = ev.StopAsked(time=self.now, checkpoint=bool(self.choose(2)))
        else:
            asked = ev.RestoreAsked(time=self.now, nodes=nodes)
        try:
            self.handle(asked, crash=(0, 0, 0, 1, 2)[self.choose(5)])
        except Conflict:
            return

    def settle(self, limit: int = 4000) -> None:
        """Faults have stopped: nodes are there, everything makes progress, and the program ends."""
        for name, node in self.nodes.items():
            if not node.alive:
                self.come_back(name)
        self.relist()
        turn = 0
        for turn in range(limit):
            if self.state.phase in RESTING and not self.queue:
                break
            for pod in list(self.pods):
                if pod.attempt in self.etcd.outcomes:
                    self.follow_outcome(pod)
            self.persist()
            for order in list(self.inflight):
                if isinstance(order, ins.Alarm):
                    continue
                if order in self.inflight and (event := self.work(order)) is not None:
                    self.queue.append(event)
            while self.queue:
                self.handle(self.queue.pop(0))
                self.check()
            if self.state.phase == "running" and self.state.attempt is None and turn > 20:
                for pod in self.running():
                    if pod.incarnation == self.state.incarnation:
                        self.exit(pod, 0)
            if not self.queue and turn % 50 == 49:
                self._ring()
        assert self.state.phase in RESTING, f"it never rests: {self.state}\n{self.machine.story()}"
        if self.state.over:
            assert not self.running(), f"something runs on: {self.pods}\n{self.machine.story()}"

    def _ring(self) -> None:
        for order in list(self.inflight):
            if isinstance(order, ins.Alarm) and order.what != "heartbeat":
                self.now = max(self.now, order.at)
                self.queue.append(ev.AlarmRang(time=self.now, of=order))
