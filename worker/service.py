"""``moorage.v1.Worker`` over gRPC. Only a coordinator may call it (`roles`); what a call does is in `agent`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import Any, TypeVar

import structlog

from moorage import rpc
from moorage.errors import UsageError
from moorage.v1 import types_pb2, worker_pb2
from moorage.v1.worker_pb2_grpc import WorkerServicer
from moorage.worker import exec as exec_session
from moorage.worker import logs, pod_user
from moorage.worker.agent import Agent
from moorage.worker.layers.owner import Owner, acting_as, owner_of

log = structlog.get_logger(__name__)
T = TypeVar("T")

_PIECES_AT_ONCE = 8


def _bind(fence: worker_pb2.Fence) -> None:
    structlog.contextvars.bind_contextvars(trace=fence.trace or rpc.trace.get())


class WorkerService(WorkerServicer):
    """The servicer. Every method raises `MoorageError`; `rpc.aio_server` carries it to the caller."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def StartPod(self, request: worker_pb2.StartPodRequest, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.start(request)

    async def RestorePod(self, request: worker_pb2.RestorePodRequest, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.restore(request)

    async def ReleasePod(self, request: worker_pb2.PodOrder, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.release(request)

    async def KillPod(self, request: worker_pb2.KillPodRequest, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.kill(request)

    async def PreparePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PrepareReply:
        _bind(request.fence)
        return await self._agent.prepare(request)

    async def FreezePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.freeze(request)

    async def SealPod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.seal(request)

    async def CapturePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.CaptureReply:
        _bind(request.fence)
        return await self._agent.capture(request)

    async def ResumePod(self, request: worker_pb2.AttemptOrder, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.resume(request)

    async def FinishPod(self, request: worker_pb2.PodOrder, context: Any) -> worker_pb2.PodReply:
        _bind(request.fence)
        return await self._agent.finish(request)

    async def WatchPods(self, request: worker_pb2.WatchPodsRequest, context: Any) -> AsyncIterator[types_pb2.PodStatus]:
        await self._agent.check_leader(request.epoch)
        async for status in self._agent.watch():
            yield status

    async def ReadLogs(self, request: worker_pb2.ReadLogsRequest, context: Any) -> AsyncIterator[worker_pb2.LogChunk]:
        if request.incarnation:
            pod = self._agent.find(request.job, request.incarnation, request.pod)
        else:
            pod = self._agent.newest(request.job, request.pod)
        async for chunk in logs.read(pod, offset=request.offset, rank=request.rank, follow=request.follow):
            yield chunk

    async def Exec(
        self, requests: AsyncIterator[worker_pb2.ExecInput], context: Any
    ) -> AsyncIterator[worker_pb2.ExecOutput]:
        inputs = aiter(requests)
        try:
            first = await anext(inputs)
        except StopAsyncIteration:
            raise UsageError("the call ended before it named a command") from None
        _bind(first.fence)
        await self._agent.admit(first.fence)
        pod = self._agent.find(first.fence.job, first.fence.incarnation, first.fence.pod)

        async def started() -> None:
            # The caller sends no more before it knows: a call that is refused while it sends loses the reason.
            await context.send_initial_metadata(rpc.ACCEPTED)

        async for output in exec_session.run(pod, first, inputs, started=started):
            yield output

    async def Pull(self, request: worker_pb2.PullPodRequest, context: Any) -> AsyncIterator[worker_pb2.FilePart]:
        fence = request.fence
        await self._agent.admit(fence)
        pod = self._agent.find(fence.job, fence.incarnation, fence.pod)
        user = pod_user.resolve(pod.spec)
        owner = owner_of(user.uid, user.gid, user.groups)
        pieces = await asyncio.to_thread(pod.layers.iter_parts, request.path)
        while batch := await asyncio.to_thread(_take, pieces, owner):
            for piece in batch:
                yield worker_pb2.FilePart(
                    path=piece.path.encode(errors="surrogateescape").decode(errors="replace"),
                    mode=piece.mode,
                    modified=piece.modified,
                    link_target=piece.link_target.encode(errors="surrogateescape").decode(errors="replace"),
                    data=piece.data,
                    last=piece.last,
                )

    async def ExaminePod(self, request: worker_pb2.ExamineRequest, context: Any) -> worker_pb2.ExamineReply:
        _bind(request.fence)
        return await self._agent.examine(request)

    async def QuiescePod(self, request: worker_pb2.QuiesceRequest, context: Any) -> worker_pb2.QuiesceReply:
        _bind(request.fence)
        return await self._agent.quiesce(request)

    async def CheckFit(self, request: worker_pb2.FitRequest, context: Any) -> worker_pb2.FitReply:
        return await self._agent.fit(request)

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeReply:
        return worker_pb2.DescribeReply(findings=await asyncio.to_thread(_findings, self._agent))


def _take(pieces: Iterator[T], owner: Owner) -> list[T]:
    """The next pieces, read with the rights of the job's owner: what the job may not read, its owner does not get."""
    with acting_as(owner):
        return list(islice(pieces, _PIECES_AT_ONCE))


def _findings(agent: Agent) -> list[worker_pb2.Finding]:
    from moorage.runtime import doctor

    found = doctor.findings(state=agent.node.state)
    return [worker_pb2.Finding(name=f.name, state=f.state, detail=f.detail, cure=f.cure) for f in found]
