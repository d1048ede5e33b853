"""A coordinator that only remembers: the API's server side over real mTLS, with jobs that do as a test says.

Its event loop runs in a thread, so that blocking clients and the command line can be tested as they are used.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from moorage import rpc, trust
from moorage.config import ClientConfig, to_toml
from moorage.errors import Conflict, MoorageError, NotFound
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import coordinator_pb2_grpc, types_pb2, worker_pb2

T = TypeVar("T")
OVER = {"finished", "failed", "stopped"}


class Servicer:
    """State in plain dictionaries; every request is kept in ``requests``. Reached through `FakeCoordinator`."""

    def __init__(self) -> None:
        self.jobs: dict[str, pb.Job] = {}
        self.logs: list[worker_pb2.LogChunk] = []
        self.events: list[pb.JobEvent] = []
        self.checkpoints: dict[str, pb.CheckpointInfo] = {}
        self.nodes: list[pb.Node] = []
        self.drain = pb.DrainInfo(id="d-1", phase="running", nodes=["n-1"])
        self.drained: list[pb.DrainInfo] = []  # what a watch of it tells, one after another
        self.files: list[worker_pb2.FilePart] = []
        self.requests: list[tuple[str, Any]] = []
        self.answers: dict[str, pb.Job] = {}
        self.fails: dict[str, list[MoorageError | OSError]] = {}
        self.attempt = pb.Attempt(phase="committed", checkpoint="c-1", pause_seconds=0.5)
        self.break_streams_after = 0
        self.on_log: Callable[[int], None] | None = None
        self.changed = asyncio.Event()

    def add(self, name: str, phase: str = "running", **fields: Any) -> pb.Job:
        job = pb.Job(id=f"id-{name}", phase=phase, incarnation=1, created=time.time(), over=phase in OVER, **fields)
        job.spec.MergeFrom(types_pb2.JobSpec(name=name, owner="user:me", pods=1, ranks_per_pod=1))
        self.jobs[job.id] = job
        return job

    def change(self, job: pb.Job, phase: str, exit_code: int | None = None) -> None:
        job.phase, job.over = phase, phase in OVER
        if exit_code is not None:
            job.exit_code, job.has_exit_code = exit_code, True
        self.changed.set()
        self.changed = asyncio.Event()

    def _note(self, method: str, request: Any) -> None:
        self.requests.append((method, request))
        if waiting := self.fails.get(method):
            raise waiting.pop(0)

    def _job(self, name: str) -> pb.Job:
        for job in self.jobs.values():
            if name in (job.id, job.spec.name):
                return job
        raise NotFound(f"job {name} does not exist", "see `moorage jobs -a`")

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.Job:
        if request.request_id in self.answers:
            self.requests.append(("Submit", request))
            return self.answers[request.request_id]
        name = request.spec.name or f"job-{len(self.jobs)}"
        if any(job.spec.name == name and not job.over for job in self.jobs.values()):
            raise Conflict(f"the name {name} is taken", "use --if-exists resume")
        job = self.add(name)
        job.spec.CopyFrom(request.spec)
        job.spec.name = name
        self.answers[request.request_id] = job
        self._note("Submit", request)
        return job

    async def GetJob(self, request: pb.JobRef, context: Any) -> pb.Job:
        self._note("GetJob", request)
        return self._job(request.job)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        self._note("ListJobs", request)
        return pb.ListJobsReply(jobs=[job for job in self.jobs.values() if request.all or not job.over])

    async def WatchJob(self, request: pb.JobRef, context: Any) -> AsyncIterator[pb.Job]:
        self._note("WatchJob", request)
        while True:
            changed, job = self.changed, self._job(request.job)
            if job.phase == "starting":
                asyncio.get_running_loop().call_later(0.05, self.change, job, "running")
            over = job.over  # it may change while the message goes out
            yield job
            if over:
                return
            await changed.wait()

    async def _attempt(self, method: str, request: Any, after: str = "") -> pb.AttemptReply:
        self._note(method, request)
        job = self._job(request.job)
        if job.over or job.phase in ("pending", "starting", "parked"):
            raise Conflict(f"job {job.spec.name} is {job.phase}")
        committed = self.attempt.phase == "committed"
        if committed:
            made = pb.CheckpointInfo(id=self.attempt.checkpoint, job=job.id, bytes_total=1 << 30, pause_seconds=0.5)
            self.checkpoints[made.id] = made
        if after and committed:
            job.incarnation += 1
            self.change(job, after)
        return pb.AttemptReply(job=job, attempt=1)

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Any) -> pb.AttemptReply:
        return await self._attempt("Checkpoint", request)

    async def Park(self, request: pb.JobRequest, context: Any) -> pb.AttemptReply:
        return await self._attempt("Park", request, "parked")

    async def Move(self, request: pb.MoveRequest, context: Any) -> pb.AttemptReply:
        return await self._attempt("Move", request, "running")

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.Job:
        self._note("Restore", request)
        job = self._job(request.job)
        if request.checkpoint and request.checkpoint not in self.checkpoints:
            raise NotFound(f"checkpoint {request.checkpoint} does not exist", "see `moorage checkpoints`")
        job.incarnation += 1
        self.change(job, "running")
        return job

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.Job:
        self._note("Stop", request)
        job = self._job(request.job)
        self.change(job, "stopped")
        return job

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobReply:
        self._note("DeleteJob", request)
        job = self._job(request.job)
        if not job.over:
            raise Conflict(f"job {job.spec.name} is {job.phase}", "stop it first")
        gone = [checkpoint.id for checkpoint in self.checkpoints.values() if checkpoint.job == job.id]
        if not request.dry_run:
            del self.jobs[job.id]
        return pb.DeleteJobReply(job=job.id, name=job.spec.name, checkpoints=gone)

    async def GetAttempt(self, request: pb.GetAttemptRequest, context: Any) -> pb.Attempt:
        return self.attempt

    async def WatchAttempt(self, request: pb.GetAttemptRequest, context: Any) -> AsyncIterator[pb.Attempt]:
        self._note("WatchAttempt", request)
        for phase in ("preparing", "capturing"):
            yield pb.Attempt(job=request.job, attempt=request.attempt, phase=phase)
        yield self.attempt

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesReply:
        self._note("ListNodes", request)
        return pb.ListNodesReply(nodes=self.nodes)

    async def Cordon(self, request: pb.CordonRequest, context: Any) -> pb.ListNodesReply:
        self._note("Cordon", request)
        found = [node for node in self.nodes if node.node in request.choice.nodes]
        for node in found:
            node.cordoned = not request.uncordon
        return pb.ListNodesReply(nodes=found)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainInfo:
        self._note("Drain", request)
        answer = pb.DrainInfo()
        answer.CopyFrom(self.drain)
        if request.dry_run or (answer.homeless and request.homeless == pb.HOMELESS_REFUSE):
            answer.phase = "planned"
        return answer

    async def WatchDrain(self, request: pb.DrainRef, context: Any) -> AsyncIterator[pb.DrainInfo]:
        self._note("WatchDrain", request)
        for answer in self.drained:
            yield answer
        while not self.drained[-1].over:
            await self.changed.wait()
            yield self.drained[-1]

    async def CancelDrain(self, request: pb.DrainRef, context: Any) -> pb.DrainInfo:
        self._note("CancelDrain", request)
        last = self.drained[-1]
        last.phase, last.over, last.reason = "cancelled", True, "it was called off before b moved"
        self.changed.set()
        self.changed = asyncio.Event()
        return last

    async def DescribeNode(self, request: pb.NodeRef, context: Any) -> worker_pb2.DescribeReply:
        self._note("DescribeNode", request)
        finding = worker_pb2.Finding(name="vxlan", state="missing", detail="no such module", cure="modprobe vxlan")
        return worker_pb2.DescribeReply(findings=[finding])

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsReply:
        self._note("ListCheckpoints", request)
        if request.job:
            self._job(request.job)
        return pb.ListCheckpointsReply(checkpoints=list(self.checkpoints.values()))

    def _checkpoint(self, name: str) -> pb.CheckpointInfo:
        if name not in self.checkpoints:
            raise NotFound(f"checkpoint {name} does not exist", "see `moorage checkpoints`")
        return self.checkpoints[name]

    async def InspectCheckpoint(self, request: pb.CheckpointRef, context: Any) -> pb.InspectReply:
        self._note("InspectCheckpoint", request)
        part = pb.InspectPart(pod=0, kind="process memory", bytes=1 << 20, stored_bytes=1 << 19, items=2)
        return pb.InspectReply(checkpoint=self._checkpoint(request.checkpoint), parts=[part])

    async def CheckCheckpoint(self, request: pb.CheckRequest, context: Any) -> AsyncIterator[pb.CheckProgress]:
        self._note("CheckCheckpoint", request)
        self._checkpoint(request.checkpoint)
        yield pb.CheckProgress(bytes_done=1, bytes_total=2)
        errors = ["chunk ab12 does not match its digest"] if request.checkpoint == "bad" else []
        yield pb.CheckProgress(bytes_done=2, bytes_total=2, chunks=7, errors=errors, done=True)

    async def PinCheckpoint(self, request: pb.PinRequest, context: Any) -> pb.CheckpointInfo:
        self._note("PinCheckpoint", request)
        found = self._checkpoint(request.checkpoint)
        found.pinned = not request.unpin
        return found

    async def Prune(self, request: pb.PruneRequest, context: Any) -> pb.PruneReply:
        self._note("Prune", request)
        return pb.PruneReply(checkpoints=["c-0"], packs=2, bytes=100, dry_run=request.dry_run)

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> AsyncIterator[pb.JobEvent]:
        self._note("ListEvents", request)
        self._job(request.job)
        for number, event in enumerate(self.events):
            yield event
            await self._break_stream(number, context)

    async def ReadLogs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[worker_pb2.LogChunk]:
        self._note("ReadLogs", request)
        job = self._job(request.job)
        reached = {position.pod: position.offset for position in request.positions}
        for number, chunk in enumerate(self.logs):
            if chunk.offset > reached.get(chunk.pod, 0) and request.rank in (-1, chunk.rank):
                yield chunk
                if self.on_log:
                    self.on_log(number)
                await self._break_stream(number, context)
        while request.follow and not job.over:
            await self.changed.wait()

    async def _break_stream(self, number: int, context: Any) -> None:
        if self.break_streams_after and number + 1 == self.break_streams_after:
            self.break_streams_after = 0
            import grpc

            await context.abort(grpc.StatusCode.UNAVAILABLE, "coordinator is going away")

    async def Exec(self, requests: AsyncIterator[worker_pb2.ExecInput], context: Any) -> AsyncIterator[Any]:
        typed = b""
        async for request in requests:
            if request.command:
                self._note("Exec", request)
                yield worker_pb2.ExecOutput(stdout=" ".join(request.command).encode() + b"\n")
            typed += request.stdin
            if request.stdin_eof:
                break
        yield worker_pb2.ExecOutput(stderr=typed)
        yield worker_pb2.ExecOutput(exited=True, exit_code=3)

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[worker_pb2.FilePart]:
        self._note("Pull", request)
        for number, part in enumerate(self.files):
            yield part
            await self._break_stream(number, context)

    async def CheckCompat(self, request: pb.CompatRequest, context: Any) -> pb.CompatReply:
        self._note("CheckCompat", request)
        line = worker_pb2.FitLine(
            rule="kernel", state="differs", wanted="6", found="5", message="the kernel is 5 there"
        )
        pods = [pb.PodFit(pod=pod, lines=[line]) for pod in range(2)]
        return pb.CompatReply(checkpoint=request.checkpoint, node=request.node, fits=False, pods=pods)

    async def ExamineJob(self, request: pb.JobRef, context: Any) -> pb.ExamineJobReply:
        self._note("ExamineJob", request)
        refusal = worker_pb2.Refusal(what="process 7", why="it is traced", cure="end the debugger")
        return pb.ExamineJobReply(findings=[pb.JobFinding(pod=1, node="a", refusal=refusal)])

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self._note("Status", request)
        return pb.StatusReply(cluster="test", leader="here", version="0", store="file:///s", leading=True)

    async def NodeToken(self, request: pb.NodeTokenRequest, context: Any) -> pb.NodeTokenReply:
        self._note("NodeToken", request)
        return pb.NodeTokenReply(token="moorage-join-1.x", expires=time.time() + request.seconds)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        self._note("Join", request)
        return pb.JoinReply(node=request.node)

    async def RemoveNode(self, request: pb.NodeRef, context: Any) -> pb.RemoveNodeReply:
        self._note("RemoveNode", request)
        return pb.RemoveNodeReply(serials=["1"])


class FakeCoordinator:
    """Starts and stops a `Servicer` on a port of its own. ``config`` is a client's configuration for it."""

    def __init__(self, folder: Path) -> None:
        authority = folder / "authority"
        trust.create_authority(authority, "test")
        self._tls = trust.issue(authority, folder / "coordinator", "coordinator", addresses=("127.0.0.1",))
        self.client_tls = trust.issue(authority, folder / "client", "user:me")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.config = ClientConfig(coordinator=f"127.0.0.1:{self.port}", tls=self.client_tls)
        self.config_file = folder / "client.toml"
        self.config_file.write_text(to_toml(self.config))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: Any = None
        self.state: Servicer

    def __enter__(self) -> FakeCoordinator:
        self._thread.start()
        self.state = self.call(self._make())
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _make(self) -> Servicer:
        return Servicer()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def soon(self, work: Callable[[], object]) -> None:
        """Call ``work`` in the server's loop: changes of the state belong there."""
        self._loop.call_soon_threadsafe(work)

    def start(self) -> None:
        """Listen (again, on the same port)."""

        async def up() -> None:
            self._server = rpc.aio_server()
            coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self.state, self._server)  # type: ignore[arg-type]
            self._server.add_secure_port(f"127.0.0.1:{self.port}", rpc.server_credentials(self._tls))
            await self._server.start()

        self.call(up())

    def stop(self) -> None:
        """Go away at once, as a coordinator that is killed."""

        async def down() -> None:
            server, self._server = self._server, None
            if server is not None:
                await server.stop(None)

        self.call(down())

    def asked(self, method: str) -> list[Any]:
        """The requests of that method so far."""
        return [request for name, request in self.state.requests if name == method]
