"""The nodes, pods and the etcd of `job_world`, and how orders are carried out there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from moorage.coordinator.machine import JobState, Machine
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine import instructions as ins
from moorage.coordinator.machine.state import Seat
from moorage.records import Outcome


@dataclass
class Pod:
    """One pod on one node. ``state``: loaded (restored, frozen), running, frozen, exited, killed."""

    pod: int
    incarnation: int
    node: str
    state: str
    code: int = 0
    attempt: int = 0
    fenced: bool = False  # frozen by its guard


@dataclass
class Node:
    alive: bool = True
    destroyed: bool = False


@dataclass
class Etcd:
    """What survives a coordinator."""

    state: bytes = b""
    incarnation: int = 0
    starts: dict[int, str] = field(default_factory=dict)  # attempt: kind
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    captured: dict[int, dict[int, bool]] = field(default_factory=dict)
    persisted: dict[int, set[int]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    generation: int = 0


class Hands:
    """What workers do with orders. `World` adds everything else."""

    choose: Callable[[int], int]
    pods_of_job: int
    now: float
    nodes: dict[str, Node]
    pods: list[Pod]
    etcd: Etcd
    inflight: dict[ins.Order, set[int]]
    machine: Machine

    @property
    def state(self) -> JobState:
        return self.machine.state

    def find(self, pod: int, incarnation: int, node: str) -> Pod | None:
        return next(
            (p for p in self.pods if (p.pod, p.incarnation, p.node) == (pod, incarnation, node)),
            None,
        )

    def follow_outcome(self, pod: Pod) -> None:
        """What a worker does when it sees an outcome."""
        outcome = self.etcd.outcomes.get(pod.attempt)
        if outcome is None or outcome.incarnation != pod.incarnation:
            return
        if outcome.kind == "stop":
            self.pods.remove(pod)
            return
        if pod.state == "frozen":
            pod.state = "running"
        pod.attempt = 0

    def work(self, order: ins.Order, *, fail: bool = False) -> ev.Event | None:
        """One bit of work on an order: one pod's part of it, or its answer."""
        if isinstance(order, ins.Alarm):
            self.now = max(self.now, order.at)
            return ev.AlarmRang(time=self.now, of=order)
        if isinstance(order, ins.Place):
            return self._place(order)
        if isinstance(order, ins.Fence):
            return self._fence(order)
        if isinstance(order, ins.Observe):
            outcome = self.etcd.outcomes.get(order.attempt)
            return ev.OutcomeStands(time=self.now, outcome=outcome) if outcome else None
        if isinstance(order, ins.Collect):
            if self.etcd.persisted.get(order.attempt) == set(range(self.pods_of_job)):
                return ev.Persisted(time=self.now, of=order, bytes_total=9, bytes_new=1, pause_seconds=0.5)
            return self._failed(order, "a pod cannot store", "NoCapacity") if fail else None
        if isinstance(order, ins.WriteManifest):
            if fail:
                return self._failed(order, "the store was pruned", "Conflict")
            return ev.Written(time=self.now, of=order, manifest="m", generation=0)
        return self._on_pods(order, fail)

    def _failed(self, order: ins.Order, message: str, kind: str, pod: int = -1, node: str = "") -> ev.Event:
        return ev.Failed(time=self.now, of=order, message=message, error_kind=kind, pod=pod, node=node)

    def _place(self, order: ins.Place) -> ev.Event:
        usable = [n for n, node in self.nodes.items() if node.alive and n not in order.exclude]
        usable = [n for n in usable if not order.on or n in order.on]
        if not usable:
            return ev.Unplaceable(time=self.now, of=order, reason="no node")
        seats = tuple(Seat(usable[self.choose(len(usable))]) for _ in range(self.pods_of_job))
        return ev.Placed(time=self.now, of=order, seats=seats, vni=7, slot=1)

    def _fence(self, order: ins.Fence) -> ev.Event | None:
        done = self.inflight[order]
        for index, target in enumerate(order.targets):
            if index in done:
                continue
            if self.nodes[target.node].alive:
                for pod in list(self.pods):
                    if (pod.pod, pod.node) == (target.pod, target.node) and pod.incarnation <= order.bound:
                        self.pods.remove(pod)
            done.add(index)  # or its lease has run out: its guard has frozen it
            return None
        return ev.Done(time=self.now, of=order)

    def _on_pods(self, order: ins.Order, fail: bool) -> ev.Event | None:
        done = self.inflight[order]
        ending = isinstance(order, ins.Kill | ins.Finish)
        for number, seat in enumerate(self.state.seats):
            if number in done:
                continue
            if not self.nodes[seat.node].alive:
                if ending:
                    done |= {number, number + self.pods_of_job}  # the second says: not reached
                    continue
                return None
            if fail and not ending:
                kind = ("EnvironmentLacking", "Incompatible", "CorruptData", "MoorageError")[self.choose(4)]
                return self._failed(order, "it does not work", kind, number, seat.node)
            trouble = self._on_pod(order, number, seat.node)
            if trouble:
                return self._failed(order, trouble, "Conflict", number, seat.node)
            done.add(number)
            return None
        if isinstance(order, ins.Kill | ins.Finish):
            unreached = tuple(n for n in range(self.pods_of_job) if n + self.pods_of_job in done)
            return ev.Closed(time=self.now, of=order, unreached=unreached)
        return ev.Done(time=self.now, of=order)

    def _on_pod(self, order: ins.Order, number: int, node: str) -> str:
        pod = self.find(number, order.incarnation, node)
        if isinstance(order, ins.Load):
            if pod is None:
                state = "loaded" if order.checkpoint else "running"
                if order.checkpoint:
                    assert order.checkpoint in self.etcd.checkpoints
                self.pods.append(Pod(number, order.incarnation, node, state))
            return ""
        if pod is None:
            return "" if isinstance(order, ins.Kill | ins.Finish) else "no such pod"
        match order:
            case ins.Release():
                if pod.state == "loaded":
                    pod.state = "running"
            case ins.Prepare(attempt=attempt):
                if pod.attempt not in (0, attempt) or self.etcd.outcomes.get(attempt):
                    return "it is in another attempt"
                pod.attempt = attempt
            case ins.Freeze(attempt=attempt) | ins.Seal(attempt=attempt):
                if pod.attempt != attempt:
                    return "it is not in that attempt"
                if pod.state == "running":
                    pod.state = "frozen"
            case ins.Capture(attempt=attempt):
                votes = self.etcd.captured.setdefault(attempt, {})
                if number in votes:
                    return ""
                if pod.attempt != attempt or self.etcd.outcomes.get(attempt):
                    return "it is not in that attempt"
                if pod.state == "killed":
                    return "it is gone"
                assert pod.state in ("frozen", "exited"), pod
                if pod.state == "exited" and pod.code:
                    return "it exited"
                mine = [p for p in self.pods if p.incarnation == order.incarnation]
                assert all(p.state in ("frozen", "exited", "killed") for p in mine), "no cut"
                votes[number] = True
            case ins.Settle():
                self.follow_outcome(pod)
                assert pod.state != "frozen", f"{pod} {self.etcd}\n{self.machine.story()}"
            case ins.Kill():
                if pod.state != "exited":
                    pod.state = "killed"
            case ins.Finish():
                self.pods.remove(pod)
        return ""
