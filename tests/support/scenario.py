"""Operations on jobs in a cluster where some process dies in the middle of them, and what must hold afterwards.

A `Stage` is a cluster with one job that lives through many operations (`Stage.job`). Each scenario below is one
operation from its order to its documented end. A test arms failpoints, lets a scenario run, then calls `Stage.judge`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moorage.coordinator.client import JobInfo
from moorage.dev import sweep
from moorage.errors import MoorageError
from moorage.worker.guard.client import GuardClient
from moorage.worker.pod_record import pod_folder
from tests.support.cluster import DevCluster
from tests.support.judge import incarnations_overlap
from tests.support.pingpong_job import PingPong

#: Long, for the machine may be busy; nothing here depends on how fast it is.
PATIENCE = 90.0
STALL = "stall 60"


class Stage:
    """A cluster, its long-lived job, and what is known about that job's checkpoints."""

    def __init__(self, cluster: DevCluster, *, jobs: bool = True) -> None:
        self.cluster = cluster
        self.client = cluster.client()
        self.helpers = ThreadPoolExecutor(4)
        self.known: dict[str, int] = {}  # every committed checkpoint of the job, with its attempt
        self.latest = 0
        self.incarnation = 1
        self.restarts = 0
        self.job: PingPong
        if jobs:
            self.begin()

    def begin(self) -> None:
        """A new long-lived job."""
        self.known, self.latest, self.incarnation, self.restarts = {}, 0, 1, 0
        self.job = PingPong(self.cluster, steps=1_000_000, delay=0.05, keep_last=1000)
        self.job.until_step(2)

    # -- what must hold

    def judge(self, *, restored: bool = False) -> None:
        """After an operation: the job runs and moves, no checkpoint is lost, the newest is not older than before.

        ``restored``: pods were really lost or taken down meanwhile, so it may be another incarnation.
        """
        info = self.until(lambda job: job.phase == "running")
        self.moves()
        if not restored:
            assert (info.incarnation, info.restarts) == (self.incarnation, self.restarts), self.story()
        assert info.incarnation >= self.incarnation
        self.incarnation, self.restarts = info.incarnation, info.restarts
        listed = {checkpoint.id: checkpoint for checkpoint in self.client.checkpoints(self.job.job.id)}
        assert listed.keys() >= self.known.keys(), f"lost: {self.known.keys() - listed.keys()}"
        for checkpoint in listed.keys() - self.known.keys():
            self.check(checkpoint)
        self.known = {name: checkpoint.attempt for name, checkpoint in listed.items()}
        newest = max((checkpoint.attempt for checkpoint in listed.values() if checkpoint.latest), default=0)
        assert newest >= self.latest, f"the newest was {self.latest} and is {newest}"
        assert newest == max(self.known.values(), default=0)
        self.latest = newest

    def check(self, checkpoint: str, *, read_data: bool = False) -> None:
        """The store holds all that it needs."""
        found = self.client.check(checkpoint, read_data=read_data)
        assert found.done and not found.errors, (checkpoint, found)

    def finish(self) -> None:
        """At last: the long-lived job ends with the right result, as one that nobody ever disturbed."""
        for checkpoint in self.known:
            self.check(checkpoint, read_data=self.known[checkpoint] == self.latest)
        self.job.end()
        self.job.assert_right()
        assert not incarnations_overlap(self.job.lines())

    # -- looking

    def story(self) -> list[str]:
        return [event.sentence for event in self.job.job.events()]

    def until(self, reached: Callable[[JobInfo], bool], job: PingPong | None = None) -> JobInfo:
        return (job or self.job).job.until(reached, timeout=PATIENCE)

    def moves(self, steps: int = 2, job: PingPong | None = None) -> None:
        """Every rank does some steps more. Reads only what is new in the witness file."""
        one = job or self.job
        with (one.live / "witness").open() as file:
            file.seek(0, os.SEEK_END)
            counts = [0] * one.pods
            deadline = time.monotonic() + PATIENCE
            rest = ""
            while min(counts) < steps:
                assert time.monotonic() < deadline, (one.job.status(), self.story())
                time.sleep(0.03)
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    counts[int(line.split(" ")[1])] += 1

    def until_passed(self, failpoint: str) -> None:
        """Somebody has passed an armed failpoint."""
        deadline = time.monotonic() + PATIENCE
        while failpoint in self.cluster.armed():
            assert time.monotonic() < deadline, f"nobody passed {failpoint}"
            time.sleep(0.02)

    def served(self, role: str) -> int:
        """How many processes of this role have come so far as to serve."""
        return self.cluster.log(role).count('"event": "serving"')

    def until_served(self, role: str = "", times: int = 0) -> None:
        """A coordinator leads, every node is live, and ``role`` has been `served` so many times."""
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(MoorageError):
                live = {node.node for node in self.client.nodes() if node.live}
                if live >= set(self.cluster.nodes) and (not role or self.served(role) >= times):
                    return
            assert time.monotonic() < deadline, "not all nodes are live"
            time.sleep(0.1)

    def until_all_passed(self) -> None:
        """Every armed failpoint was passed, and all is served again."""
        for failpoint in self.cluster.armed():
            self.until_passed(failpoint)
        self.until_served()

    def beside(self, work: Callable[[], Any]) -> Future[Any]:
        """Do it beside; what it raises is the future's."""
        return self.helpers.submit(work)

    def processes(self, job: PingPong, pod: int) -> list[int]:
        """The pids of a pod's processes, its init first."""
        seat = job.job.status().pods[pod]
        record = self.cluster.record
        found: set[int] = set()
        for group in sweep.cgroups_of(record, record.node(seat.node)):
            for file in group.glob(f"{job.job.id}-{seat.incarnation}-{pod}/**/cgroup.procs"):
                found |= {int(pid) for pid in file.read_text().split()}
        return sorted(found, key=_inner_pid)

    def lose_pod(self, job: PingPong, pod: int = 0) -> None:
        """Have the pod's guard end it, which nobody of moorage asked for: a pod that is lost."""
        seat = job.job.status().pods[pod]
        folder = pod_folder(self.cluster.node_folder(seat.node), job.job.id, seat.incarnation, pod)

        async def kill() -> None:
            guard = await GuardClient.connect(folder)
            try:
                await guard.kill(reason="lost")
            finally:
                await guard.close()

        asyncio.run(kill())

    def fail_rank(self, job: PingPong, pod: int = 0) -> None:
        """Kill one rank."""
        rank = next(pid for pid in self.processes(job, pod) if b"pingpong.py" in _command(pid))
        os.kill(rank, signal.SIGKILL)

    def idle_node(self) -> str:
        """A node without pods of the long-lived job."""
        return next(node for node in self.cluster.nodes if node not in self.job.placement())

    def guard_pids(self, node: str) -> list[int]:
        """The guards on a node."""
        record = self.cluster.record
        return [
            pid
            for pid in sweep.processes_of(record, record.node(node))
            if b"moorage.worker.guard" in _command(pid).replace(b"\0", b" ")
        ]

    # -- helpers of scenarios

    @property
    def longer_than_a_lease(self) -> str:
        """The action of a failpoint that lasts until a silent node is given up."""
        return f"stall {self.cluster.record.lease_seconds + 4}"

    @contextlib.contextmanager
    def armed(self, failpoint: str, action: str, role: str = "") -> Iterator[None]:
        """Armed within the block only."""
        self.cluster.arm(failpoint, action, role=role)
        try:
            yield
        finally:
            (self.cluster.failpoints / failpoint).unlink(missing_ok=True)


def _inner_pid(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 1 << 30
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
