"""A pod's part in a checkpoint attempt: prepare, freeze, seal, capture, vote; then what the outcome says.

Invariants:

* from the order to prepare until the outcome has been carried out, the pod is frozen or thawed by this attempt alone;
* the pod is unsealed and thawed only after an outcome was read (or created here, as abort): unsealed first, so that no
  process meets a closed network;
* whatever fails here ends in a vote against the attempt, never in a pod that stands still for ever: the local deadline
  runs from the order to prepare.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

from moorage.barrier import clock
from moorage.barrier.decision import Step
from moorage.errors import AttemptAborted, Conflict, DeviceFailed, Fenced, MoorageError, NotFound
from moorage.records import Outcome, Vote
from moorage.v1 import worker_pb2
from moorage.worker import (
    attempt_capture,
    backlog,
    hooks,
    persist,
    pod_end,
    pod_gpu,
    pod_nccl,
    preflight_pod,
    transient,
)
from moorage.worker.agent_failpoints import step
from moorage.worker.pod import Pod
from moorage.worker.pod_phase import ATTEMPT_PHASES, GONE_PHASES, Change, step_done
from moorage.worker.pod_steps import Timings, all_ended, timed
from moorage.worker.preflight import Objection

#: How long a frozen pod waits for the acknowledgement of what it sent, in seconds.
_DRAIN_SECONDS = 0.2
#: The vote `persisted` is in etcd before this worker has cleared up behind it: a new attempt waits so long for that.
_PERSIST_SECONDS = 20.0
#: How long a pod may run on, between freezing and freezing, until it has read what cannot be saved from its queue.
_READ_SECONDS = 1.0
#: And so long until it has accepted connections: those can be saved, so this only spares the trouble.
_ACCEPT_SECONDS = 0.05
_RETRY_SECONDS = (0.1, 0.5, 2.0, 5.0)
#: The part of an attempt's time that the GPU may take to come to rest.
_QUIESCE_SHARE = 0.25
#: How long a process may take until it has its GPU back.
_BACK_SECONDS = 30.0


def _done(pod: Pod, name: str, order: worker_pb2.AttemptOrder) -> bool:
    record = pod.record
    return step_done(
        name,
        record.phase,
        order_attempt=order.attempt,
        pod_attempt=record.attempt,
        last_attempt=record.last_attempt,
    )


async def prepare(pod: Pod, order: worker_pb2.AttemptOrder) -> worker_pb2.PrepareReply:
    """Look for what cannot be saved; with no objection the pod is in the attempt from now on.

    Raises `Conflict` when the pod is in another attempt, or still brings the last one into the store.
    """
    if pod.record.attempt == order.attempt:
        await _tell(pod, order)
        return worker_pb2.PrepareReply(status=pod.status())
    _done(pod, "prepare", order)
    if not await persist.ended(pod, _PERSIST_SECONDS):
        raise Conflict(
            f"{pod.label} still brings attempt {pod.record.last_attempt} into the store", "try again when it is done"
        )
    found = await preflight_pod.look(pod, order.remaining_seconds or preflight_pod.STANDING_SECONDS)
    if not found.objections:
        seconds = order.remaining_seconds or preflight_pod.STANDING_SECONDS
        await pod_gpu.begin(pod, order.attempt, order.kind, seconds)
        async with step("worker.prepare.record"):
            _enter(pod, order)
        await _tell(pod, order)
    return worker_pb2.PrepareReply(
        status=pod.status(),
        refusals=refusals(found.objections),
        bytes_needed=found.bytes_needed,
        bytes_free=found.bytes_free,
    )


async def _tell(pod: Pod, order: worker_pb2.AttemptOrder) -> None:
    """Let the pod's callbacks run before it is frozen, once, whoever gives the order again."""
    if pod.record.phase == "preparing":
        async with step("worker.prepare.hooks"):
            await hooks.before_checkpoint(pod, order.attempt, order.kind)


def refusals(objections: Iterable[Objection]) -> list[worker_pb2.Refusal]:
    """What a preflight found, as messages."""
    return [worker_pb2.Refusal(what=o.what, why=o.why, cure=o.cure, kind=o.kind) for o in objections]


def _enter(pod: Pod, order: worker_pb2.AttemptOrder) -> None:
    record = pod.record
    record.attempt = record.last_attempt = order.attempt
    record.kind = order.kind or "resume"
    record.keep = order.keep
    record.deadline = clock.now() + order.remaining_seconds
    record.frozen_since = record.pause_seconds = 0.0
    record.generation = order.store_generation
    pod.ran_on.clear()
    if record.phase in GONE_PHASES:
        pod.save()
        pod.publish()
    else:
        pod.change(Change.PREPARED)
    watch(pod)


def watch(pod: Pod) -> None:
    """Wait for the outcome of the attempt under way, and carry it out."""
    pod.on_spoiled = lambda why: vote_against(pod, why)
    pod.watcher = asyncio.create_task(_follow(pod, pod.record.attempt), name=f"outcome for {pod.label}")


async def freeze(pod: Pod, order: worker_pb2.AttemptOrder) -> Timings:
    """Freeze the pod and wait (bounded) until what it sent is acknowledged. Seconds by step."""
    timings: Timings = {}
    if _done(pod, "freeze", order):
        return timings
    pod.record.frozen_since = clock.now()
    seconds = max(1.0, (pod.record.deadline - clock.now()) * _QUIESCE_SHARE)
    await timed(timings, "nccl", pod_nccl.part(pod))
    timings.update(await timed(timings, "gpu", pod_gpu.quiesce(pod, order.attempt, seconds)))
    async with step("worker.freeze.cgroup"):
        await timed(timings, "freeze", pod.ask(lambda guard: guard.freeze(f"attempt {order.attempt}")))
        await timed(timings, "let_read", _let_read(pod, order))
    async with step("worker.freeze.drain"):
        until = clock.now() + _DRAIN_SECONDS
        if not await timed(timings, "drain", asyncio.to_thread(pod.network.wait_drained, until)):
            pod.log.info("sent data not acknowledged in time", attempt=order.attempt)
    if not pod.gone:
        pod.change(Change.FROZEN)
    pod.log.info("frozen", attempt=order.attempt, **{k: round(v, 3) for k, v in timings.items()})
    return timings


async def _let_read(pod: Pod, order: worker_pb2.AttemptOrder) -> None:
    """Let the pod run on for moments while it holds what only waits to be read; the capture judges what stays."""
    end, pause = clock.now() + _READ_SECONDS, 0.001
    soon = clock.now() + _ACCEPT_SECONDS
    while not pod.gone and (waits := await asyncio.to_thread(_unread, pod, clock.now() < soon)):
        if clock.now() >= end:
            pod.log.info("the pod does not read what waits", waits=waits)
            return
        await pod.ask(lambda guard: guard.thaw("something waits to be read"))
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)
        await pod.ask(lambda guard: guard.freeze(f"attempt {order.attempt}"))


def _unread(pod: Pod, with_connections: bool) -> list[str]:
    return transient.unread(pod.processes(), with_connections) + (backlog.early(pod) if with_connections else [])


async def seal(pod: Pod, order: worker_pb2.AttemptOrder) -> Timings:
    """Cut the traffic of the frozen pod. Seconds by step."""
    timings: Timings = {}
    if _done(pod, "seal", order):
        return timings
    async with step("worker.seal.network"):
        await timed(timings, "seal", asyncio.to_thread(pod.network.seal))
    if not pod.gone:
        pod.change(Change.SEALED)
    return timings


async def capture(pod: Pod, order: worker_pb2.AttemptOrder) -> tuple[Timings, int]:
    """Copy the sealed pod and vote. Returns seconds by step and the bytes of the images.

    Raises what made the capture fail (the pod has voted against the attempt then), `AttemptAborted` when the vote came
    too late.
    """
    timings: Timings = {}
    record = pod.record
    if record.attempt != order.attempt:
        raise Conflict(f"{pod.label} is not in attempt {order.attempt}")
    if record.captured != order.attempt:
        _done(pod, "capture", order)
        try:
            _check_end(pod)
            await attempt_capture.capture(pod, timings)
            pod.log.info("captured", attempt=order.attempt, **{k: round(v, 3) for k, v in timings.items()})
        except (MoorageError, OSError) as error:
            await vote_against(pod, str(error))
            raise
    async with step("worker.vote.captured"):
        vote = Vote(
            pod=record.pod,
            incarnation=record.incarnation,
            attempt=order.attempt,
            finished=pod.gone,
            bytes_total=record.image_bytes,
        )
        saving = asyncio.to_thread(attempt_capture.keep, pod)
        voting = pod.node.attempts(record.job).vote("captured", vote)
        stands, _ = await timed(timings, "vote", all_ended(voting, saving))
    if not stands:
        raise AttemptAborted(f"attempt {order.attempt} was settled before {pod.label} could vote")
    # What the GPU has is on its way since the capture; the rest of such a pod need not wait until the driver is back.
    if record.kind == "stop" or (pod_gpu.has(pod) and not pod.gone):
        persist.begin(pod)
    return timings, record.image_bytes


def _check_end(pod: Pod) -> None:
    """A pod that is over takes part only if all of it ended well."""
    if pod.gone and pod.record.phase != "exited":
        raise MoorageError(f"{pod.label} is {pod.record.phase}: {pod.record.reason}")
    if pod.gone and pod.record.exit_code:
        raise MoorageError(f"{pod.label} exited with code {pod.record.exit_code}")


async def vote_against(pod: Pod, why: str) -> None:
    """Vote no in the attempt under way. Raises nothing: without a vote the deadline ends the attempt."""
    record = pod.record
    attempt = record.attempt
    if not attempt:
        return
    vote = Vote(pod=record.pod, incarnation=record.incarnation, attempt=attempt, ok=False, reason=why)
    pod.log.info("votes against the attempt", attempt=attempt, reason=why)
    steps: tuple[Step, ...] = ("captured", "persisted")
    for name in steps:
        try:
            if await pod.node.attempts(record.job).vote(name, vote):
                return
        except MoorageError as error:
            pod.log.warning("vote not cast", attempt=attempt, error=str(error))
            return


async def _follow(pod: Pod, attempt: int) -> None:
    """Wait for the outcome (past the deadline: create abort) and carry it out."""
    try:
        outcome = await pod.node.attempts(pod.record.job).await_outcome(attempt, deadline=pod.record.deadline)
    except NotFound:
        await _forgotten(pod, attempt)
        return
    await _carry_out(pod, outcome)


async def _carry_out(pod: Pod, outcome: Outcome) -> None:
    """Try until it is done: a pod must not stand frozen because a step failed once."""
    for tries in itertools.count():
        try:
            await pod.order("outcome", outcome.attempt, lambda: conclude(pod, outcome))
        except Fenced as error:
            pod.log.warning("outcome not carried out", reason=str(error))
        except Exception as error:  # whatever it is: the pod must not stand still because of it
            if not pod.dying and not pod.gone:
                unexpected = not isinstance(error, MoorageError | OSError)
                pod.log.warning("outcome not carried out yet", reason=str(error), exc_info=unexpected)
                await asyncio.sleep(_RETRY_SECONDS[min(tries, len(_RETRY_SECONDS) - 1)])
                continue
        return


async def _forgotten(pod: Pod, attempt: int) -> None:
    """The attempt's keys are gone, so it was settled while this worker was away. Only a current incarnation may run."""
    record = pod.record
    try:
        await pod.node.confirm(record.job, record.incarnation)
    except Fenced as error:
        pod.log.warning("the pod stays frozen", reason=str(error))
        return
    if record.kind == "stop":
        # It may have been committed: then the pod must not run. The coordinator says so, or orders it to resume.
        pod.log.warning("the outcome of a stop is not known: the pod waits for the coordinator", attempt=attempt)
        return
    outcome = Outcome(kind="abort", incarnation=record.incarnation, attempt=attempt, reason="it is forgotten")
    await _carry_out(pod, outcome)


async def conclude(pod: Pod, outcome: Outcome) -> None:
    """Do what the outcome says: run on (resume, abort), or end the pod (stop). Idempotent.

    Raises `Fenced` for the outcome of another incarnation.
    """
    record = pod.record
    if record.attempt != outcome.attempt:
        return
    if outcome.incarnation != record.incarnation:
        raise Fenced(f"attempt {outcome.attempt} is of incarnation {outcome.incarnation}, not {record.incarnation}")
    pod.log.info("outcome", attempt=outcome.attempt, kind=outcome.kind, reason=outcome.reason, by=outcome.by)
    if outcome.kind == "stop":
        await pod_end.end(pod, f"stopped with attempt {outcome.attempt}")
        return
    if record.phase in ATTEMPT_PHASES:
        await _run_on(pod, outcome)
    record.attempt = 0
    pod.on_spoiled = None
    if outcome.kind == "resume" and record.staged is not None:
        pod.save()
        persist.begin(pod)
    else:
        await persist.cancel(pod)
        await pod_gpu.forget(pod, outcome.attempt)
        persist.drop(pod)


async def _run_on(pod: Pod, outcome: Outcome) -> None:
    record = pod.record
    if not pod.gone:
        async with step("worker.outcome.hooks"):
            await asyncio.to_thread(hooks.after_checkpoint, pod, outcome.attempt, outcome.kind)
        async with step("worker.outcome.backlog"):
            await asyncio.to_thread(backlog.put_back, pod)
    async with step("worker.outcome.unseal"):
        await asyncio.to_thread(pod.network.unseal)
    async with step("worker.outcome.thaw"):
        await pod.ask(lambda guard: guard.thaw(f"attempt {outcome.attempt}: {outcome.kind}"))
    await _device_back(pod)
    await pod_nccl.listen(pod)
    if record.frozen_since:
        record.pause_seconds = clock.now() - record.frozen_since
        record.frozen_since = 0.0
    reason = f"attempt {outcome.attempt} was aborted: {outcome.reason}" if outcome.kind == "abort" else ""
    record.attempt = 0
    pod.ran_on.set()
    if not pod.gone:
        pod.change(Change.THAWED, reason)


async def _device_back(pod: Pod) -> None:
    """A pod whose GPU does not come back cannot run on: it ends, and the job goes on from its last checkpoint."""
    try:
        await pod_gpu.bring_back(pod, _BACK_SECONDS)
    except (DeviceFailed, NotFound) as error:
        pod.log.error("the GPU did not come back", error=str(error))
        await pod_end.fail(pod, f"its GPU did not come back: {error}")


async def resume(pod: Pod, order: worker_pb2.AttemptOrder) -> None:
    """Make sure that the pod runs again after an attempt that was aborted.

    Raises `Conflict` when the attempt has no such outcome.
    """
    if pod.record.attempt == 0 or pod.gone:
        return
    outcome = await pod.node.attempts(pod.record.job).outcome(pod.record.attempt)
    if outcome is None or outcome.kind == "stop":
        stands = "has no outcome yet" if outcome is None else "ended in a stop"
        raise Conflict(f"attempt {pod.record.attempt} of job {pod.record.job} {stands}: {pod.label} stays frozen")
    await conclude(pod, outcome)
