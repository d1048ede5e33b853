"""Giving pods an order: who orders, one pod, all pods, and what a failure of one of them is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Any

from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine.instructions import Order
from moorage.errors import Fenced, MoorageError
from moorage.v1 import worker_pb2

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader


class Failure(Exception):
    """An order failed on one pod."""

    def __init__(self, pod: int, node: str, error: MoorageError) -> None:
        super().__init__(f"pod {pod} on {node}: {error}")
        self.pod = pod
        self.node = node
        self.error = error

    def event(self, order: Order) -> ev.Failed:
        """What the machine is told."""
        return ev.Failed(
            time=time.time(),
            of=order,
            message=self.error.message,
            hint=self.error.hint,
            error_kind=type(self.error).__name__,
            pod=self.pod,
            node=self.node,
        )


def fence_of(leader: Leader, job: Job, pod: int, incarnation: int) -> worker_pb2.Fence:
    """Who orders, and for which pod."""
    return worker_pb2.Fence(epoch=leader.epoch, job=job.id, incarnation=incarnation, pod=pod, trace=job.state.trace)


async def on_pod(leader: Leader, job: Job, pod: int, name: str, request: Any, **options: Any) -> Any:
    """Give one pod's node an order. Raises `Failure`, `NodeGone`, `LeadershipLost`."""
    leader.require()
    node = job.state.seats[pod].node
    try:
        reply = await leader.workers.order(node, name, request, trace=job.state.trace, **options)
    except Fenced as error:
        await leader.verify()
        raise Failure(pod, node, error) from error
    except MoorageError as error:
        raise Failure(pod, node, error) from error
    if reply.status.job:
        job.status(reply.status)
    return reply


async def all_pods(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """Do all at once; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
