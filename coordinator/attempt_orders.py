"""Carrying out the orders of a checkpoint attempt: prepare, freeze, seal, capture, collect, write the manifest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from moorage.barrier import clock
from moorage.barrier.decision import Step, tally
from moorage.coordinator import quiesce
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine.instructions import (
    AttemptOrder,
    Capture,
    Collect,
    Freeze,
    Observe,
    Order,
    Prepare,
    Seal,
    Settle,
    WriteManifest,
)
from moorage.coordinator.machine.state import AttemptState, Finding
from moorage.coordinator.on_pods import Failure, all_pods, fence_of, on_pod
from moorage.coordinator.orders import reported
from moorage.coordinator.workers import NodeGone
from moorage.errors import AttemptAborted, MoorageError, NotFound, Unavailable
from moorage.records import AttemptStart, Vote
from moorage.store import GlobalManifest
from moorage.v1 import worker_pb2

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

#: How long the pods may take to run again after an abort.
_SETTLE_SECONDS = 60.0


def _attempt(job: Job) -> AttemptState:
    attempt = job.state.attempt
    if attempt is None:
        raise asyncio.CancelledError  # the order is not wanted any more
    return attempt


def _start(job: Job) -> AttemptStart:
    attempt = _attempt(job)
    return AttemptStart(
        attempt=attempt.number,
        incarnation=attempt.incarnation,
        pods=job.state.pods,
        kind=attempt.kind,
        deadline_seconds=job.state.policy.attempt_deadline_seconds,
    )


async def _on_all(leader: Leader, job: Job, order: AttemptOrder, name: str, generation: int = 0) -> list[Any]:
    attempt = _attempt(job)
    left = max(0.1, attempt.deadline - time.time())
    until = clock.now() + left
    return await all_pods(
        on_pod(
            leader,
            job,
            pod,
            name,
            worker_pb2.AttemptOrder(
                fence=fence_of(leader, job, pod, order.incarnation),
                attempt=order.attempt,
                kind=attempt.kind,
                remaining_seconds=left,
                store_generation=generation,
                keep=attempt.keep,
            ),
            until=until,
        )
        for pod in range(job.state.pods)
    )


async def prepare(leader: Leader, job: Job, order: Prepare) -> None:
    """Ask every pod what stands in the way; all refusals are reported together."""
    await reported(job, order, _prepare(leader, job, order))


async def _prepare(leader: Leader, job: Job, order: Prepare) -> ev.Event:
    job.telemetry.restart()
    start = await leader.read_start(job.id, order.attempt)
    replies = await _on_all(leader, job, order, "prepare", start.store_generation)
    findings: list[Finding] = []
    kinds: set[str] = set()
    first = -1
    for pod, reply in enumerate(replies):
        findings += [Finding(r.what, r.why, r.cure) for r in reply.refusals]
        kinds |= {r.kind or "Refused" for r in reply.refusals}
        if reply.refusals and first < 0:
            first = pod
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        found = findings[0]
        return ev.Failed(
            time=time.time(),
            of=order,
            message=f"{found.what}: {found.why}{more}",
            hint=found.cure,
            error_kind=kinds.pop() if len(kinds) == 1 else "Refused",
            pod=first,
            node=job.state.seats[first].node,
            refusals=tuple(findings),
        )
    return ev.Done(time=time.time(), of=order)


async def freeze(leader: Leader, job: Job, order: Freeze) -> None:
    """Stop NCCL at a consistent cut, then freeze every pod."""

    async def work() -> ev.Event:
        try:
            await quiesce.close(leader, job, order.incarnation, max(0.1, _attempt(job).deadline - time.time()))
        except AttemptAborted as error:
            return ev.Failed(
                time=time.time(), of=order, message=error.message, hint=error.hint, error_kind="AttemptAborted"
            )
        await _on_all(leader, job, order, "freeze")
        return ev.Done(time=time.time(), of=order)

    await reported(job, order, work())


def _simple(name: str) -> Callable[[Leader, Job, AttemptOrder], Awaitable[None]]:
    async def carry_out(leader: Leader, job: Job, order: AttemptOrder) -> None:
        async def work() -> ev.Event:
            await _on_all(leader, job, order, name)
            return ev.Done(time=time.time(), of=order)

        await reported(job, order, work())

    return carry_out


async def capture(leader: Leader, job: Job, order: Capture) -> None:
    """Have every pod captured; done when every vote in etcd says so."""
    watching = asyncio.create_task(_count(job, order.attempt, "captured"))
    try:
        await reported(job, order, _capture(leader, job, order))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _capture(leader: Leader, job: Job, order: Capture) -> ev.Event:
    start = _start(job)
    await _on_all(leader, job, order, "capture")
    result = tally(start, await job.persistence.attempts.votes(order.attempt, "captured"))
    if result.verdict == "yes":
        return ev.Done(time=time.time(), of=order)
    missing = ", ".join(map(str, result.missing))
    reason = result.reason or f"pods {missing} answered and did not vote"
    return ev.Failed(time=time.time(), of=order, message=reason, error_kind="AttemptAborted")


async def _count(job: Job, attempt: int, step: Step) -> None:
    """Keep the number of votes current, for those who watch the attempt."""
    async with aclosing(job.persistence.attempts.watch_votes(attempt, step)) as changes:
        async for votes in changes:
            job.votes[step] = sum(vote.ok for vote in votes.values())
            job.changed.ring()


async def observe(leader: Leader, job: Job, order: Observe) -> None:
    """Wait for an outcome that somebody else creates."""
    try:
        outcome = await job.persistence.attempts.await_outcome(order.attempt, deadline=float("inf"))
    except NotFound:
        return  # it was forgotten, so it had ended
    job.post(ev.OutcomeStands(time=time.time(), outcome=outcome))


async def collect(leader: Leader, job: Job, order: Collect) -> None:
    """Wait until every pod's manifest is in the store; where the job runs on, have it whole again before."""
    start = _start(job)
    if start.kind == "resume":
        await _running_again(leader, job, order)
    async with aclosing(job.persistence.attempts.watch_votes(order.attempt, "persisted")) as changes:
        async for votes in changes:
            job.votes["persisted"] = sum(vote.ok for vote in votes.values())
            job.changed.ring()
            result = tally(start, votes)
            if result.verdict == "no":
                failed = ev.Failed(time=time.time(), of=order, message=result.reason, error_kind="AttemptAborted")
                job.post(failed)
                return
            if result.verdict == "yes":
                job.post(_persisted(order, votes, job.gates_seconds if start.kind == "resume" else 0.0))
                return


async def _running_again(leader: Leader, job: Job, order: Collect) -> None:
    """NCCL is back in every pod. If not, the job cannot run on, and goes back to what is stored now."""
    try:
        await quiesce.open_again(leader, job, order.incarnation)
    except Failure as failure:
        reason = f"NCCL did not come back after the checkpoint: {failure.error}"
        job.post(ev.PodFailed(time=time.time(), pod=failure.pod, incarnation=order.incarnation, reason=reason))
    except NodeGone as gone:
        job.post(ev.NodeLost(time=time.time(), node=gone.node))


def _persisted(order: Collect, votes: dict[int, Vote], gates_seconds: float) -> ev.Persisted:
    """``gates_seconds``: how long NCCL kept the job waiting, from the first gate closed until all were open."""
    return ev.Persisted(
        time=time.time(),
        of=order,
        bytes_total=sum(vote.bytes_total for vote in votes.values()),
        bytes_new=sum(vote.bytes_new for vote in votes.values()),
        pause_seconds=round(max(gates_seconds, *(vote.pause_seconds for vote in votes.values())), 4),
    )


async def write_manifest(leader: Leader, job: Job, order: WriteManifest) -> None:
    """Write the global manifest; if a prune has begun since the attempt's start, make sure that nothing is missing."""
    attempt = _attempt(job)
    state = job.state
    votes = await job.persistence.attempts.votes(order.attempt, "persisted")
    start = await leader.read_start(job.id, order.attempt)
    manifest = GlobalManifest(
        job=job.id,
        owner=state.owner,
        attempt=attempt.number,
        incarnation=attempt.incarnation,
        created=attempt.started,
        pods=[votes[pod].manifest for pod in range(state.pods)],
        spec=job.spec.SerializeToString(deterministic=True),
        trace=attempt.trace,
    )
    if state.policy.durability == "local" and attempt.kind == "resume" and leader.remote_store:
        # It counts as it is; `uploads` writes the manifest when all pods are in the store.
        waiting = ev.Waiting(
            pods=tuple(manifest.pods),
            nodes=tuple(seat.node for seat in state.seats),
            spec=manifest.spec,
            started=attempt.started,
        )
        name, generation = leader.store.name_of(manifest), await leader.read_generation()
        job.post(ev.Written(time=time.time(), of=order, manifest=name, generation=generation, waiting=waiting))
        return
    if job.cut:
        manifest = msgspec.structs.replace(manifest, extra={**manifest.extra, "nccl_cut": job.cut})
    try:
        name = await asyncio.to_thread(leader.store.write_global_manifest, manifest)
        generation = await leader.read_generation()
        if generation != start.store_generation:
            await asyncio.to_thread(leader.store.confirm, name)
    except Unavailable:
        raise  # given again
    except (MoorageError, OSError) as error:
        kind = type(error).__name__ if isinstance(error, MoorageError) else "MoorageError"
        job.post(ev.Failed(time=time.time(), of=order, message=str(error), error_kind=kind))
        return
    job.post(ev.Written(time=time.time(), of=order, manifest=name, generation=generation))


async def settle(leader: Leader, job: Job, order: Settle) -> None:
    """Make sure that every pod runs again."""
    until = clock.now() + _SETTLE_SECONDS

    async def one(pod: int) -> None:
        request = worker_pb2.AttemptOrder(
            fence=fence_of(leader, job, pod, order.incarnation), attempt=order.attempt, kind=_attempt(job).kind
        )
        pause = 0.2
        while True:
            try:
                await on_pod(leader, job, pod, "resume", request, until=until)
                return
            except Failure:
                # A worker that has not seen the outcome yet may say no: that is no reason to give the job up.
                if clock.now() > until:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def work() -> ev.Event:
        await all_pods(one(pod) for pod in range(job.state.pods))
        await quiesce.open_again(leader, job, order.incarnation)
        return ev.Done(time=time.time(), of=order)

    await reported(job, order, work())
    job.telemetry.restart()


EXECUTORS: dict[type[Order], Callable[[Any, Any, Any], Awaitable[None]]] = {
    Prepare: prepare,
    Freeze: freeze,
    Seal: _simple("seal"),
    Capture: capture,
    Observe: observe,
    Collect: collect,
    WriteManifest: write_manifest,
    Settle: settle,
}
