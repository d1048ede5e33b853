"""The asynchronous client. Every verb returns when what it asked for has happened, or raises why it has not."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from moorage import config as configuration
from moorage import rpc
from moorage.coordinator.client.connection import Connection, request_id
from moorage.coordinator.client.drains import FleetCalls
from moorage.coordinator.client.models import (
    AttemptInfo,
    CheckInfo,
    CheckpointInfo,
    CompatInfo,
    EventInfo,
    FindingInfo,
    Inspection,
    JobFindingInfo,
    JobInfo,
    LogLine,
    NodeInfo,
    PruneInfo,
    StatusInfo,
)
from moorage.coordinator.client.spec import IF_EXISTS, IF_INCOMPATIBLE, check_text, choice, job_spec, torchrun_spec
from moorage.errors import AttemptAborted, Conflict, MoorageError, NotFound, UsageError, by_name
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2, worker_pb2

ALL_RANKS = -1


class AsyncClient(FleetCalls):
    """A client of one cluster. Without arguments it uses the settings that the command line uses.

    Raises `UsageError` if no coordinator is configured. Calls raise `MoorageError` subclasses.
    """

    def __init__(
        self,
        coordinator: str | None = None,
        *,
        config: configuration.ClientConfig | None = None,
        patience: float = 30.0,
        on_silence: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config or configuration.client_config({"coordinator": coordinator})
        self.connection = Connection(self.config, patience=patience, on_silence=on_silence)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()

    async def submit(self, spec: types_pb2.JobSpec, *, if_exists: str = "fail", on: Iterable[str] = ()) -> AsyncJob:
        """Submit a job as `job_spec` or `torchrun_spec` made it. Returns when it is accepted.

        ``on``: the nodes that it starts on. Unlike the spec's ``nodes`` they bind no later restore or move.
        """
        request = pb.SubmitRequest(
            spec=spec,
            if_exists=choice(IF_EXISTS, if_exists, "--if-exists"),  # type: ignore[arg-type]
            request_id=request_id(),
            on=list(on),
        )
        job = await self.connection.call("Submit", request)
        return AsyncJob(self, job.id)

    async def run(self, command: Sequence[str], *, if_exists: str = "fail", **options: Any) -> AsyncJob:
        """Run ``command`` once in each pod; ``options`` are those of `job_spec`."""
        return await self.submit(job_spec(command, **options), if_exists=if_exists)

    async def torchrun(
        self, script: str, arguments: Sequence[str] = (), *, if_exists: str = "fail", **options: Any
    ) -> AsyncJob:
        """Run ``script`` as torchrun would; ``options`` are those of `torchrun_spec`."""
        return await self.submit(torchrun_spec(script, arguments, **options), if_exists=if_exists)

    async def job(self, job: str) -> AsyncJob:
        """The job with this id or name. Raises `NotFound`."""
        found = await self.connection.call("GetJob", pb.JobRef(job=job))
        return AsyncJob(self, found.id)

    async def jobs(self, *, all: bool = False) -> list[JobInfo]:
        """The jobs, with ``all`` also those that are over."""
        reply = await self.connection.call("ListJobs", pb.ListJobsRequest(all=all))
        return [JobInfo.of(job) for job in reply.jobs]

    async def nodes(self) -> list[NodeInfo]:
        """The nodes that the cluster knows."""
        reply = await self.connection.call("ListNodes", pb.ListNodesRequest())
        return [NodeInfo.of(node) for node in reply.nodes]

    async def describe_node(self, node: str) -> list[FindingInfo]:
        """What a node can and cannot do. Raises `NotFound`."""
        reply = await self.connection.call("DescribeNode", pb.NodeRef(node=node))
        return [FindingInfo.of(finding) for finding in reply.findings]

    async def checkpoints(self, job: str = "") -> list[CheckpointInfo]:
        """The committed checkpoints of a job, or of all jobs, oldest first."""
        reply = await self.connection.call("ListCheckpoints", pb.ListCheckpointsRequest(job=job))
        return [CheckpointInfo.of(checkpoint) for checkpoint in reply.checkpoints]

    async def inspect(self, checkpoint: str | CheckpointInfo) -> Inspection:
        """What is inside a checkpoint. Raises `NotFound`."""
        reply = await self.connection.call("InspectCheckpoint", pb.CheckpointRef(checkpoint=_id(checkpoint)))
        return Inspection.of(reply)

    async def check(
        self,
        checkpoint: str | CheckpointInfo,
        *,
        read_data: bool = False,
        progress: Callable[[CheckInfo], None] | None = None,
    ) -> CheckInfo:
        """Verify that all that a checkpoint needs is in the store; ``read_data`` reads and verifies every chunk."""
        request = pb.CheckRequest(checkpoint=_id(checkpoint), read_data=read_data)
        last: CheckInfo | None = None
        async for reply in self.connection.stream("CheckCheckpoint", lambda: request):
            last = CheckInfo.of(reply)
            if progress:
                progress(last)
        if last is None:
            raise MoorageError(f"the check of {_id(checkpoint)} ended without an answer")
        return last

    async def compat(self, checkpoint: str | CheckpointInfo, node: str) -> CompatInfo:
        """Whether a checkpoint can be restored on a node, rule by rule. Raises `NotFound`, `Unavailable`."""
        request = pb.CompatRequest(checkpoint=_id(checkpoint), node=node)
        return CompatInfo.of(await self.connection.call("CheckCompat", request, timeout=600))

    async def pin(self, checkpoint: str | CheckpointInfo, *, unpin: bool = False) -> CheckpointInfo:
        """Keep a checkpoint whatever ``--keep-last`` says, or no longer."""
        request = pb.PinRequest(checkpoint=_id(checkpoint), unpin=unpin)
        return CheckpointInfo.of(await self.connection.call("PinCheckpoint", request))

    async def prune(self, *, dry_run: bool = False) -> PruneInfo:
        """Remove from the store what no checkpoint needs."""
        return PruneInfo.of(await self.connection.call("Prune", pb.PruneRequest(dry_run=dry_run), timeout=3600))

    async def audit(self, job: str = "", *, follow: bool = False) -> AsyncIterator[EventInfo]:
        """Who asked for what, allowed or refused, oldest first. Takes the role administer."""
        request = pb.ListEventsRequest(job=job, follow=follow, audit=True)
        async for message in self.connection.stream("ListEvents", lambda: request):
            yield EventInfo.of(message)

    async def node_token(self, *, node: str = "", seconds: float = 0.0) -> pb.NodeTokenReply:
        """A token with which one machine may join. Takes the role administer."""
        request = pb.NodeTokenRequest(node=node, seconds=seconds)
        reply: pb.NodeTokenReply = await self.connection.call("NodeToken", request)
        return reply

    async def remove_node(self, node: str) -> list[str]:
        """Revoke what a node was given; returns the serial numbers. Takes the role administer."""
        reply = await self.connection.call("RemoveNode", pb.NodeRef(node=node))
        return list(reply.serials)

    async def status(self) -> StatusInfo:
        """Who leads, and where the store is."""
        return StatusInfo.of(await self.connection.call("Status", pb.StatusRequest()))


class AsyncJob:
    """A job, by its id."""

    def __init__(self, client: AsyncClient, id: str) -> None:
        self.id = id
        self._client = client
        self._connection = client.connection

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    async def status(self) -> JobInfo:
        """The job as it stands."""
        return JobInfo.of(await self._connection.call("GetJob", pb.JobRef(job=self.id)))

    async def watch(self) -> AsyncIterator[JobInfo]:
        """The job now, then at each change, until it is over."""
        async for message in self._connection.stream("WatchJob", lambda: pb.JobRef(job=self.id)):
            yield JobInfo.of(message)

    async def until(self, reached: Callable[[JobInfo], bool], *, timeout: float | None = None) -> JobInfo:
        """Wait until ``reached(job)``. Raises `TimeoutError`, or `Conflict` if the job ends before."""
        async with asyncio.timeout(timeout):
            last: JobInfo | None = None
            async for last in self.watch():
                if reached(last):
                    return last
        raise Conflict(f"job {self.id} ended before that: {last.phase if last else 'gone'} ({last and last.reason})")

    async def wait(self, *, timeout: float | None = None) -> JobInfo:
        """Wait until the job is over. Raises `TimeoutError`."""
        return await self.until(lambda job: job.over, timeout=timeout)

    async def attempt(self, attempt: int, *, progress: Callable[[AttemptInfo], None] | None = None) -> AttemptInfo:
        """Follow an attempt to its end and return it, whatever the end is."""
        request = pb.GetAttemptRequest(job=self.id, attempt=attempt)
        last: AttemptInfo | None = None
        async for message in self._connection.stream("WatchAttempt", lambda: request):
            last = AttemptInfo.of(message)
            if progress:
                progress(last)
            if last.over:
                return last
        raise MoorageError(f"attempt {attempt} of {self.id} ended without an answer: {last}")

    async def _committed(
        self, method: str, request: Any, progress: Callable[[AttemptInfo], None] | None
    ) -> CheckpointInfo:
        # Before it moves, the files that a job has mapped may have to be read, here and there.
        try:
            reply = await self._connection.call(method, request, timeout=600)
        except Conflict:
            if not await self._has_begun():
                raise
            reply = await self._connection.call(method, request, timeout=600)
        attempt = await self.attempt(reply.attempt, progress=progress)
        if attempt.phase != "committed":
            kind = by_name(attempt.error_kind) if attempt.error_kind else AttemptAborted
            raise kind(
                f"checkpoint of {(await self.status()).name} was not made: {attempt.reason or attempt.phase}",
                attempt.hint,
            )
        for checkpoint in await self._client.checkpoints(self.id):
            if checkpoint.id == attempt.checkpoint:
                return checkpoint
        raise NotFound(f"checkpoint {attempt.checkpoint} was committed and is already gone", "raise --keep-last")

    async def _has_begun(self) -> bool:
        """Wait for a job that is about to run: whoever has just started it need not. Returns whether it runs.

        One that waits for room is not waited for longer than for a coordinator.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                async for job in self.watch():
                    if job.phase not in {"pending", "starting", "restoring"}:
                        return job.phase in {"running", "checkpointing"}
                    now = asyncio.get_running_loop().time()
                    limit.reschedule(now + self._connection.patience if job.phase == "pending" else None)
        return False

    async def checkpoint(self, *, progress: Callable[[AttemptInfo], None] | None = None) -> CheckpointInfo:
        """Checkpoint the job; it runs on. Returns when the checkpoint is committed.

        A job that is about to run is waited for. Raises `Refused` (something cannot be saved), `AttemptAborted`,
        `Conflict` (not running).
        """
        request = pb.CheckpointRequest(job=self.id, request_id=request_id())
        return await self._committed("Checkpoint", request, progress)

    async def park(self, *, keep: str = "", progress: Callable[[AttemptInfo], None] | None = None) -> CheckpointInfo:
        """Checkpoint the job and take it off its nodes. Returns when it is parked.

        ``keep``: ``gpu`` or ``host``, where its nodes keep the device memory beside the checkpoint, so that a restore
        there need not read the store.
        """
        request = pb.JobRequest(job=self.id, request_id=request_id(), keep=keep)
        checkpoint = await self._committed("Park", request, progress)
        await self.until(lambda job: job.phase not in {"checkpointing", "parking", "running"})
        return checkpoint

    async def move(self, to: Iterable[str] = (), *, progress: Callable[[AttemptInfo], None] | None = None) -> JobInfo:
        """Checkpoint the job and restore it on these nodes. Returns when it runs there."""
        before = await self.status()
        request = pb.MoveRequest(job=self.id, nodes=list(to), request_id=request_id())
        await self._committed("Move", request, progress)
        return await self._running(before.incarnation)

    async def restore(
        self,
        checkpoint: str | CheckpointInfo | None = None,
        *,
        on: Iterable[str] = (),
        if_incompatible: str | None = None,
    ) -> JobInfo:
        """Bring the job back from a checkpoint (the newest), on these nodes. Returns when it runs.

        ``if_incompatible``: ``fail`` or ``cold-start``, in place of the job's policy. Raises `Incompatible`.
        """
        before = await self.status()
        request = pb.RestoreRequest(
            job=self.id,
            checkpoint=_id(checkpoint),
            nodes=list(on),
            request_id=request_id(),
            if_incompatible=choice(IF_INCOMPATIBLE, if_incompatible, "--if-incompatible")  # type: ignore[arg-type]
            if if_incompatible
            else 0,
        )
        await self._connection.call("Restore", request, timeout=600)
        return await self._running(before.incarnation)

    async def _running(self, incarnation: int) -> JobInfo:
        def settled(job: JobInfo) -> bool:
            if job.incarnation > incarnation and job.phase in {"running", "checkpointing", "finishing"}:
                return True
            return job.over or (job.phase == "parked" and job.incarnation > incarnation)

        job = await self.until(settled)
        if job.phase == "parked" or job.phase in {"failed", "stopped"}:
            kind = by_name(job.error_kind) if job.error_kind else Conflict
            raise kind(
                job.reason,
                job.hint
                or f"`moorage events {job.name}` says more, `moorage checkpoints {job.name}` which others there are",
            )
        return job

    async def examine(self) -> list[JobFindingInfo]:
        """What of the job cannot be saved now, with nothing touched; empty if all can. Raises `Conflict`."""
        reply = await self._connection.call("ExamineJob", pb.JobRef(job=self.id), timeout=300)
        return [JobFindingInfo.of(finding) for finding in reply.findings]

    async def stop(self, *, checkpoint: bool = False, grace: float = 10.0) -> JobInfo:
        """Stop the job, with ``checkpoint`` after a last one. Returns when no process of it is left."""
        request = pb.StopRequest(job=self.id, checkpoint=checkpoint, grace_seconds=grace, request_id=request_id())
        await self._connection.call("Stop", request)
        return await self.wait()

    async def delete(self, *, dry_run: bool = False) -> list[str]:
        """Forget the job, which must be over, with its logs and its checkpoints; returns their ids.

        Raises `Conflict`: it is not over, or a checkpoint is pinned. One that is gone already is no error.
        """
        try:
            reply = await self._connection.call("DeleteJob", pb.DeleteJobRequest(job=self.id, dry_run=dry_run))
        except NotFound:
            return []  # the job was there, so an earlier call has removed it and its answer was lost
        return list(reply.checkpoints)

    async def events(self, *, follow: bool = False) -> AsyncIterator[EventInfo]:
        """The job's events, oldest first; with ``follow`` until the job is over."""
        told: set[bytes] = set()
        request = pb.ListEventsRequest(job=self.id, follow=follow)
        async for message in self._connection.stream("ListEvents", lambda: request):
            # After a reconnect the list comes again from its beginning. Times do not tell what is new: another
            # coordinator has another clock.
            identity = hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
            if identity in told:
                continue
            told.add(identity)
            yield EventInfo.of(message)

    async def logs(self, *, rank: int = ALL_RANKS, follow: bool = False) -> AsyncIterator[LogLine]:
        """What the ranks wrote; with ``follow`` until the job is over.

        After a restore the output goes on where the checkpoint stood: lines that are computed again come again.
        """
        if rank < ALL_RANKS:
            raise UsageError(f"there is no rank {rank}", "ranks count from 0")
        reached: dict[int, tuple[int, int]] = {}

        def request() -> pb.LogsRequest:
            return pb.LogsRequest(
                job=self.id,
                rank=rank,
                follow=follow,
                positions=[
                    pb.LogPosition(pod=pod, incarnation=incarnation, offset=offset)
                    for pod, (incarnation, offset) in reached.items()
                ],
            )

        async for chunk in self._connection.stream("ReadLogs", request):
            reached[chunk.pod] = (chunk.incarnation, chunk.offset)
            yield LogLine.of(chunk)

    async def exec(
        self,
        command: Sequence[str],
        *,
        rank: int = 0,
        stdin: AsyncIterator[bytes] | None = None,
        output: Callable[[bytes, bool], None] | None = None,
    ) -> int:
        """Run a command in the pod of a rank; returns its exit code, as a shell would: 127 for a command that is not
        there, 126 for one that cannot be executed. ``output(data, is_stderr)`` gets its output."""
        if rank < 0:
            raise UsageError(f"there is no rank {rank}", "ranks count from 0")
        for text in command:
            check_text("the command", text)

        async def requests() -> AsyncIterator[worker_pb2.ExecInput]:
            yield worker_pb2.ExecInput(fence=worker_pb2.Fence(job=self.id), command=list(command), rank=rank)
            if not await rpc.accepted(call):  # a call that is refused while it is written to loses the reason
                return
            if stdin is not None:
                async for data in stdin:
                    yield worker_pb2.ExecInput(stdin=data)
            yield worker_pb2.ExecInput(stdin_eof=True)

        code: int | None = None
        try:
            async with self._connection.open("Exec", requests()) as call:
                async for reply in call:
                    if output and reply.stdout:
                        output(reply.stdout, False)
                    if output and reply.stderr:
                        output(reply.stderr, True)
                    if reply.exited:
                        code = reply.exit_code
        except grpc.RpcError as error:
            raise rpc.translate(error, self._connection.what) from error
        if code is None:
            raise MoorageError(f"the connection to the command in {self.id} broke", "the command was ended with it")
        return code

    async def pull(
        self, path: str = "", *, to: Path | str = ".", progress: Callable[[int, int], None] | None = None
    ) -> list[str]:
        """Copy a path of the job (all that changed below its working directory) into ``to``; returns the files.

        ``progress`` is called with the numbers of files and of bytes that have come so far.
        """
        from moorage.coordinator.client.pull import Receiver

        request = pb.PullRequest(job=self.id, path=path)
        receiver = Receiver(Path(to))
        try:
            async for part in self._connection.stream("Pull", lambda: request):
                receiver.accept(part)
                if progress is not None:
                    progress(len(receiver), receiver.bytes)
        except OSError as error:
            raise MoorageError(
                f"{error.filename or to} cannot be written: {error.strerror}", "name another folder"
            ) from error
        finally:
            receiver.close()
        return receiver.files


def _id(checkpoint: str | CheckpointInfo | None) -> str:
    return checkpoint.id if isinstance(checkpoint, CheckpointInfo) else checkpoint or ""
