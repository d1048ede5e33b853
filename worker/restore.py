"""Bring a pod back from its manifest: it stands restored, sealed and frozen until it is released."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from moorage.errors import CorruptData, MoorageError
from moorage.store import Content, PodManifest, missing_is_damage
from moorage.worker import (
    attempt_capture,
    backlog,
    extra_record,
    extra_state,
    fit,
    hooks,
    journal,
    pod_gpu,
    pod_guard,
    pod_nccl,
    pod_staging,
    pod_start,
    pod_user,
    unaccepted,
)
from moorage.worker.agent_failpoints import step
from moorage.worker.extra_record import Extras
from moorage.worker.guard.files import write_private
from moorage.worker.guard.messages import JOURNAL_FILE, RankState
from moorage.worker.layers import CaptureIndex, PodLayers
from moorage.worker.pod import Pod
from moorage.worker.pod_phase import Change
from moorage.worker.pod_steps import Timings, all_ended, timed
from moorage.worker.sandbox import criu, mend

_SLACK_BYTES = 16 << 20
#: How long the processes of a restored pod may take until they have their GPUs back.
_GPU_SECONDS = 60.0


async def restore(pod: Pod) -> Timings:
    """From a manifest to ``restored``; returns seconds by step. On failure the pod is ``failed``, nothing of it stands.

    A pod that had finished comes back as ``exited``, with its files and logs.
    Raises `NotFound`, `CorruptData`, `NoCapacity`, `Incompatible`, or what CRIU could not do.
    """
    timings: Timings = {}
    began = time.monotonic()
    staging: Path | None = None
    filling: asyncio.Task[Timings] | None = None
    try:
        with missing_is_damage():
            manifest = await asyncio.to_thread(pod.node.store.read_pod_manifest, pod.record.manifest)
        _check(pod, manifest)
        pod_nccl.come_back(pod, manifest.extra)
        async with step("worker.restore.verify"):
            checkpoint = f"{manifest.job}-{manifest.attempt:04d}"
            await timed(timings, "verify", asyncio.to_thread(fit.verify, pod.node, manifest, checkpoint))
        staging = await asyncio.to_thread(pod.staging, size_of(manifest))
        await asyncio.to_thread(_fetch_journal, pod, manifest)
        finished = bool(manifest.extra.get("finished"))
        if not finished:
            await pod_gpu.attach(pod, manifest)
            filling = asyncio.create_task(pod_gpu.fill(pod, manifest), name=f"device memory of {pod.label}")
        await all_ended(
            timed(timings, "network", _network(pod)),
            timed(timings, "fetch", _fetch(pod, manifest, staging)),
            *([] if finished else [timed(timings, "guard", pod_guard.spawn(pod))]),
        )
        pod.check_alive()
        if finished:
            _come_back_finished(pod, manifest)
        else:
            assert filling is not None
            await timed(timings, "rebuild", _rebuild(pod, manifest, staging))
            timings.update(await timed(timings, "gpu_wait", _filled(filling)))
            await _stand(pod, manifest)
    except (MoorageError, OSError) as error:
        await pod_guard.undo(pod)
        pod.change(Change.BROKE, str(error))
        raise
    finally:
        pod.close_opened()
        if filling is not None:
            await asyncio.gather(filling, return_exceptions=True)
        if staging is not None:
            await asyncio.to_thread(pod_staging.drop, staging)
    timings["restore"] = time.monotonic() - began
    pod.log.info("restored", **{k: round(v, 3) for k, v in timings.items()})
    return timings


def _check(pod: Pod, manifest: PodManifest) -> None:
    if manifest.pod != pod.record.pod:
        raise CorruptData(
            f"manifest {pod.record.manifest} is of pod {manifest.pod}, not of pod {pod.record.pod}",
            "the checkpoint is damaged; restore an earlier one",
        )


def size_of(manifest: PodManifest) -> int:
    """Bytes that the images of a pod take while it is rebuilt, and its files for good."""
    on_disk = (content.size for kind, _, content in manifest.contents() if kind != "memory")
    return sum(on_disk) + _SLACK_BYTES


async def _filled(filling: asyncio.Task[Timings]) -> Timings:
    return await asyncio.shield(filling)


async def _network(pod: Pod) -> None:
    async with step("worker.restore.network"):
        await asyncio.to_thread(pod.network.create, sealed=True)


async def _fetch(pod: Pod, manifest: PodManifest, staging: Path) -> None:
    """Images and files side by side: the images keep the disks of the store busy, the files the processors."""
    generation = await pod.node.store_generation()
    async with step("worker.restore.fetch"):
        images = asyncio.to_thread(_fetch_images, pod, manifest, staging)
        index, _ = await all_ended(asyncio.to_thread(_fetch_layers, pod, manifest), images)
    if index is not None:
        pod.index = index
        await asyncio.to_thread(write_private, pod.folder / attempt_capture.INDEX_FILE, index.encode())
        pod.record.index_generation = generation
    async with step("worker.restore.layers"):
        await asyncio.to_thread(_lay_root, pod)


def _fetch_images(pod: Pod, manifest: PodManifest, staging: Path) -> None:
    wanted: list[tuple[Content, Path | int]] = []
    for name, content in manifest.images.items():
        target = staging / attempt_capture.IMAGES / name
        if not target.resolve().is_relative_to(staging.resolve()):
            raise CorruptData(f"manifest {pod.record.manifest} names an image {name!r}")
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted.append((content, target))
    pod.node.store.read_files(wanted)


def _fetch_journal(pod: Pod, manifest: PodManifest) -> None:
    """First of all: the guard reads it when it starts, and goes on where it ends."""
    if manifest.journal is not None:
        copy = pod.folder / "journal.export"
        pod.node.store.read_file(manifest.journal, copy)
        journal.restore(copy, pod.folder / JOURNAL_FILE)
        copy.unlink()


def _fetch_layers(pod: Pod, manifest: PodManifest) -> CaptureIndex | None:
    if manifest.layer is None:
        raise CorruptData(f"manifest {pod.record.manifest} has no files", "restore an earlier checkpoint")
    tree = pod.node.store.read_bytes(manifest.layer)
    spec = pod.spec
    layers = PodLayers.from_tree(
        pod.folder,
        tree,
        image=Path(spec.image) if spec.image else None,
        user_mounts=[mount.destination for mount in spec.mounts],
        hidden=pod.node.hidden(),
    )
    pod.layers = layers
    return layers.restore(tree, manifest.layer_files, pod.node.store.read_file)


def _lay_root(pod: Pod) -> None:
    user = pod_user.resolve(pod.spec)
    pod.opened = pod_user.Opened(pod.spec, user)
    pod.layers.mount(pod.opened.image)
    pod_start.write_names(pod)
    hooks.lay_restored(pod)
    pod_start.write_bundle(pod, user)


def _come_back_finished(pod: Pod, manifest: PodManifest) -> None:
    pod.record.ranks = [RankState(**rank) for rank in manifest.ranks]
    pod.record.exit_code = int(manifest.extra.get("exit_code", 0))
    pod.change(Change.ENDED)


async def _rebuild(pod: Pod, manifest: PodManifest, staging: Path) -> None:
    async with step("worker.restore.rebuild"):
        images, work = staging / attempt_capture.IMAGES, pod.folder / "criu"
        extras = await asyncio.to_thread(_mend, images, work)
        external = str(manifest.network.get("external_address", ""))
        waiting = backlog.of_job(pod, extras.backlog, manifest.node, external)
        if waiting:  # before the other ends are back and ask for them
            await asyncio.to_thread(lambda: pod.network.shield(waiting=waiting))
        done = await pod.ask_once(lambda guard: guard.restore(images, work=work))
        pod_guard.take_status(pod, done.status)
        await asyncio.to_thread(extra_state.give_back, pod.processes(), extras)
        await pod_gpu.lay_nodes(pod)
    async with step("worker.restore.backlog"):
        if waiting:
            await asyncio.to_thread(backlog.give, pod, waiting)
        if extras.corked:
            await asyncio.to_thread(backlog.give_corked, pod, extras.corked)
        if extras.early:
            whole = unaccepted.settled(extras.early)
            await asyncio.to_thread(backlog.give_early, pod, extras.early, connected=whole)
        await asyncio.to_thread(pod.network.deliver, extras.datagrams)


async def _stand(pod: Pod, manifest: PodManifest) -> None:
    await settle(pod, str(manifest.network.get("external_address", "")), manifest.node)


def _mend(folder: Path, work: Path) -> Extras:
    saved = folder / extra_record.FILE
    extras = Extras.decode(saved.read_bytes()) if saved.exists() else Extras()  # a checkpoint of an older version
    told = mend.mend(folder, extras)
    (work / criu.MENDS_FILE).unlink(missing_ok=True)
    if told:
        work.mkdir(mode=0o700, exist_ok=True)
        write_private(work / criu.MENDS_FILE, told.encode())
    return extras


async def settle(pod: Pod, external_address: str, node: str) -> None:
    """After the processes are back: end connections to the world that the move has broken, then ``restored``."""
    if node != pod.node.name or external_address != pod.network.external_address:
        ended = await asyncio.to_thread(pod.network.reset_external)
        if ended:
            pod.log.info("connections to the world ended", count=ended)
    if not pod.gone:
        pod.change(Change.RESTORED)


async def release(pod: Pod) -> Timings:
    """Unseal, then thaw: the pod runs. Does nothing for one that runs already."""
    timings: Timings = {}
    if pod.record.phase != "restored":
        return timings
    async with step("worker.release.hooks"):
        await asyncio.to_thread(hooks.after_restore, pod)
    async with step("worker.release.unseal"):
        await timed(timings, "unseal", asyncio.to_thread(pod.network.unseal))
    async with step("worker.release.thaw"):
        await timed(timings, "thaw", pod.ask(lambda guard: guard.thaw("released after the restore")))
    timings.update(await pod_gpu.bring_back(pod, _GPU_SECONDS, pod.record.gpu_mapping))
    await pod_nccl.listen(pod)
    if not pod.gone:
        pod.change(Change.RELEASED)
    return timings
