"""Bring a capture from the staging folder into the store, and vote. Beside the running job, or before it is stopped.

Order: packs and index (`Writer.finish`), pod manifest, vote. A worker that dies in between is followed by one that
finds the capture named in the pod's record and begins again; what is in the store already is found by its digest.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from moorage import failpoints
from moorage.errors import AttemptAborted, CorruptData, MoorageError
from moorage.records import Vote
from moorage.store import Content, PodManifest, Writer, WriteStats
from moorage.store.manifests import image_kind
from moorage.worker import attempt_layer, pod_fingerprint, pod_gpu, pod_nccl, pod_staging, uploads
from moorage.worker.agent_failpoints import step
from moorage.worker.attempt_capture import IMAGES, INDEX_FILE, JOURNAL
from moorage.worker.gpu.messages import Answer
from moorage.worker.guard.files import write_private
from moorage.worker.layers import CaptureIndex, LayerCapture
from moorage.worker.pod import Pod
from moorage.worker.pod_record import StagedCapture

_BACKGROUND_NICE = 10
_RETRY_SECONDS = 1.0


class Written(NamedTuple):
    """What is in the store now. ``seconds``: of images and files, of all on the host, of device memory beside it."""

    manifest: str
    stats: WriteStats
    seconds: dict[str, float]


def begin(pod: Pod) -> None:
    """Start to bring the staged capture into the store, unless that is under way. The task ends with the vote."""
    if pod.persisting is None or pod.persisting.done():
        pod.cancel_persist = threading.Event()
        pod.persisting = asyncio.create_task(_persist(pod), name=f"persist {pod.label}")


async def cancel(pod: Pod) -> None:
    """Stop what `begin` started and wait until it has ended."""
    if pod.persisting is not None:
        pod.cancel_persist.set()
        pod.ran_on.set()
        await asyncio.gather(pod.persisting, return_exceptions=True)
        pod.persisting = None


async def ended(pod: Pod, seconds: float) -> bool:
    """Whether nothing is being brought into the store, after waiting at most ``seconds``."""
    if pod.persisting is not None and not pod.persisting.done():
        await asyncio.wait({pod.persisting}, timeout=seconds)
    return pod.persisting is None or pod.persisting.done()


async def _persist(pod: Pod) -> None:
    staged = pod.record.staged
    if staged is None:
        return
    began = time.monotonic()
    vote = Vote(pod=pod.record.pod, incarnation=staged.incarnation, attempt=staged.attempt)
    try:
        work = pod_gpu.persist(pod, staged.attempt, finished=staged.finished)
        device = asyncio.run_coroutine_threadsafe(work, asyncio.get_running_loop())
        try:
            written = await asyncio.to_thread(_write, pod, staged, device)
        finally:
            await pod_gpu.forget(pod, staged.attempt)
        await asyncio.to_thread(uploads.stored, pod, staged, written.manifest)
        pod.node.upload.set()
        if pod.record.kind == "resume" and pod.record.attempt == staged.attempt:
            await pod.ran_on.wait()  # the vote tells how long it stood still
        vote = msgspec.structs.replace(
            vote,
            finished=staged.finished,
            manifest=written.manifest,
            bytes_total=written.stats.bytes_total,
            bytes_new=written.stats.bytes_new,
            pause_seconds=pod.paused(),
        )
        took = round(time.monotonic() - began, 2)
        parts = {what: round(seconds, 2) for what, seconds in written.seconds.items()}
        told = {"seconds": took, **parts, "total": vote.bytes_total, "new": vote.bytes_new}
        pod.log.info("persisted", attempt=staged.attempt, **told)
    except AttemptAborted:
        return
    except Exception as error:  # whatever it is: nobody must wait for this vote for ever
        unexpected = not isinstance(error, MoorageError | OSError)
        pod.log.warning("not persisted", attempt=staged.attempt, error=str(error), exc_info=unexpected)
        vote = msgspec.structs.replace(vote, ok=False, reason=f"{pod.label}: {error}")
    if await _vote(pod, vote) and pod.record.staged is staged:
        await asyncio.to_thread(drop, pod)


def drop(pod: Pod) -> None:
    """Forget the capture that stands in staging, if any, and delete it."""
    staged, pod.record.staged = pod.record.staged, None
    pod.captured_layer = None
    pod.save()
    if staged is not None:
        pod_staging.drop(Path(staged.staging))


async def _vote(pod: Pod, vote: Vote) -> bool:
    """Whether the vote was given; False: the attempt is over, and whoever ended it clears up."""
    while not pod.cancel_persist.is_set():
        try:
            async with step("worker.vote.persisted"):
                await pod.node.attempts(pod.record.job).vote("persisted", vote)
            return True
        except MoorageError as error:  # etcd is away; the capture is kept until the vote is known to stand
            pod.log.warning("vote not cast", attempt=vote.attempt, error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)
    return False


def _write(pod: Pod, staged: StagedCapture, device: Future[Answer | None]) -> Written:
    captured = pod.captured_layer or attempt_layer.load(Path(staged.staging))
    background = pod.record.kind == "resume"
    store = pod.node.store
    with store.writer(
        label=f"{pod.record.job} attempt {staged.attempt} pod {pod.record.pod}",
        nice=_BACKGROUND_NICE if background else 0,
        threads=_threads(pod, background=background),
    ) as writer:
        began = time.monotonic()
        # Beside the rest: at first all files that the processes have mapped are read.
        with ThreadPoolExecutor(
            1, thread_name_prefix="fingerprint", initializer=_lower, initargs=(background,)
        ) as pool:
            looking = pool.submit(pod_fingerprint.build, pod, _seen(staged))
            manifest, index, stats = _add_all(pod, staged, captured, writer)
            written = time.monotonic() - began
            manifest = msgspec.structs.replace(manifest, fingerprint=msgspec.to_builtins(looking.result()))
        host = time.monotonic() - began
        memory = device.result()
        if memory is not None:
            manifest, stats = _with_memory(manifest, stats, memory)
        failpoints.hit_sync("worker.persist.manifest.before")
        # Within the block: what the writer found in the store already is safe from prune until the manifest names it.
        name = store.write_pod_manifest(manifest)
        failpoints.hit_sync("worker.persist.manifest.after")
    _keep_index(pod, staged, index)
    seconds = {"images": written, "host": host, **(memory.timings if memory is not None else {})}
    return Written(name, stats, seconds)


def _lower(background: bool) -> None:
    if background:  # on Linux the nice value belongs to the thread, and to those that it starts
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICE)


def _threads(pod: Pod, *, background: bool) -> int | None:
    """How many write; None: as few as beside a job that needs the cores. One with a GPU needs them less."""
    if background and pod_gpu.has(pod):
        return max(1, pod.node.cpus // 2)
    return None if background else pod.node.cpus


def _with_memory(manifest: PodManifest, stats: WriteStats, memory: Answer) -> tuple[PodManifest, WriteStats]:
    """The broker's writer keeps what it found in the store until it is told that the manifest stands."""
    chunks = sum(len(content.chunks) for content in memory.contents.values())
    manifest = msgspec.structs.replace(
        manifest,
        memory=memory.contents,
        bytes_by_kind={**manifest.bytes_by_kind, "device memory": memory.bytes_total},
        extra={**manifest.extra, "gpu": msgspec.to_builtins(memory.memory)},
    )
    return manifest, stats._replace(
        bytes_total=stats.bytes_total + memory.bytes_total,
        bytes_new=stats.bytes_new + memory.bytes_new,
        chunks=stats.chunks + chunks,
    )


def _add_all(
    pod: Pod, staged: StagedCapture, captured: LayerCapture, writer: Writer
) -> tuple[PodManifest, CaptureIndex, WriteStats]:
    folder = Path(staged.staging)
    failpoints.hit_sync("worker.persist.images.before")
    images = {name: _add(pod, writer, path, image_kind(name)) for name, path in _files(folder / IMAGES)}
    failpoints.hit_sync("worker.persist.images.after")
    failpoints.hit_sync("worker.persist.layer.before")
    tree, index = captured.complete({file.key: _add(pod, writer, file.path, "files") for file in captured.files})
    layer = writer.add_bytes(tree, kind="files")
    journal = _add(pod, writer, folder / JOURNAL, "logs") if (folder / JOURNAL).exists() else None
    failpoints.hit_sync("worker.persist.layer.after")
    if lost := writer.lacking(index.contents.values()):
        _forget_index(pod)
        raise CorruptData(
            f"{lost} chunks of files that did not change lately are gone from {pod.node.store.location}",
            "the next checkpoint stores all files anew; `moorage check` says which checkpoints are damaged",
        )
    stats = writer.finish()
    record = pod.record
    manifest = PodManifest(
        job=record.job,
        owner=pod.spec.owner,
        pod=record.pod,
        incarnation=staged.incarnation,
        attempt=staged.attempt,
        node=pod.node.name,
        created=time.time(),
        spec=record.spec,
        images=images,
        layer=layer,
        layer_files=index.contents,
        journal=journal,
        network={"external_address": pod.network.external_address, "node_address": pod.node.config.address},
        ranks=[msgspec.to_builtins(rank) for rank in staged.ranks],
        bytes_by_kind={kind: counted.total for kind, counted in writer.by_kind.items()},
        extra={"finished": staged.finished, "exit_code": record.exit_code, **pod_nccl.saved(pod)},
    )
    return manifest, index, stats


def _seen(staged: StagedCapture) -> pod_fingerprint.Seen:
    return pod_fingerprint.Seen() if staged.finished else pod_fingerprint.Seen.load(Path(staged.staging))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file():
            yield str(path.relative_to(folder)), path


def _add(pod: Pod, writer: Writer, path: Path, kind: str) -> Content:
    if pod.cancel_persist.is_set():
        raise AttemptAborted(f"attempt {pod.record.last_attempt} is over")
    return writer.add_file(path, kind=kind)


def _keep_index(pod: Pod, staged: StagedCapture, index: CaptureIndex) -> None:
    """Only now: until the contents are in the store, the next capture must not count on them."""
    pod.index = index
    write_private(pod.folder / INDEX_FILE, index.encode())
    pod.record.index_generation = staged.generation


def _forget_index(pod: Pod) -> None:
    """Let the next capture count on nothing that the store is thought to have."""
    pod.index = None
    pod.record.index_generation = -1
    pod.save()
