"""``moorage.v1.Coordinator`` over gRPC: requests in, what the leader knows and does out.

Only the leader answers; any other coordinator raises `Unavailable` with the leader's address as hint. `Status` always
answers.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import structlog

from moorage import __version__, roles, rpc
from moorage.config import CoordinatorConfig
from moorage.coordinator import ended, events, fit, joining, logs, proxies, submit, views
from moorage.coordinator.job import Job
from moorage.coordinator.leader import Leader
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine.state import job_of
from moorage.coordinator.restored import HINT
from moorage.coordinator.service_fleet import FleetService
from moorage.coordinator.workers import NodeGone
from moorage.errors import Conflict, Incompatible, NotFound, Unavailable, UsageError
from moorage.store import CheckResult
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2, worker_pb2
from moorage.v1.coordinator_pb2_grpc import CoordinatorServicer

log = structlog.get_logger(__name__)


class CoordinatorService(FleetService, CoordinatorServicer):
    """The servicer. ``leader`` is set while this coordinator leads, ``leader_address`` is who does."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self.leader: Leader | None = None
        self.leader_address = ""
        self.older = ""  # why this coordinator does not lead although it could: etcd is older than the cluster

    def _leading(self) -> Leader:
        if self.leader is not None and self.leader.leading:
            return self.leader
        if self.older:
            raise Conflict(self.older, HINT)
        other = self.leader_address
        hint = (
            f"the leader is {other}"
            if other and other != self._config.advertise
            else "one is about to take over; if none does, etcd cannot be reached"
        )
        raise Unavailable(f"coordinator {self._config.advertise} does not lead", hint)

    def note(self, attempt: roles.Attempt) -> None:
        """Take a call into the audit trail; a coordinator that does not lead has only its log."""
        log.info(
            "call",
            caller=str(attempt.identity),
            method=attempt.method,
            allowed=attempt.allowed,
            job=attempt.job,
            peer=attempt.peer,
            why=attempt.reason,
        )
        if self.leader is not None and self.leader.leading:
            self.leader.audit.put(attempt)

    def _job(self, reference: str) -> Job:
        """The job that is meant. Raises `NotFound`, `Forbidden` when it is another's and the caller may not do this."""
        job = self._leading().find(reference)
        rpc.about(job.id, job.spec.owner)
        return job

    @staticmethod
    def _shown(job: Job) -> pb.Job:
        """The job as its caller may see it: secrets may stand in its environment."""
        message = views.job_message(job)
        if rpc.principal.get() != job.spec.owner:
            message.spec.ClearField("env")
            message.spec.ClearField("rank_env")
        return message

    # -- jobs

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.Job:
        leader = self._leading()
        trace = rpc.trace.get() or uuid.uuid4().hex
        job = await submit.submit(leader, request, rpc.caller.get(), rpc.principal.get(), trace)
        rpc.about(job.id, job.spec.owner)
        return self._shown(job)

    async def GetJob(self, request: pb.JobRef, context: Any) -> pb.Job:
        return self._shown(self._job(request.job))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Any) -> pb.ListJobsReply:
        jobs = sorted(self._leading().jobs.values(), key=lambda job: job.state.created)
        return pb.ListJobsReply(jobs=[self._shown(job) for job in jobs if request.all or not job.state.over])

    async def WatchJob(self, request: pb.JobRef, context: Any) -> AsyncIterator[pb.Job]:
        leader = self._leading()
        job = self._job(request.job)
        last: pb.Job | None = None
        while True:
            seen = job.changed.rung
            message = self._shown(job)
            if message != last:
                yield message
                last = message
            if message.over:
                return
            await self._change(leader, job, seen)

    @staticmethod
    async def _change(leader: Leader, job: Job, seen: int) -> None:
        await leader.while_leading(asyncio.ensure_future(job.changed.wait(seen, 5.0)))

    # -- checkpoints of a running job, and what else is asked of it

    async def Checkpoint(self, request: pb.CheckpointRequest, context: Any) -> pb.AttemptReply:
        asked = ev.CheckpointAsked(time=time.time(), request=_id(request), trace=rpc.trace.get())
        return await self._attempt(request.job, asked)

    async def Park(self, request: pb.JobRequest, context: Any) -> pb.AttemptReply:
        if request.keep not in ("", "gpu", "host"):
            raise UsageError(f"device memory cannot be kept on {request.keep!r}", "say gpu or host")
        asked = ev.ParkAsked(time=time.time(), request=_id(request), trace=rpc.trace.get(), keep=request.keep)
        return await self._attempt(request.job, asked)

    async def Move(self, request: pb.MoveRequest, context: Any) -> pb.AttemptReply:
        leader = self._leading()
        job = self._job(request.job)
        nodes = tuple(request.nodes)
        if not nodes:
            raise UsageError("no node is named to move to", "moorage move JOB --to NODE,...")
        leader.plan(job, on=nodes)
        leader.plan(job, on=nodes, misfits=await fit.of_running(leader, job, nodes))
        asked = ev.MoveAsked(time=time.time(), request=_id(request), trace=rpc.trace.get(), nodes=nodes)
        return await self._attempt(request.job, asked)

    async def _attempt(self, reference: str, asked: ev.Asked) -> pb.AttemptReply:
        job = self._job(reference)
        state = await job.ask(asked)
        attempt = next((done.attempt for done in state.requests if done.id == asked.request), state.attempts)
        return pb.AttemptReply(job=self._shown(job), attempt=attempt)

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.Job:
        leader = self._leading()
        job = self._job(request.job)
        if request.checkpoint:
            record = await leader.checkpoints.get(request.checkpoint)
            if record.job != job.id:
                raise UsageError(f"checkpoint {request.checkpoint} is of job {record.job}, not of {job.id}")
        cold_start = {
            types_pb2.IF_INCOMPATIBLE_FAIL: False,
            types_pb2.IF_INCOMPATIBLE_COLD_START: True,
        }.get(request.if_incompatible)
        checkpoint = request.checkpoint or job.state.base or job.state.latest
        misfits = await fit.of_checkpoint(leader, checkpoint) if checkpoint else {}
        try:
            leader.plan(job, on=tuple(request.nodes), misfits=misfits)
        except Incompatible:
            if not (job.state.policy.cold_start if cold_start is None else cold_start):
                raise
        if checkpoint and not (job.state.over or job.state.phase == "parked"):
            # Looked at first: what runs is taken down for it.
            await leader.checkpoints.sound(checkpoint)
        await job.ask(
            ev.RestoreAsked(
                time=time.time(),
                request=_id(request),
                trace=rpc.trace.get(),
                checkpoint=request.checkpoint,
                nodes=tuple(request.nodes),
                cold_start=cold_start,
            )
        )
        return self._shown(job)

    async def Stop(self, request: pb.StopRequest, context: Any) -> pb.Job:
        job = self._job(request.job)
        await job.ask(
            ev.StopAsked(
                time=time.time(),
                request=_id(request),
                trace=rpc.trace.get(),
                checkpoint=request.checkpoint,
                grace_seconds=max(0.0, request.grace_seconds),
            )
        )
        return self._shown(job)

    async def DeleteJob(self, request: pb.DeleteJobRequest, context: Any) -> pb.DeleteJobReply:
        leader = self._leading()
        job = self._job(request.job)
        if request.dry_run:
            names = [record.checkpoint for record in await ended.removable(leader, job)]
        else:
            names = await job.remove()
        return pb.DeleteJobReply(job=job.id, name=job.state.name, checkpoints=names)

    async def GetAttempt(self, request: pb.GetAttemptRequest, context: Any) -> pb.Attempt:
        leader = self._leading()
        return await self._find_attempt(leader, self._job(request.job), request.attempt)

    async def WatchAttempt(self, request: pb.GetAttemptRequest, context: Any) -> AsyncIterator[pb.Attempt]:
        leader = self._leading()
        job = self._job(request.job)
        last: pb.Attempt | None = None
        while True:
            seen = job.changed.rung
            message = await self._find_attempt(leader, job, request.attempt)
            if message != last:
                yield message
                last = message
            if message.phase in ("committed", "aborted"):
                return
            await self._change(leader, job, seen)

    @staticmethod
    async def _find_attempt(leader: Leader, job: Job, number: int) -> pb.Attempt:
        number = number or job.state.attempts
        if (found := views.attempt_message(job, number)) is not None:
            return found
        for record in await leader.checkpoints.of_job(job.id):
            if record.attempt == number:
                return views.committed_message(record, job.state.pods)
        raise NotFound(f"job {job.state.name} remembers no attempt {number}", f"its newest is {job.state.attempts}")

    # -- nodes

    async def DescribeNode(self, request: pb.NodeRef, context: Any) -> worker_pb2.DescribeReply:
        leader = self._leading()
        if request.node not in leader.nodes.known:
            raise NotFound(f"no node {request.node!r}", "moorage nodes lists all of them")
        try:
            stub = leader.workers.stub(leader.workers.live(request.node))
        except NodeGone as gone:
            raise Unavailable(str(gone), "is its worker running?") from gone
        reply: worker_pb2.DescribeReply = await rpc.unary(
            stub.Describe, worker_pb2.DescribeRequest(), what=f"node {request.node}", timeout=60.0
        )
        return reply

    # -- what would be

    async def CheckCompat(self, request: pb.CompatRequest, context: Any) -> pb.CompatReply:
        leader = self._leading()
        checkpoint = await self._checkpoint(leader, request.checkpoint)
        pods = await fit.fingerprints(leader, checkpoint)
        if request.node not in leader.nodes.known:
            raise NotFound(f"no node {request.node!r}", "moorage nodes lists all of them")
        try:
            verdicts = [await fit.ask(leader, request.node, msgspec.json.encode(pod)) for pod in pods]
        except NodeGone as gone:
            raise Unavailable(str(gone), "is its worker running?") from gone
        return views.compat_message(checkpoint, request.node, verdicts)

    async def ExamineJob(self, request: pb.JobRef, context: Any) -> pb.ExamineJobReply:
        leader = self._leading()
        job = self._job(request.job)
        if not job.state.seats:
            raise Conflict(f"job {job.state.name} is {job.state.phase}: no process of it runs", "look while it runs")
        nodes = [seat.node for seat in job.state.seats]
        replies = await asyncio.gather(*(fit.examine(leader, job, pod) for pod in range(job.state.pods)))
        return pb.ExamineJobReply(
            findings=[
                pb.JobFinding(pod=pod, node=node, refusal=refusal)
                for pod, (node, reply) in enumerate(zip(nodes, replies, strict=True))
                for refusal in reply.refusals
            ]
        )

    # -- the store

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsReply:
        leader = self._leading()
        records = (
            await leader.checkpoints.of_job(self._job(request.job).id)
            if request.job
            else await leader.checkpoints.all()
        )
        return pb.ListCheckpointsReply(checkpoints=[await self._info(leader, record) for record in records])

    @staticmethod
    async def _info(leader: Leader, record: Any) -> pb.CheckpointInfo:
        job = leader.jobs.get(record.job)
        return views.checkpoint_message(
            record,
            name=job.state.name if job else record.job,
            latest=job is not None and job.state.latest == record.checkpoint,
            uploaded=await leader.checkpoints.uploaded(record),
        )

    async def InspectCheckpoint(self, request: pb.CheckpointRef, context: Any) -> pb.InspectReply:
        leader = self._leading()
        record, _, pods = await leader.checkpoints.read(await self._checkpoint(leader, request.checkpoint))
        return views.inspect_message(await self._info(leader, record), await leader.checkpoints.parts(pods), pods)

    async def CheckCheckpoint(self, request: pb.CheckRequest, context: Any) -> AsyncIterator[pb.CheckProgress]:
        leader = self._leading()
        name = await self._checkpoint(leader, request.checkpoint)
        async for news in leader.checkpoints.check(name, read_data=request.read_data):
            if isinstance(news, CheckResult):
                yield views.check_message(news)
            else:
                yield pb.CheckProgress(bytes_done=news[0], bytes_total=news[1])

    async def PinCheckpoint(self, request: pb.PinRequest, context: Any) -> pb.CheckpointInfo:
        leader = self._leading()
        name = await self._checkpoint(leader, request.checkpoint)
        record = await leader.checkpoints.pin(name, pinned=not request.unpin)
        return await self._info(leader, record)

    @staticmethod
    async def _checkpoint(leader: Leader, reference: str) -> str:
        """The checkpoint of this id; a job's id or name stands for its newest. Raises `NotFound`, `Forbidden`."""
        name = reference
        if job_of(reference) not in leader.jobs:
            for job in leader.jobs.values():
                if reference in (job.id, job.state.name) and job.state.latest:
                    name = leader.find(reference).state.latest
        record = await leader.checkpoints.get(name)
        rpc.about(record.job, record.owner)
        return name

    async def Prune(self, request: pb.PruneRequest, context: Any) -> pb.PruneReply:
        kept, result = await self._leading().checkpoints.prune(dry_run=request.dry_run)
        return pb.PruneReply(
            checkpoints=[record.checkpoint for record in kept],
            packs=result.packs_deleted,
            bytes=result.bytes_freed,
            dry_run=request.dry_run,
        )

    # -- what is streamed

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> AsyncIterator[pb.JobEvent]:
        leader = self._leading()
        if request.audit:
            roles.check_audit(rpc.caller.get())
        job = self._job(request.job) if request.job else None
        if request.audit:
            async for event in leader.streaming(leader.audit.read(job.id if job else "", follow=request.follow)):
                yield views.event_message(event)
            return
        async for event in leader.streaming(events.read(leader, job, follow=request.follow)):
            yield views.event_message(event)

    async def ReadLogs(self, request: pb.LogsRequest, context: Any) -> AsyncIterator[worker_pb2.LogChunk]:
        leader = self._leading()
        async for chunk in leader.streaming(logs.read(leader, self._job(request.job), request)):
            yield chunk

    async def Exec(
        self, requests: AsyncIterator[worker_pb2.ExecInput], context: Any
    ) -> AsyncIterator[worker_pb2.ExecOutput]:
        leader = self._leading()

        async def started() -> None:
            await context.send_initial_metadata(rpc.ACCEPTED)

        async for output in leader.streaming(proxies.execute(leader, requests, started=started)):
            yield output

    async def Pull(self, request: pb.PullRequest, context: Any) -> AsyncIterator[worker_pb2.FilePart]:
        leader = self._leading()
        async for part in leader.streaming(proxies.pull(leader, self._job(request.job), request.path)):
            yield part

    # -- machines that come and go

    async def NodeToken(self, request: pb.NodeTokenRequest, context: Any) -> pb.NodeTokenReply:
        return await joining.token(self._leading(), request)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        return await joining.join(self._leading(), request, rpc.caller.get())

    async def RemoveNode(self, request: pb.NodeRef, context: Any) -> pb.RemoveNodeReply:
        roles.check_leaving(rpc.caller.get(), request.node)
        return await joining.remove(self._leading(), request.node)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        leading = self.leader is not None and self.leader.leading
        return pb.StatusReply(
            cluster=self._config.cluster,
            leader=self._config.advertise if leading else self.leader_address,
            version=__version__,
            store=self._config.store,
            leading=leading,
        )


def _id(request: Any) -> str:
    return request.request_id or uuid.uuid4().hex
