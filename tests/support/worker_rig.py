"""One worker without a coordinator: a real etcd, a real store, the real daemon, and orders given by hand.

::

    with WorkerRig() as rig:
        async def main() -> None:
            async with rig.orders() as orders:
                await orders.start("j1", counter())
                ...
        asyncio.run(main())
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from moorage import rpc
from moorage.barrier import cmp
from moorage.barrier.client import EtcdClient
from moorage.barrier.twophase import Attempts
from moorage.config import EtcdConfig, WorkerConfig, to_toml
from moorage.dev import sweep
from moorage.dev.network import free_ports
from moorage.errors import NotFound
from moorage.localsocket import path_of
from moorage.records import AttemptStart, IncarnationRecord, Keys, Outcome, Vote
from moorage.store import Store
from moorage.trust import create_authority, issue
from moorage.v1 import types_pb2, worker_pb2
from moorage.v1.worker_pb2_grpc import WorkerStub
from moorage.worker.network import cleanup
from moorage.worker.sandbox.cgroup import PodCgroup
from tests.support import leftovers
from tests.support.etcd import Etcd

_numbers = itertools.count(1)
_given = itertools.count(0)
_MOST_PODS = 8
NODE = "node-1"
#: No VXLAN packet is ever sent to it: there is one node.
ADDRESS = "10.255.255.1"
WAIT_SECONDS = 90.0

#: Counts as fast as told; says each number; a number twice or left out would show in its output.
COUNTER = """\
import itertools, os, sys, time
def say(text):
    os.write(1, text.encode() + b"\\n")  # whole lines: ranks may speak at the same time
say("nonce " + os.urandom(8).hex())
for number in itertools.count(1):
    say("step %d" % number)
    time.sleep({pause})
    if number == {last}:
        sys.exit({code})
"""


def counter_spec(
    *, pause: float = 0.02, last: int = 0, code: int = 0, command: Sequence[str] = (), **values: Any
) -> types_pb2.JobSpec:
    """A job that counts for ever (or to ``last``, then exits with ``code``)."""
    script = COUNTER.format(pause=pause, last=last, code=code)
    return types_pb2.JobSpec(
        **{
            "name": "counter",
            "owner": "root",
            "user": "0:0",
            "as_root": True,
            "pods": 1,
            "ranks_per_pod": 1,
            "command": command or [sys.executable, "-S", "-c", script],
            "working_directory": "/tmp",
            **values,
        }
    )


class WorkerRig:
    """``with WorkerRig() as rig``. Everything is gone afterwards, whatever happened."""

    program = "moorage.cli.main"  # whose subcommand `worker` is the daemon

    def __init__(self, *, lease_seconds: int = 5) -> None:
        self.cluster = f"rig-{os.getpid()}-{next(_numbers)}"
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-rig-", dir="/var/tmp"))
        self.failpoints = self.folder / "failpoints"
        self.failpoints.mkdir(mode=0o700)
        self.state = self.folder / "state"
        self.log_path = self.folder / "worker.log"
        self.lease_seconds = lease_seconds
        self.etcd = Etcd()
        self.process: subprocess.Popen[bytes] | None = None
        self._given: dict[tuple[object, ...], int] = {}  # what `number` has given
        self.endpoint = f"127.0.0.1:{free_ports(1)[0]}"

    def __enter__(self) -> Self:
        leftovers.made(self.cluster, self.folder)
        try:
            self.etcd.__enter__()
            create_authority(self.folder / "ca", "rig")
            self.tls = issue(self.folder / "ca", self.folder / "coordinator", "coordinator")
            self.stranger = issue(self.folder / "ca", self.folder / "stranger", "user:ann")
            tls = issue(self.folder / "ca", self.folder / "worker", f"worker:{NODE}")
            Store.open(str(self.folder / "store"), create=True)
            config = WorkerConfig(
                cluster=self.cluster,
                node=NODE,
                address=ADDRESS,
                listen=self.endpoint,
                store=str(self.folder / "store"),
                tls=tls,
                etcd=EtcdConfig(endpoints=self.etcd.endpoints),
                state=str(self.state),
                lease_seconds=self.lease_seconds,
            )
            (self.folder / "worker.toml").write_text(to_toml(config))
            self.start_worker()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.print_logs()
        self.close()

    def number(self, *what: object) -> int:
        """A number for ``what``, the same each time; the few that follow belong to it too. At most 2,000,000.

        All rigs of the machine share a network namespace, also those of other test processes: no two that live at the
        same time give the same number.
        """
        if what not in self._given:
            self._given[what] = os.getpid() % 2_000 * 1_000 + next(_given) * _MOST_PODS % 1_000
        return self._given[what]

    def print_logs(self) -> None:
        """The last lines of the worker's and the guards' logs, on stderr."""
        for path in [self.log_path, *self.state.glob("pods/*/*/*/*.log"), *self.state.glob("pods/*/*/*/criu/*.log")]:
            if path.exists():
                print(f"--- {path}", *path.read_text(errors="replace").splitlines()[-60:], sep="\n", file=sys.stderr)

    def close(self) -> None:
        """Kill worker, guards and pods; remove their networks, mounts, cgroups and folders."""
        self.kill_worker()
        for pid in self.guards():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for group in self._pod_cgroups():
            asyncio.run(PodCgroup(group).kill(20.0))
        cleanup.remove_all(self.cluster, NODE)
        sweep.unmount_below(self.folder)
        groups = [root / f"moorage-{self.cluster}" for root in sweep.hierarchies()]
        sweep.remove_cgroups([group for group in groups if group.is_dir()])
        shutil.rmtree(Path("/dev/shm") / f"moorage-{self.cluster}-{NODE}", ignore_errors=True)
        path_of(self.cluster, NODE).unlink(missing_ok=True)
        self.etcd.stop()
        shutil.rmtree(self.folder)

    def _pod_cgroups(self) -> list[str]:
        return [f"/moorage-{self.cluster}/{NODE}/{'-'.join(path.parts[-3:])}" for path in self.state.glob("pods/*/*/*")]

    # -- the worker's process

    def start_worker(self, **environment: str) -> None:
        """Start the daemon and wait until it serves."""
        assert self.process is None
        served = self._served()
        with self.log_path.open("ab") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    self.program,
                    "worker",
                    "--config",
                    str(self.folder / "worker.toml"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "MOORAGE_FAILPOINTS_DIR": str(self.failpoints), **environment},
                start_new_session=True,
            )
        wait_for(lambda: self._served() > served or self.process is None or self.process.poll() is not None, "worker")
        assert self.process.poll() is None, self.log_path.read_text()[-4000:]

    def _served(self) -> int:
        return self.log_path.read_text().count('"event": "serving"') if self.log_path.exists() else 0

    def kill_worker(self) -> None:
        """SIGKILL; its pods and guards live on."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop_worker(self) -> None:
        """SIGTERM, and wait for its end."""
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(WAIT_SECONDS) == 0, self.log_path.read_text()[-4000:]
        self.process = None

    def arm(self, failpoint: str, action: str) -> None:
        """Make the next process that passes the failpoint act."""
        (self.failpoints / failpoint).write_text(action)

    def guards(self) -> list[int]:
        """Pids of all guards of this rig."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode(errors="replace").split("\0")
                if "moorage.worker.guard" in words and any(word.startswith(str(self.state)) for word in words):
                    found.append(int(path.parent.name))
        return found

    def pod_folder(self, job: str, incarnation: int = 1, pod: int = 0) -> Path:
        return self.state / "pods" / job / str(incarnation) / str(pod)

    def cgroup(self, job: str, incarnation: int = 1, pod: int = 0) -> PodCgroup:
        return PodCgroup(f"/moorage-{self.cluster}/{NODE}/{job}-{incarnation}-{pod}")

    @contextlib.asynccontextmanager
    async def orders(self) -> AsyncIterator[Orders]:
        """A coordinator's place: leadership, a channel to the worker, etcd."""
        async with self.etcd.client() as etcd, rpc.aio_channel(self.endpoint, self.tls) as channel:
            orders = Orders(self, etcd, WorkerStub(channel))
            await orders.lead()
            try:
                yield orders
            except BaseException:
                self.print_logs()
                raise


class Orders:
    """What a coordinator would do, one step at a time. ``epoch`` is the leadership's."""

    def __init__(self, rig: WorkerRig, etcd: EtcdClient, stub: Any) -> None:
        self.rig = rig
        self.etcd = etcd
        self.stub = stub
        self.keys = Keys(rig.cluster)
        self.epoch = 0
        self.incarnations: dict[str, int] = {}
        self.specs: dict[str, types_pb2.JobSpec] = {}

    async def lead(self) -> None:
        """Become the leader, with a higher epoch than the one before."""
        await self.etcd.delete_prefix(self.keys.leader)
        await self.etcd.put(self.keys.leader + "me", b"")
        found = await self.etcd.get(self.keys.leader + "me")
        assert found is not None
        self.epoch = found.create_revision

    def attempts(self, job: str) -> Attempts:
        return Attempts(self.etcd, self.keys, job, by="coordinator")

    def fence(self, job: str, pod: int = 0) -> worker_pb2.Fence:
        return worker_pb2.Fence(epoch=self.epoch, job=job, incarnation=self.incarnations[job], pod=pod, trace="t")

    def membership(self, job: str) -> worker_pb2.Membership:
        members = [worker_pb2.Member(pod=pod, node=NODE, node_address=ADDRESS) for pod in range(self.specs[job].pods)]
        return worker_pb2.Membership(vni=self.vni(job), slot=self.rig.number("slot", job), members=members)

    def vni(self, job: str) -> int:
        """The number of the network of the job's incarnation."""
        return self.rig.number("vni", job, self.incarnations[job])

    async def call(self, method: str, request: Any, timeout: float = 60.0) -> Any:
        return await rpc.unary(getattr(self.stub, method), request, what="worker", timeout=timeout)

    async def incarnate(self, job: str, incarnation: int, *, placed: bool = True) -> None:
        """Make ``incarnation`` the job's own."""
        self.incarnations[job] = incarnation
        placement = [NODE] * self.specs[job].pods if placed else []
        record = IncarnationRecord(incarnation=incarnation, placement=placement, vni=self.vni(job))
        await self.etcd.put(self.keys.incarnation(job), msgspec.json.encode(record))

    async def start(self, job: str, spec: types_pb2.JobSpec) -> list[Any]:
        """Start all pods of a new job as incarnation 1."""
        self.specs[job] = spec
        await self.incarnate(job, 1)
        return await asyncio.gather(*(self.start_pod(job, pod) for pod in range(spec.pods)))

    async def start_pod(self, job: str, pod: int = 0) -> Any:
        request = worker_pb2.StartPodRequest(
            fence=self.fence(job, pod), spec=self.specs[job], membership=self.membership(job)
        )
        return await self.call("StartPod", request)

    async def status(self, job: str, pod: int = 0) -> types_pb2.PodStatus:
        """The pod's status now."""
        async with contextlib.aclosing(self.watch()) as statuses:
            async for status in statuses:
                if not status.job:
                    break
                if (status.job, status.pod, status.incarnation) == (job, pod, self.incarnations[job]):
                    return status
        raise NotFound(f"pod {pod} of {job} is not there")

    async def watch(self) -> AsyncGenerator[types_pb2.PodStatus, None]:
        call = self.stub.WatchPods(worker_pb2.WatchPodsRequest(epoch=self.epoch))
        try:
            async for status in call:
                yield status
        finally:
            call.cancel()

    async def until(self, job: str, *phases: str, pod: int = 0) -> types_pb2.PodStatus:
        """Wait until the pod is in one of ``phases``."""
        async with asyncio.timeout(WAIT_SECONDS), contextlib.aclosing(self.watch()) as statuses:
            async for status in statuses:
                mine = (status.job, status.pod, status.incarnation) == (job, pod, self.incarnations[job])
                if mine and status.phase in phases:
                    return status
        raise AssertionError("the watch ended")

    def _log_call(self, job: str, pod: int, *, follow: bool, offset: int, rank: int) -> Any:
        request = worker_pb2.ReadLogsRequest(job=job, pod=pod, rank=rank, follow=follow, offset=offset)
        return self.stub.ReadLogs(request)

    async def output(self, job: str, pod: int = 0, *, rank: int = -1, follow: bool = False) -> str:
        """All that the pod has written (``follow``: until it is over)."""
        call = self._log_call(job, pod, follow=follow, offset=0, rank=rank)
        return b"".join([chunk.data async for chunk in call]).decode()

    async def until_output(self, job: str, wanted: Callable[[str], bool], pod: int = 0) -> str:
        """Follow the pod's output until ``wanted`` is true of all of it."""
        text: str = ""
        call: Any = self._log_call(job, pod, follow=True, offset=0, rank=-1)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                async for chunk in call:
                    text += str(chunk.data.decode())
                    if wanted(text):
                        return text
        finally:
            call.cancel()
        raise AssertionError(f"the output ended: {text[-500:]}")

    # -- an attempt

    def attempt_order(self, job: str, attempt: int, pod: int, kind: str, deadline: float) -> worker_pb2.AttemptOrder:
        return worker_pb2.AttemptOrder(
            fence=self.fence(job, pod), attempt=attempt, kind=kind, remaining_seconds=deadline
        )

    async def begin(self, job: str, attempt: int, *, kind: str = "resume", deadline: float = 60.0) -> None:
        """Create the attempt's start in etcd."""
        start = AttemptStart(
            attempt=attempt,
            incarnation=self.incarnations[job],
            pods=self.specs[job].pods,
            kind="stop" if kind == "stop" else "resume",
            deadline_seconds=deadline,
        )
        await self.attempts(job).start(start, fence=[cmp.exists(self.keys.leader + "me")])

    async def all_pods(self, method: str, job: str, attempt: int, kind: str, deadline: float = 60.0) -> list[Any]:
        """The same order to all pods at once."""
        orders = [self.attempt_order(job, attempt, pod, kind, deadline) for pod in range(self.specs[job].pods)]
        return await asyncio.gather(*(self.call(method, order) for order in orders))

    async def conclude(self, job: str, attempt: int, kind: Any, reason: str = "") -> Outcome:
        outcome = Outcome(
            kind=kind, incarnation=self.incarnations[job], attempt=attempt, reason=reason, by="coordinator"
        )
        return await self.attempts(job).conclude(outcome, fence=[cmp.exists(self.keys.leader + "me")])

    async def capture(self, job: str, attempt: int, *, kind: str = "resume", deadline: float = 60.0) -> list[Any]:
        """From the start to the votes ``captured`` of all pods; returns the replies of CapturePod."""
        await self.begin(job, attempt, kind=kind, deadline=deadline)
        for reply in await self.all_pods("PreparePod", job, attempt, kind, deadline):
            assert not reply.refusals, reply.refusals
        await self.all_pods("FreezePod", job, attempt, kind, deadline)
        await self.all_pods("SealPod", job, attempt, kind, deadline)
        return await self.all_pods("CapturePod", job, attempt, kind, deadline)

    async def votes(self, job: str, attempt: int, step: Any) -> dict[int, Vote]:
        """Wait until all pods have voted."""
        async with (
            asyncio.timeout(WAIT_SECONDS),
            contextlib.aclosing(self.attempts(job).watch_votes(attempt, step)) as changes,
        ):
            async for votes in changes:
                if len(votes) == self.specs[job].pods:
                    return votes
        raise AssertionError("the watch ended")

    async def checkpoint(self, job: str, attempt: int) -> dict[int, Vote]:
        """A whole checkpoint after which the job runs on; returns the votes ``persisted``."""
        await self.capture(job, attempt)
        await self.conclude(job, attempt, "resume")
        return await self.votes(job, attempt, "persisted")

    async def restore(self, job: str, manifests: Mapping[int, str], *, release: bool = True) -> list[Any]:
        """Restore all pods as the next incarnation from the pod manifests."""
        await self.incarnate(job, self.incarnations[job] + 1)
        requests = [
            worker_pb2.RestorePodRequest(
                fence=self.fence(job, pod), spec=self.specs[job], membership=self.membership(job), manifest=manifest
            )
            for pod, manifest in manifests.items()
        ]
        replies = list(await asyncio.gather(*(self.call("RestorePod", request) for request in requests)))
        if release:
            await self.release(job)
        return replies

    async def release(self, job: str) -> None:
        orders = [worker_pb2.PodOrder(fence=self.fence(job, pod)) for pod in range(self.specs[job].pods)]
        await asyncio.gather(*(self.call("ReleasePod", order) for order in orders))

    async def kill(self, job: str, *, any_incarnation: bool = False, grace: float = 0.0) -> list[Any]:
        """KillPod for all pods."""
        requests = [
            worker_pb2.KillPodRequest(fence=self.fence(job, pod), any_incarnation=any_incarnation, grace_seconds=grace)
            for pod in range(self.specs[job].pods)
        ]
        return await asyncio.gather(*(self.call("KillPod", request) for request in requests))

    async def finish(self, job: str) -> list[Any]:
        orders = [worker_pb2.PodOrder(fence=self.fence(job, pod)) for pod in range(self.specs[job].pods)]
        return await asyncio.gather(*(self.call("FinishPod", order) for order in orders))


def wait_for(condition: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Wait until ``condition`` holds, for what sends no event."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.01)


def steps(output: str) -> list[int]:
    """The numbers that a counter has said."""
    whole = output[: output.rfind("\n") + 1]
    return [int(line.split()[1]) for line in whole.splitlines() if line.startswith("step ")]


def in_order(numbers: Sequence[int]) -> bool:
    """Whether a counter counted from 1 without a gap and without saying a number twice."""
    return list(numbers) == list(range(1, len(numbers) + 1))
