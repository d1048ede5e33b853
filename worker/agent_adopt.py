"""A worker that starts finds the pods of the one before it, and goes on where that one stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog

from moorage.errors import MoorageError, NotFound
from moorage.worker import attempt, persist, pod_guard, pod_nccl, pod_record, pod_staging, restore
from moorage.worker.agent_node import Node
from moorage.worker.guard.messages import GuardStatus
from moorage.worker.pod import Pod
from moorage.worker.pod_phase import ATTEMPT_PHASES, GONE_PHASES, Change, Phase

log = structlog.get_logger(__name__)


def load(node: Node) -> Iterator[Pod]:
    """The pods whose records lie in the node's state. Folders without a record never became a pod, and are removed.

    Raises `CorruptData` for a record that cannot be read.
    """
    for folder in pod_record.folders(node.state):
        record = pod_record.load(folder)
        if record is None:
            pod_record.remove_folder(folder)
        else:
            if record.gpus and record.phase not in GONE_PHASES:
                node.gpus.take(f"{record.job}-{record.incarnation}-{record.pod}", record.gpus)
            yield Pod(node, record)


def found_phase(recorded: Phase, guard: GuardStatus, *, restoring: bool) -> Phase | None:
    """The phase of a living pod whose worker died, from what it wrote down and what the guard sees. Pure.

    None: the pod's start was cut short, and what there is of it is not worth keeping. The record is written after each
    deed, so the deed may be done although the record does not say so.
    """
    stands = guard.desired == "freeze"  # a fenced pod is frozen too, but not by order
    if guard.phase == "empty":
        return None
    if recorded == "starting":
        if restoring:
            return "restored" if stands else None
        return "running"
    if recorded == "restored":
        return "restored" if stands else "running"
    if recorded == "preparing":
        return "frozen" if stands else "preparing"
    if recorded in ATTEMPT_PHASES:
        return recorded if stands else "running"
    return recorded


async def adopt(pod: Pod) -> None:
    """Take over one pod. Raises nothing: a pod that cannot be taken over is ``failed``, and says why."""
    if pod.dying:
        return  # of an incarnation that was given up
    if pod.gone:
        await pod.dismiss_guard()
        _go_on(pod)
        return
    try:
        if pod.record.boot != pod.node.boot:
            raise NotFound("the machine was restarted meanwhile")
        await pod_guard.spawn(pod)
        if pod.gone:  # the guard knew that it had ended
            _go_on(pod)
            return
        await _take_over(pod)
    except (MoorageError, OSError) as error:
        pod.log.warning("not adopted", error=str(error))
        await pod_guard.undo(pod)
        if not pod.gone:
            pod.change(Change.BROKE, f"lost with its worker: {error}")


async def _take_over(pod: Pod) -> None:
    record, guard = pod.record, pod.guard_state
    assert guard is not None
    await pod_guard.reconcile(pod)
    if pod.gone:
        _go_on(pod)
        return
    phase = found_phase(record.phase, guard, restoring=bool(record.manifest))
    if phase is None:
        raise NotFound(f"its worker died while it was {record.phase}")
    pod.log.info("adopted", recorded=record.phase, found=phase, guard=guard.guard_pid)
    if record.phase == "starting" and phase == "restored":
        manifest = await asyncio.to_thread(pod.node.store.read_pod_manifest, record.manifest)
        await restore.settle(pod, str(manifest.network.get("external_address", "")), manifest.node)
        return
    record.phase = phase
    if phase == "running" and record.attempt:
        # Thawed, so the outcome was known; what is left of it is to keep the capture or to drop it.
        record.phase = "captured"
    pod.save()
    await pod_nccl.adopt(pod)
    _go_on(pod)
    pod.publish()


def _go_on(pod: Pod) -> None:
    record = pod.record
    if record.attempt:
        attempt.watch(pod)
        if record.kind == "stop" and record.staged is not None:
            persist.begin(pod)
    elif record.staged is not None:
        persist.begin(pod)  # its outcome was resume, or it would have been dropped
    else:
        for folder in (pod.disk_staging, pod.memory_staging):
            pod_staging.drop(folder)
