"""The capture itself: everything of a sealed pod into the staging folder. The pod stands still for so long.

CRIU's dump, the copy of changed files and the copy of the journal run side by side.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from moorage.errors import MoorageError
from moorage.worker import (
    attempt_layer,
    backlog,
    extra_record,
    extra_state,
    journal,
    pod_fingerprint,
    pod_gpu,
    pod_staging,
)
from moorage.worker.agent_failpoints import step
from moorage.worker.guard.files import write_private
from moorage.worker.guard.messages import JOURNAL_FILE, GuardStatus
from moorage.worker.layers import CaptureIndex, LayerCapture, mapped_shared_writable
from moorage.worker.pod import Pod
from moorage.worker.pod_phase import Change
from moorage.worker.pod_record import StagedCapture
from moorage.worker.pod_steps import Timings, all_ended, timed
from moorage.worker.sandbox import criu, images

IMAGES, LAYER, JOURNAL, WORK = "images", "layer", "journal", "criu"
INDEX_FILE = "layer.index"


async def capture(pod: Pod, timings: Timings) -> None:
    """Copy the pod: a finished one without images. On success ``record.staged`` and `Pod.captured_layer` are set.

    Raises `Refused` (CRIU cannot save something), `NoCapacity`, or what else failed; then nothing is left in staging.
    """
    record = pod.record
    staging = await asyncio.to_thread(pod.staging, pod.bytes_needed)
    try:
        image_bytes, captured = await _copy(pod, staging, timings)
    except BaseException:
        await asyncio.to_thread(pod_staging.drop, staging)
        raise
    pod.captured_layer = captured
    async with step("worker.capture.record"):
        record.captured, record.image_bytes = record.attempt, image_bytes
        record.staged = StagedCapture(
            attempt=record.attempt,
            incarnation=record.incarnation,
            staging=str(staging),
            generation=record.generation,
            finished=pod.gone,
            ranks=list(record.ranks),
        )
        if pod.gone:
            pod.save()
        else:
            pod.change(Change.CAPTURED)


async def _copy(pod: Pod, staging: Path, timings: Timings) -> tuple[int, LayerCapture]:
    image_bytes = 0
    pids: list[int] = []
    status = pod.guard_state
    if not pod.gone:
        status = await timed(timings, "journal", _drain(pod))
        pids = pod.processes()
    journal_end = status.journal_end if status else None

    async def dump() -> None:
        nonlocal image_bytes
        if pod.gone:
            return
        extras = await timed(timings, "extras", asyncio.to_thread(_collect, pod, pids, staging / WORK))
        try:
            async with step("worker.capture.backlog"):
                await asyncio.to_thread(backlog.take, pod, pids, extras)
            async with step("worker.capture.dump"):
                done = await pod.ask_once(lambda guard: guard.checkpoint(staging / IMAGES, work=staging / WORK))
        finally:
            await asyncio.to_thread(backlog.put_back, pod)
        await asyncio.to_thread(write_private, staging / IMAGES / extra_record.FILE, extras.encode())
        image_bytes = done.image_bytes
        timings.update(done.timings)

    async def copy_layer() -> LayerCapture:
        async with step("worker.capture.layer"):
            return await asyncio.to_thread(_copy_layer, pod, staging / LAYER, pids)

    async def copy_journal() -> None:
        if (pod.folder / JOURNAL_FILE).exists():
            await asyncio.to_thread(journal.export, pod.folder / JOURNAL_FILE, staging / JOURNAL, end=journal_end)

    async def look() -> None:
        if not pod.gone:
            seen = await asyncio.to_thread(pod_fingerprint.scan, pids, label=pod.spec.labels.get("model", ""))
            seen.save(staging)

    async def capture_gpu() -> None:
        timings.update(await pod_gpu.capture(pod, pod.record.attempt))

    _, captured, *_ = await all_ended(
        timed(timings, "dump", dump()),
        timed(timings, "layer", copy_layer()),
        timed(timings, "journal_copy", copy_journal()),
        timed(timings, "look", look()),
        timed(timings, "gpu_capture", capture_gpu()),
    )
    return image_bytes, captured


async def _drain(pod: Pod) -> GuardStatus:
    return (await pod.ask(lambda guard: guard.drain())).status


def _collect(pod: Pod, pids: list[int], work: Path) -> extra_record.Extras:
    extras, watched, again = extra_state.collect(pids, pod.layers)
    pod.network.deliver(again)
    if extras.eventfds or extras.zombies:
        criu.library()  # a restore needs it
    if watched or extras.timers:
        work.mkdir(mode=0o700, exist_ok=True)
    if extras.timers:
        (work / criu.THREAD_TIMERS_FILE).touch(0o600)
    if watched:
        images.write_paths(work / images.PATHS_FILE, watched)
    return extras


def _copy_layer(pod: Pod, target: Path, pids: list[int]) -> LayerCapture:
    target.mkdir(mode=0o700)
    return pod.layers.capture(target, usable_index(pod), mapped_shared_writable(pids))


def keep(pod: Pod) -> None:
    """Write down what a worker that follows needs to go on with the copy of the files. Raises `OSError`."""
    if pod.record.staged is not None and pod.captured_layer is not None:
        attempt_layer.save(pod.captured_layer, Path(pod.record.staged.staging))


def usable_index(pod: Pod) -> CaptureIndex | None:
    """What the last capture knew, if the store cannot have dropped any of it since."""
    if pod.record.index_generation != pod.record.generation:
        return None
    if pod.index is None:
        try:
            pod.index = CaptureIndex.decode((pod.folder / INDEX_FILE).read_bytes())
        except (OSError, MoorageError) as error:
            pod.log.info("files are copied in full", reason=str(error))
    return pod.index
