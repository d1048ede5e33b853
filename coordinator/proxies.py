"""Passing streams through to the worker that has the pod: commands inside a pod, and its files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import grpc.aio

from moorage import rpc
from moorage.coordinator.on_pods import fence_of
from moorage.coordinator.workers import NodeGone
from moorage.errors import Conflict, NotFound, Unavailable, UsageError
from moorage.v1.worker_pb2 import ExecInput, ExecOutput, FilePart, PullPodRequest

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader


def _seat(job: Job, pod: int) -> str:
    state = job.state
    if not state.seats or state.bringup is not None or state.ending is not None:
        raise Conflict(f"job {state.name} is {state.phase}: it has no pod to look into", _way_out(job))
    return state.seats[pod].node


def _way_out(job: Job) -> str:
    state = job.state
    if state.phase == "finished":
        return f"its results were written to {job.spec.working_directory} on its nodes: moorage events {state.name}"
    if state.over or state.phase == "parked":
        if state.latest or state.base:
            return f"bring it back first: moorage restore {state.name}"
        return f"it left no checkpoint to look into: moorage events {state.name}"
    return "wait until it runs"


async def execute(
    leader: Leader, requests: AsyncIterator[ExecInput], *, started: Callable[[], Awaitable[None]]
) -> AsyncIterator[ExecOutput]:
    """Run a command beside a rank; ``started`` is called when its worker has let it in.

    Raises `UsageError`, `Conflict`, `Unavailable`, and what the worker raises.
    """
    inputs = aiter(requests)
    try:
        first = await anext(inputs)
    except StopAsyncIteration:
        raise UsageError("the call ended before it named a command") from None
    job = leader.find(first.fence.job)
    rpc.about(job.id, job.spec.owner)
    ranks = job.state.pods * job.spec.ranks_per_pod
    if first.rank >= ranks:
        raise UsageError(f"job {job.state.name} has no rank {first.rank}", f"its ranks are 0 to {ranks - 1}")
    pod = first.fence.pod or first.rank // job.spec.ranks_per_pod
    if pod >= job.state.pods:
        raise UsageError(f"job {job.state.name} has no pod {pod}", f"its pods are 0 to {job.state.pods - 1}")
    node = _seat(job, pod)
    first.fence.CopyFrom(fence_of(leader, job, pod, job.state.incarnation))
    if not first.rank:
        first.rank = pod * job.spec.ranks_per_pod

    async def forward() -> AsyncIterator[ExecInput]:
        yield first
        if not await rpc.accepted(call):
            return
        await started()
        async for message in inputs:
            yield message

    try:
        call = leader.workers.stream(node, "Exec", forward())
    except NodeGone as gone:
        raise Unavailable(str(gone), "wait until the job is restored elsewhere") from gone
    try:
        async for output in call:
            yield output
    except grpc.aio.AioRpcError as error:
        raise rpc.translate(error, f"node {node}") from error
    finally:
        call.cancel()


async def pull(leader: Leader, job: Job, path: str) -> AsyncIterator[FilePart]:
    """The files below ``path`` of all pods, the first pod that has one giving it. Raises `Conflict`, `NotFound`."""
    seen: set[str] = set()
    missing: NotFound | None = None
    for pod in range(job.state.pods):
        node = _seat(job, pod)
        request = PullPodRequest(fence=fence_of(leader, job, pod, job.state.incarnation), path=path)
        mine: set[str] = set()
        try:
            async for part in leader.workers.replies(node, "Pull", request):
                if part.path not in seen:
                    mine.add(part.path)
                    yield part
        except NotFound as error:
            missing = error
        except NodeGone as gone:
            raise Unavailable(str(gone), "wait until the job is restored elsewhere") from gone
        seen |= mine
        await asyncio.sleep(0)
    if missing is not None and not seen:
        raise missing
