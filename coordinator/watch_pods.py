"""What the workers say of their pods: streams from every live node, and the search for jobs that hang."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from moorage.coordinator import restored
from moorage.coordinator.machine import events as ev
from moorage.coordinator.workers import NodeGone
from moorage.errors import Fenced, MoorageError
from moorage.v1 import worker_pb2

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)


async def watch_node(leader: Leader, node: str) -> None:
    """Follow a node's pods until the node is gone; everything is listed again after each reconnect."""
    pause = 0.1
    while True:
        try:
            await _follow(leader, node)
            pause = 0.1
        except NodeGone:
            return
        except Fenced:
            await leader.verify()
        except MoorageError as error:
            log.info("pods not watched", node=node, error=str(error))
        await asyncio.sleep(pause)
        pause = min(2 * pause, 1.0)


async def _follow(leader: Leader, node: str, *, once: bool = False) -> None:
    # Only pods that ran before the question was asked can be missing from the answer.
    expected = {
        (job.id, pod, job.state.incarnation)
        for job in leader.jobs.values()
        if job.state.phase in ("running", "checkpointing") or job.state.attempt is not None
        for pod, seat in enumerate(job.state.seats)
        if seat.node == node
    }
    listed = False
    request = worker_pb2.WatchPodsRequest(epoch=leader.epoch)
    async for status in leader.workers.replies(node, "WatchPods", request):
        if not status.job:
            listed = True
            _missing(leader, node, expected)
            if once:
                return
            continue
        if not listed:
            expected.discard((status.job, status.pod, status.incarnation))
        if (job := leader.jobs.get(status.job)) is not None:
            try:
                restored.seen(leader, node, status.job, status.incarnation)
            except restored.OlderEtcdError as older:
                leader.refuse(older)
                return
            job.status(status)


def _missing(leader: Leader, node: str, expected: set[tuple[str, int, int]]) -> None:
    for name, pod, incarnation in sorted(expected):
        if (job := leader.jobs.get(name)) is not None:
            reason = f"{node} does not have it any more"
            job.post(ev.PodFailed(time=time.time(), pod=pod, incarnation=incarnation, reason=reason))


async def watch_for_hangs(leader: Leader, job: Job) -> None:
    """Look at a job's pods now and then; tell when none has moved for too long."""
    seconds = job.state.policy.hang_seconds
    while not job.state.over:
        await asyncio.sleep(min(max(seconds / 4, 0.2), 15.0))
        state = job.state
        if state.phase != "running" or state.attempt is not None:
            job.telemetry.restart()
            continue
        for node in state.nodes:
            # A pod that does nothing sends no news: ask.
            try:
                await asyncio.wait_for(_follow(leader, node, once=True), 10.0)
            except (MoorageError, NodeGone, TimeoutError) as error:
                log.info("pods not asked", node=node, error=str(error))
        if (hung := job.telemetry.hangs(state, state.policy)) and job.state.incarnation == state.incarnation:
            reason = f"no output and no processor time in {hung:.0f} s"
            job.post(ev.Hung(time=time.time(), incarnation=state.incarnation, reason=reason))
            job.telemetry.restart()
