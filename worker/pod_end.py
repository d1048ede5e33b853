"""How a pod ends: processes, network, folder; when the job is over, logs archived and results written back."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from moorage.errors import Conflict, MoorageError, NotFound, Unavailable
from moorage.worker import journal, persist, pod_gpu, pod_guard, pod_nccl, pod_record, pod_staging, pod_user
from moorage.worker.agent_failpoints import step
from moorage.worker.guard.client import GuardClient, guard_alive
from moorage.worker.guard.messages import JOURNAL_FILE
from moorage.worker.pod import Pod
from moorage.worker.pod_phase import Change
from moorage.worker.sandbox.cgroup import PodCgroup

_KILL_SECONDS = 30.0


async def kill(pod: Pod, grace: float, reason: str) -> None:
    """End the pod ahead of whatever else is being done with it; returns when no process of it is left.

    Raises `MoorageError` when a process does not die.
    """
    pod.dying = True
    if not pod.gone:
        await _kill_processes(pod, grace, reason)
    async with pod.lock:  # whoever held it has seen by now that the pod is dying
        await end(pod, reason)


async def break_off(pod: Pod, reason: str) -> None:
    """End a pod that cannot run on, ahead of whatever else is being done with it: it is ``failed`` and says why."""
    pod.dying = True
    async with pod.lock:  # whoever held it has seen by now that the pod is dying
        await fail(pod, reason)


async def fail(pod: Pod, reason: str) -> None:
    """End a pod that cannot run on, for one who holds its lock: it is ``failed`` and says why."""
    await end(pod, reason, failed=True)


async def end(pod: Pod, reason: str, *, failed: bool = False) -> None:
    """The same for one who holds the pod's lock. Keeps the folder. Idempotent.

    The device memory of a pod that ends within a stop which is to keep it stays, whoever is first to end the pod.
    """
    pod.dying = True
    async with step("worker.kill.processes"):
        if not pod.gone or guard_alive(pod.folder):
            await _kill_processes(pod, 0.0, reason)
    async with step("worker.kill.network"):
        await asyncio.to_thread(pod.network.remove)
    attempt, pod.record.attempt = pod.record.attempt, 0
    if not pod.gone:
        pod.change(Change.BROKE if failed else Change.KILLED, reason)
    await pod_gpu.detach(pod, pod.record.keep if attempt and not failed else "")
    await pod_nccl.detach(pod)
    await pod.dismiss_guard()
    if attempt:  # settled, or hopeless without this pod
        await persist.cancel(pod)
        persist.drop(pod)


async def _kill_processes(pod: Pod, grace: float, reason: str) -> None:
    try:
        if pod.guard is None and guard_alive(pod.folder):  # not adopted (yet)
            pod.guard = await GuardClient.connect(pod.folder)
            pod.guard_ready.set()
        done = await pod.ask(lambda guard: guard.kill(grace, reason=reason))
        pod_guard.take_status(pod, done.status)
    except Unavailable:
        # No guard, and none to be had: what counts is that nothing of the pod runs.
        await PodCgroup(pod.cgroup).kill(_KILL_SECONDS)


async def remove(pod: Pod) -> None:
    """Take away all that is left of a pod without processes: captures, mounts, folder. Idempotent."""
    await persist.cancel(pod)
    await pod.disconnect()
    await pod_gpu.detach(pod)
    await pod_nccl.detach(pod)
    async with step("worker.kill.layers"):
        await asyncio.to_thread(_remove_folder, pod)


def _remove_folder(pod: Pod) -> None:
    with contextlib.suppress(NotFound):
        pod.layers.remove()
    if pod.record.staged is not None:
        pod_staging.drop(Path(pod.record.staged.staging))
    pod_staging.drop(pod.memory_staging)
    with contextlib.suppress(OSError):  # other pods' captures stand there
        pod.memory_staging.parent.rmdir()
    pod_record.remove_folder(pod.folder)


async def finish(pod: Pod) -> str:
    """The job has ended: archive the logs, write the results back, remove the pod. Returns what there is to say."""
    await kill(pod, 0.0, "the job has ended")
    async with step("worker.finish.logs"):
        await asyncio.to_thread(_archive, pod)
    async with step("worker.finish.results"):
        told = await asyncio.to_thread(_write_back, pod)
    async with step("worker.finish.remove"):
        await remove(pod)
    return told


def archive_name(job: str, incarnation: int, pod: int) -> str:
    """The store's object that holds a pod's journal after the job has ended."""
    return f"logs/{job}/{incarnation}/{pod}"


def _archive(pod: Pod) -> None:
    record = pod.record
    source = pod.folder / JOURNAL_FILE
    if not source.exists():
        return
    copy = pod.folder / "journal.export"
    journal.export(source, copy)
    try:
        pod.node.store.put_object(archive_name(record.job, record.incarnation, record.pod), copy.read_bytes())
    except Conflict as error:
        pod.log.warning("journal not archived again", reason=str(error))
    copy.unlink()


def _write_back(pod: Pod) -> str:
    try:
        layers = pod.layers
    except NotFound:
        return ""
    user = pod_user.resolve(pod.spec)
    try:
        layers.mount()
        result = layers.write_back(
            uid=user.uid, gid=user.gid, groups=user.groups, job=pod.spec.name or pod.record.job, pod=pod.record.pod
        )
    except MoorageError as error:
        pod.log.warning("results not written back", error=str(error))
        return f"results were not written back: {error}"
    told = []
    if result.written or result.deleted:
        count = len(result.written) + len(result.deleted)
        told.append(f"{count} result{'s' if count > 1 else ''} written to {layers.working_directory}")
    if result.conflicts:
        first, beside = next(iter(result.conflicts.items()))
        told.append(f"{len(result.conflicts)} changed on the host meanwhile and kept ({first}; the pod's: {beside})")
    if result.failed:
        first, why = next(iter(result.failed.items()))
        told.append(f"{len(result.failed)} could not be written ({first}: {why})")
    return "; ".join(told)
