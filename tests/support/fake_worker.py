"""A worker with no processes behind it: it registers, takes orders, votes and stores as the real one does.

A pod is an object; its "program" does what the test says (`FakePod.exit`). What the real guard does when contact to
etcd is lost is done here too: `FakeNode.cut` freezes the pods, `FakeNode.heal` thaws or kills them by what etcd says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from moorage import rpc
from moorage.barrier import clock
from moorage.barrier.client import EtcdClient
from moorage.barrier.session import Session
from moorage.barrier.twophase import Attempts
from moorage.errors import Conflict, Fenced, Forbidden, MoorageError, NotFound
from moorage.records import IncarnationRecord, Keys, NodeRecord, Outcome, Vote
from moorage.store import PodManifest, Store
from moorage.trust import TlsFiles
from moorage.v1 import types_pb2, worker_pb2
from moorage.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

Key = tuple[str, int, int]


class FakePod:
    """One pod. ``phase`` as the real worker names it; ``counter`` is the state that a checkpoint saves."""

    def __init__(self, node: FakeNode, fence: worker_pb2.Fence, spec: types_pb2.JobSpec) -> None:
        self.node = node
        self.job, self.incarnation, self.pod = fence.job, fence.incarnation, fence.pod
        self.spec = spec
        self.phase = "starting"
        self.reason = ""
        self.code = 0
        self.attempt = 0
        self.kind = "resume"
        self.fenced = False
        self.counter = 0
        self.captured = -1
        self.output = 0
        self.vni = 0
        self.watcher: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        return self.phase in ("running", "preparing") and not self.fenced

    @property
    def gone(self) -> bool:
        return self.phase in ("exited", "killed", "failed")

    def status(self) -> types_pb2.PodStatus:
        ranks = [
            types_pb2.RankStatus(
                rank=self.pod * max(1, self.spec.ranks_per_pod) + n,
                pid=n + 2,
                exited=self.phase == "exited",
                exit_code=self.code,
            )
            for n in range(max(1, self.spec.ranks_per_pod))
        ]
        return types_pb2.PodStatus(
            job=self.job,
            pod=self.pod,
            incarnation=self.incarnation,
            node=self.node.name,
            phase=self.phase,
            ranks=ranks,
            reason=self.reason,
            attempt=self.attempt,
            cpu_seconds=float(self.counter),
            output_bytes=self.output,
            exit_code=self.code,
        )

    def change(self, phase: str, reason: str = "") -> None:
        self.phase, self.reason = phase, reason
        self.node.publish(self)

    def exit(self, code: int = 0) -> None:
        """The pod's ranks exit."""
        assert self.phase in ("running", "preparing"), self.phase
        self.code = code
        self.change("exited")

    def work(self) -> None:
        """One step of the program."""
        if self.runs:
            self.counter += 1
            self.output += 10


class FakeNode(WorkerServicer):
    """A node. ``before``: called with (order, pod number) before an order is carried out; may wait or raise."""

    def __init__(
        self, name: str, *, cluster: str, etcd: Callable[[], EtcdClient], store: str, tls: TlsFiles, lease: int = 5
    ) -> None:
        self.name = name
        self.keys = Keys(cluster)
        self.tls = tls
        self.pods: dict[Key, FakePod] = {}
        self.log: list[str] = []
        self.refusals: list[worker_pb2.Refusal] = []
        self.keeps: list[str] = []  # where device memory was to be kept, of each attempt that was prepared
        self.before: Callable[[str, int], Awaitable[None]] | None = None
        self.persist_gate = asyncio.Event()
        self.persist_gate.set()
        self.lease_seconds = lease
        self._etcd_factory = etcd
        self._store = store
        self._watchers: set[asyncio.Queue[types_pb2.PodStatus]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._epoch = 0
        self.connected = False

    # -- life

    async def start(self) -> None:
        self.etcd = self._etcd_factory()
        self.store = await asyncio.to_thread(Store.open, self._store)
        await self.connect()

    async def connect(self) -> None:
        """Begin to serve and to be registered."""
        self.server = rpc.aio_server()
        add_WorkerServicer_to_server(self, self.server)
        self.port = self.server.add_secure_port("127.0.0.1:0", rpc.server_credentials(self.tls))
        await self.server.start()
        self.session = await Session.open(self.etcd, self.lease_seconds).start()
        record = NodeRecord(
            node=self.name,
            address="127.0.0.1",
            endpoint=f"127.0.0.1:{self.port}",
            session=f"{time.time_ns()}",
            pid=1,
            version="test",
            lease_seconds=self.lease_seconds,
            cpus=1,
            memory_bytes=1 << 30,
            lease_kept=True,
        )
        await self.etcd.put(self.keys.node(self.name), msgspec.json.encode(record), lease=self.session.lease)
        self.connected = True

    async def disconnect(self) -> None:
        """Serve no more, and let the registration end, as if the lease had run out."""
        self.connected = False
        await self.server.stop(0)
        await self.session.close()

    async def cut(self) -> None:
        """The node loses contact for longer than its lease: its guards freeze the pods before the lease is over."""
        for pod in self.pods.values():
            pod.fenced = True
        await self.disconnect()

    async def heal(self) -> None:
        """Contact returns: the node registers, then the guards read etcd."""
        await self.connect()
        for pod in list(self.pods.values()):
            if await self._current(pod.job) == pod.incarnation:
                pod.fenced = False
            else:
                self._remove(pod)

    async def destroy(self) -> None:
        """Everything on the node is gone for good."""
        for pod in list(self.pods.values()):
            self._remove(pod)
        await self.disconnect()

    async def restart(self) -> None:
        """The worker dies and another one adopts the pods, within the lease."""
        await self.server.stop(0)
        await self.session.close()
        await self.connect()
        for pod in self.pods.values():
            if pod.attempt and not pod.gone:
                self._follow(pod)

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.connected:
            await self.disconnect()
        await self.etcd.close()

    def _remove(self, pod: FakePod) -> None:
        if pod.watcher is not None:
            pod.watcher.cancel()
        self.pods.pop((pod.job, pod.incarnation, pod.pod), None)

    def publish(self, pod: FakePod) -> None:
        for queue in self._watchers:
            queue.put_nowait(pod.status())

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- orders

    async def _order(self, name: str, fence: worker_pb2.Fence) -> None:
        if rpc.principal.get() != "coordinator":
            raise Forbidden("only the coordinator")
        if fence.epoch < self._epoch:
            raise Fenced(f"epoch {fence.epoch} < {self._epoch}")
        self._epoch = fence.epoch
        self.log.append(f"{name} {fence.incarnation}/{fence.pod}")
        if self.before is not None:
            await self.before(name, fence.pod)

    async def _current(self, job: str) -> int:
        kv = await self.etcd.get(self.keys.incarnation(job))
        return msgspec.json.decode(kv.value, type=IncarnationRecord).incarnation if kv else 0

    async def _confirm(self, fence: worker_pb2.Fence) -> None:
        if (current := await self._current(fence.job)) != fence.incarnation:
            raise Fenced(f"incarnation {fence.incarnation} is not {current}")

    def _find(self, fence: worker_pb2.Fence) -> FakePod:
        pod = self.pods.get((fence.job, fence.incarnation, fence.pod))
        if pod is None:
            raise NotFound(f"no pod {fence.pod} of incarnation {fence.incarnation} on {self.name}")
        return pod

    async def StartPod(self, request: worker_pb2.StartPodRequest, context: Any) -> worker_pb2.PodReply:
        await self._order("start", request.fence)
        pod = await self._new(request.fence, request.spec, request.membership)
        if pod.phase == "starting":
            pod.change("running")
        return worker_pb2.PodReply(status=pod.status())

    async def _new(self, fence: worker_pb2.Fence, spec: types_pb2.JobSpec, members: worker_pb2.Membership) -> FakePod:
        await self._confirm(fence)
        key = (fence.job, fence.incarnation, fence.pod)
        if key not in self.pods:
            self.pods[key] = FakePod(self, fence, spec)
            self.pods[key].vni = members.vni
            assert members.members[fence.pod].node == self.name
        return self.pods[key]

    async def RestorePod(self, request: worker_pb2.RestorePodRequest, context: Any) -> worker_pb2.PodReply:
        await self._order("restore", request.fence)
        manifest = await asyncio.to_thread(self.store.read_pod_manifest, request.manifest)
        assert manifest.pod == request.fence.pod
        pod = await self._new(request.fence, request.spec, request.membership)
        if pod.phase == "starting":
            pod.counter = manifest.extra["counter"]
            pod.code = manifest.extra["code"]
            pod.change("exited" if manifest.extra["finished"] else "restored")
        return worker_pb2.PodReply(status=pod.status())

    async def ReleasePod(self, request: worker_pb2.PodOrder, context: Any) -> worker_pb2.PodReply:
        await self._order("release", request.fence)
        await self._confirm(request.fence)
        pod = self._find(request.fence)
        if pod.phase == "restored":
            pod.change("running")
        return worker_pb2.PodReply(status=pod.status())

    async def KillPod(self, request: worker_pb2.KillPodRequest, context: Any) -> worker_pb2.PodReply:
        fence = request.fence
        await self._order("kill", fence)
        current = await self._current(fence.job)
        for pod in list(self.pods.values()):
            older = request.any_incarnation and pod.incarnation < fence.incarnation
            if (pod.job, pod.pod) == (fence.job, fence.pod) and (pod.incarnation == fence.incarnation or older):
                if not pod.gone:
                    pod.change("killed", "ordered by the coordinator")
                if pod.incarnation != current:
                    self._remove(pod)
        return worker_pb2.PodReply(
            status=types_pb2.PodStatus(job=fence.job, pod=fence.pod, incarnation=fence.incarnation, phase="killed")
        )

    async def FinishPod(self, request: worker_pb2.PodOrder, context: Any) -> worker_pb2.PodReply:
        await self._order("finish", request.fence)
        pod = self.pods.get((request.fence.job, request.fence.incarnation, request.fence.pod))
        if pod is None:
            return worker_pb2.PodReply()
        if not pod.gone:
            pod.change("killed", "the job has ended")
        self._remove(pod)
        return worker_pb2.PodReply(status=pod.status())

    # -- attempts

    def _attempts(self, job: str) -> Attempts:
        return Attempts(self.etcd, self.keys, job, by=self.name)

    async def PreparePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PrepareReply:
        await self._order("prepare", request.fence)
        pod = self._find(request.fence)
        if self.refusals:
            return worker_pb2.PrepareReply(status=pod.status(), refusals=self.refusals)
        if pod.attempt not in (0, request.attempt):
            raise Conflict(f"pod {pod.pod} is in attempt {pod.attempt}")
        if pod.attempt != request.attempt:
            pod.attempt, pod.kind, pod.captured = request.attempt, request.kind, -1
            self.keeps.append(request.keep)
            if pod.phase == "running":
                pod.change("preparing")
            self._follow(pod, request.remaining_seconds)
        return worker_pb2.PrepareReply(status=pod.status())

    def _follow(self, pod: FakePod, seconds: float = 120.0) -> None:
        pod.watcher = self._spawn(self._await_outcome(pod, pod.attempt, clock.now() + seconds))

    async def _await_outcome(self, pod: FakePod, attempt: int, deadline: float) -> None:
        with contextlib.suppress(NotFound):
            await self._conclude(pod, await self._attempts(pod.job).await_outcome(attempt, deadline=deadline))

    async def _conclude(self, pod: FakePod, outcome: Outcome) -> None:
        if pod.attempt != outcome.attempt or pod.incarnation != outcome.incarnation:
            return
        pod.attempt = 0
        if outcome.kind == "stop":
            if not pod.gone:
                pod.change("killed", "stopped with the attempt")
            return
        if not pod.gone:
            pod.change("running")
        if outcome.kind == "resume":
            self._spawn(self._persist(pod, outcome.attempt, pod.captured))

    def _in(self, request: worker_pb2.AttemptOrder) -> FakePod:
        pod = self._find(request.fence)
        if pod.attempt != request.attempt:
            raise Conflict(f"pod {pod.pod} is not in attempt {request.attempt}")
        return pod

    async def FreezePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PodReply:
        await self._order("freeze", request.fence)
        pod = self._in(request)
        if pod.phase == "preparing":
            pod.change("frozen")
        return worker_pb2.PodReply(status=pod.status())

    async def SealPod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PodReply:
        await self._order("seal", request.fence)
        pod = self._in(request)
        if pod.phase == "frozen":
            pod.change("sealed")
        return worker_pb2.PodReply(status=pod.status())

    async def CapturePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.CaptureReply:
        await self._order("capture", request.fence)
        pod = self._find(request.fence)
        if pod.captured < 0:
            pod = self._in(request)
            assert pod.phase in ("sealed", "exited"), pod.phase
            pod.captured = pod.counter
            if pod.phase == "sealed":
                pod.change("captured")
        vote = Vote(pod=pod.pod, incarnation=pod.incarnation, attempt=request.attempt, finished=pod.phase == "exited")
        stands = await self._attempts(pod.job).vote("captured", vote)
        if not stands:
            raise Conflict(f"attempt {request.attempt} is settled")
        if pod.kind == "stop":
            self._spawn(self._persist(pod, request.attempt, pod.captured))
        return worker_pb2.CaptureReply(status=pod.status(), image_bytes=100)

    async def _persist(self, pod: FakePod, attempt: int, counter: int) -> None:
        await self.persist_gate.wait()

        def write() -> str:
            with self.store.writer(label=f"{pod.job} {pod.pod}") as writer:
                content = writer.add_bytes(b"counter %d" % counter)
                writer.finish()
                return self.store.write_pod_manifest(
                    PodManifest(
                        job=pod.job,
                        owner=pod.spec.owner,
                        pod=pod.pod,
                        incarnation=pod.incarnation,
                        attempt=attempt,
                        node=self.name,
                        created=time.time(),
                        images={"pages-1.img": content},
                        ranks=[{"rank": pod.pod, "pid": 2, "exited": pod.phase == "exited", "exit_code": pod.code}],
                        extra={"counter": counter, "finished": pod.phase == "exited", "code": pod.code},
                    )
                )

        manifest = await asyncio.to_thread(write)
        vote = Vote(
            pod=pod.pod,
            incarnation=pod.incarnation,
            attempt=attempt,
            manifest=manifest,
            bytes_total=10,
            bytes_new=1,
            pause_seconds=0.25,
        )
        with contextlib.suppress(MoorageError):
            await self._attempts(pod.job).vote("persisted", vote)

    async def ResumePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PodReply:
        await self._order("resume", request.fence)
        pod = self._find(request.fence)
        if pod.attempt:
            outcome = await self._attempts(pod.job).outcome(pod.attempt)
            if outcome is None or outcome.kind == "stop":
                raise Conflict(f"attempt {pod.attempt} stands otherwise")
            await self._conclude(pod, outcome)
        return worker_pb2.PodReply(status=pod.status())

    # -- the rest

    async def ExaminePod(self, request: worker_pb2.ExamineRequest, context: Any) -> worker_pb2.ExamineReply:
        await self._order("examine", request.fence)
        return worker_pb2.ExamineReply(refusals=self.refusals)

    async def QuiescePod(self, request: worker_pb2.QuiesceRequest, context: Any) -> worker_pb2.QuiesceReply:
        return worker_pb2.QuiesceReply()

    async def CheckFit(self, request: worker_pb2.FitRequest, context: Any) -> worker_pb2.FitReply:
        return worker_pb2.FitReply()

    async def WatchPods(self, request: worker_pb2.WatchPodsRequest, context: Any) -> AsyncIterator[types_pb2.PodStatus]:
        queue: asyncio.Queue[types_pb2.PodStatus] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            for pod in list(self.pods.values()):
                yield pod.status()
            yield types_pb2.PodStatus()
            while True:
                yield await queue.get()
        finally:
            self._watchers.discard(queue)

    async def ReadLogs(self, request: worker_pb2.ReadLogsRequest, context: Any) -> AsyncIterator[worker_pb2.LogChunk]:
        pod = self.pods.get((request.job, request.incarnation, request.pod))
        if pod is None:
            raise NotFound("no such pod")
        offset = request.offset
        while True:
            if pod.output > offset:
                line = f"{pod.job}/{pod.pod} up to {pod.output}\n".encode()
                offset = pod.output
                yield worker_pb2.LogChunk(rank=pod.pod, data=line, offset=offset, time=time.time())
            if not request.follow or pod.gone:
                return
            await asyncio.sleep(0.02)

    async def Exec(
        self, requests: AsyncIterator[worker_pb2.ExecInput], context: Any
    ) -> AsyncIterator[worker_pb2.ExecOutput]:
        async for message in requests:
            if message.command:
                await context.send_initial_metadata(rpc.ACCEPTED)  # as the real one does, before anything else
                where = f"{self.name} {message.fence.pod} {message.rank}: {' '.join(message.command)}"
                yield worker_pb2.ExecOutput(stdout=where.encode())
            if message.stdin:
                yield worker_pb2.ExecOutput(stdout=message.stdin)
            if message.stdin_eof:
                break
        yield worker_pb2.ExecOutput(exited=True, exit_code=3)

    async def Pull(self, request: worker_pb2.PullPodRequest, context: Any) -> AsyncIterator[worker_pb2.FilePart]:
        yield worker_pb2.FilePart(path="same.txt", data=self.name.encode(), last=True)
        yield worker_pb2.FilePart(path=f"{request.fence.pod}.txt", data=b"mine", last=True)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeReply:
        return worker_pb2.DescribeReply(findings=[worker_pb2.Finding(name="criu", state="ok")])
