"""The GPUs of one pod: which ones, what its container needs for them, and the pod's orders to the GPU broker.

Every function does nothing for a pod without GPUs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import structlog

from moorage.errors import DeviceFailed, EnvironmentLacking, MoorageError, NoCapacity, NotFound, Unavailable
from moorage.store import PodManifest
from moorage.worker import device_nodes, gpu_host
from moorage.worker.agent_failpoints import step
from moorage.worker.gpu import kept
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.blocks import KnownProcess, SavedMemory
from moorage.worker.pod_steps import Timings
from moorage.worker.preflight import Objection, OpenFile, Process
from moorage.worker.preflight_gpu import GpuReport, Noted, examine_gpu
from moorage.worker.sandbox import native, oci, podinit

if TYPE_CHECKING:
    from moorage.worker.agent_node import Node
    from moorage.worker.pod import Pod

log = structlog.get_logger(__name__)

#: Seen by the pod's processes; apart from `podinit.FOLDER`, which is closed to jobs of other users than root.
FOLDER = "/.moorage-gpu"
SOCKET = f"{FOLDER}/gpu.sock"
REAL = f"{FOLDER}/libcuda.so.1"
PROXY = "libcuda.so.1"
_NICE = 10
_KEPT_SECONDS = 30.0
#: How long a new pod waits for the GPUs of one that is over and still keeps its memory, or gives it back.
_LEAVE_SECONDS = 30.0
#: 0 in a job's environment: its device memory is never copied while it runs.
PRECOPY = "MOORAGE_GPU_PRECOPY"
_PRECOPY_SHARE, _PRECOPY_SECONDS = 0.4, 30.0  # of an attempt's time, and of the order to prepare
#: What the driver's own part of one process may take of host memory while it is saved, in bytes.
DRIVER_BYTES = 2 << 30


def has(pod: Pod) -> bool:
    """Whether the pod has GPUs."""
    return bool(pod.spec.gpus_per_pod)


def _folder(pod: Pod) -> Path:
    return pod.folder / "gpu"


async def attach(pod: Pod, manifest: PodManifest | None = None) -> None:
    """Give the pod its GPUs and tell the broker, which is started if there is none. ``manifest``: it is restored.

    Raises `NoCapacity` (no GPU free), `EnvironmentLacking` (no driver, no proxy, no broker).
    """
    if not has(pod):
        return
    if not pod.record.gpus:
        await pod.node.gpus.enough(pod.spec.gpus_per_pod, _LEAVE_SECONDS)
        pod.record.gpus = _choose(pod, _saved(manifest).devices if manifest is not None else ())
        pod.save()
    await asyncio.to_thread(_lay_folder, pod)
    await tell(pod)


async def tell(pod: Pod) -> None:
    """Make sure that there is a broker, and that it serves the pod."""
    if has(pod):
        socket = str(_folder(pod) / "gpu.sock")
        order = m.Attach(pod.container, socket, pod.record.incarnation, list(pod.record.gpus))
        await pod.node.gpus.broker.ask(order, start=True)


def _saved(manifest: PodManifest) -> SavedMemory:
    return msgspec.convert(manifest.extra["gpu"], SavedMemory) if "gpu" in manifest.extra else SavedMemory()


def _choose(pod: Pod, before: Sequence[str]) -> list[str]:
    free = pod.node.gpus.free()
    wanted = pod.spec.gpus_per_pod
    if len(free) < wanted:
        raise NoCapacity(f"{pod.label} needs {wanted} GPUs, node {pod.node.name} has {len(free)} free")
    # Who says in which order GPUs are given out means it.
    chosen = gpu_host.choose(free, wanted, () if pod.node.config.gpus else before)
    pod.node.gpus.take(pod.container, chosen)
    return chosen


def _lay_folder(pod: Pod) -> None:
    folder = _folder(pod)
    folder.mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o755)
    real = folder / Path(REAL).name
    real.touch(0o644)


def lay_proxy(pod: Pod, upper: Path) -> None:
    """Put the proxy into the pod's upper layer, so that what is restored is what was saved."""
    if has(pod):
        folder = upper / podinit.FOLDER.lstrip("/")
        folder.mkdir(mode=0o700, exist_ok=True)
        shutil.copyfile(native.find(PROXY, "intercept", variable="MOORAGE_LIBCUDA_PROXY"), folder / PROXY)
        (folder / PROXY).chmod(0o755)


def environment(pod: Pod) -> dict[str, str]:
    """What ranks need to find the broker."""
    return {"MOORAGE_GPU_SOCKET": SOCKET} if has(pod) else {}


def container(pod: Pod) -> tuple[list[oci.Bind], list[oci.DeviceRule]]:
    """Mounts and device rules of the pod's container. Raises `EnvironmentLacking` without a driver."""
    if not has(pod):
        return [], []
    host = gpu_host.driver()
    binds = [oci.Bind(source=mount, destination=str(mount), read_only=True) for mount in host.mounts]
    # Nodes in the pod's own /dev, no mounts: after a move these are others, and CRIU wants every mount again.
    rules = [
        oci.DeviceRule(kind="c", major=os.major(number), minor=os.minor(number), node=str(node))
        for node, number in _nodes(pod).items()
    ]
    binds.append(oci.Bind(source=_folder(pod), destination=FOLDER))
    binds.append(oci.Bind(source=host.libcuda, destination=REAL, read_only=True))
    proxy = pod.layers.root / podinit.FOLDER.lstrip("/") / PROXY
    binds.append(oci.Bind(source=proxy, destination=str(host.libcuda), read_only=True))
    return binds, rules


def _nodes(pod: Pod) -> dict[Path, int]:
    """The device nodes of the driver and of the pod's GPUs, with their numbers on this host."""
    nodes = [*gpu_host.CONTROL_NODES, *(gpu_host.device_node(uuid) for uuid in pod.record.gpus)]
    return {node: node.stat().st_rdev for node in nodes if node.exists()}


async def lay_nodes(pod: Pod) -> None:
    """A restored pod has the nodes that it had when it was saved: give it those of the GPUs that it has now."""
    if has(pod) and (pids := pod.processes()):
        wanted = {node.name: number for node, number in _nodes(pod).items()}
        await asyncio.to_thread(device_nodes.lay, Path("/proc", str(pids[0]), "root", "dev"), wanted)


# -- preflight


async def look(pod: Pod) -> tuple[list[Objection], frozenset[int]]:
    """What cannot be saved of the GPU's state, and the host pids of the processes whose state can be."""
    if not has(pod) or pod.gone:
        return [], frozenset()
    try:
        await tell(pod)
        seen = await pod.node.gpus.broker.ask(m.Look(pod.container))
    except (Unavailable, EnvironmentLacking) as error:
        return [
            Objection("the GPU broker", error.message, error.hint or "try again", type(error).__name__)
        ], frozenset()
    report = GpuReport(
        noted=tuple(Noted(found.process, found.api, found.size) for found in seen.objections),
        mig=await asyncio.to_thread(gpu_host.split, tuple(pod.record.gpus)),
        mps=any(name.startswith("CUDA_MPS_") for name in pod.spec.env),
    )
    return examine_gpu(report), frozenset(process.host_pid for process in seen.processes)


def without_driver(processes: list[Process], on_gpu: frozenset[int]) -> list[Process]:
    """The processes without those descriptors that the driver closes itself when it saves a process ``on_gpu``."""
    return [
        dataclasses.replace(process, files=tuple(file for file in process.files if not _of_driver(file)))
        if process.host_pid in on_gpu
        else process
        for process in processes
    ]


def _of_driver(file: OpenFile) -> bool:
    return stat.S_ISCHR(file.mode) and file.target.startswith("/dev/nvidia")


# -- a checkpoint


async def begin(pod: Pod, attempt: int, kind: str, seconds: float) -> None:
    """Before the pause: open the store, make contexts and buffers, and copy ahead where the pause would be long.

    ``kind``: "stop" where the pod does not run on. ``seconds``: until the attempt's deadline.
    """
    if not has(pod) or pod.gone:
        return
    record = pod.record
    broker, config = pod.node.gpus.broker, pod.node.config
    stops = kind == "stop"
    order = m.Begin(
        pod.container,
        attempt,
        config.store,
        config.store_settings,
        f"{record.job} attempt {attempt} pod {record.pod} device memory",
        0 if stops else _NICE,
        pod.node.store_key,
        stops=stops,
        folder=str(pod.folder),
        precopy=pod.spec.env.get(PRECOPY, "1") != "0",
    )
    _expect(pod, (await broker.ask(order)).processes)
    async with step("worker.gpu.precopy"):
        await broker.ask(m.Precopy(pod.container, attempt, min(_PRECOPY_SECONDS, seconds * _PRECOPY_SHARE)))


def _expect(pod: Pod, processes: list[KnownProcess]) -> None:
    """Who has to get its memory back, written down here too: a pod must not wait for it for ever, unnoticed."""
    pod.record.gpu_processes = list(processes)
    pod.save()


async def quiesce(pod: Pod, attempt: int, seconds: float) -> Timings:
    """The pod's device memory is out of its processes' hands, and the driver's part in their own memory."""
    if not has(pod) or pod.gone:
        return {}
    async with step("worker.gpu.quiesce"):
        done = await pod.node.gpus.broker.ask(m.Quiesce(pod.container, attempt, seconds))
        _expect(pod, done.processes)
    return done.timings


async def capture(pod: Pod, attempt: int) -> Timings:
    """Hash the device memory, and copy what the store lacks."""
    if not has(pod) or pod.gone:
        return {}
    async with step("worker.gpu.capture"):
        done = await pod.node.gpus.broker.ask(m.Capture(pod.container, attempt))
    return done.timings


async def bring_back(pod: Pod, seconds: float, mapping: dict[str, str] | None = None) -> Timings:
    """The processes run again: the driver's part and the memory go back. Idempotent.

    A broker that died is followed by another, which has its memory from the keeper. Raises `DeviceFailed` when the
    driver cannot, when a process does not come back in time, and when there is no broker to be had.
    """
    if not has(pod) or pod.gone:
        return {}
    async with step("worker.gpu.back"):
        for last in (False, False, True):
            try:
                await tell(pod)
                order = m.BringBack(pod.container, seconds, mapping or {}, pod.record.gpu_processes)
                done = await pod.node.gpus.broker.ask(order)
                _expect(pod, [])
                return done.timings
            except Unavailable as error:
                pod.log.warning("the GPU is not back yet", error=str(error))
                if last:
                    raise DeviceFailed(f"{pod.label}: {error.message}", error.hint) from error
    raise AssertionError("not reached")


async def persist(pod: Pod, attempt: int, *, finished: bool) -> m.Answer | None:
    """Bring what was captured into the store. None: there is nothing."""
    if not has(pod) or finished:
        return None
    return await pod.node.gpus.broker.ask(m.Persist(pod.container, attempt))


async def forget(pod: Pod, attempt: int) -> None:
    """The attempt is over. Raises nothing: a broker that is gone has forgotten it."""
    if has(pod) and attempt:
        await _quietly(pod, m.Forget(pod.container, attempt))


# -- a restore


async def fill(pod: Pod, manifest: PodManifest) -> Timings:
    """Make the pod's device memory from its manifest. Raises `NoCapacity`, `CorruptData`, `DeviceFailed`."""
    if not has(pod) or "gpu" not in manifest.extra:
        return {}
    memory = _saved(manifest)
    _expect(pod, [KnownProcess(saved.process, saved.pid, 0, saved.name) for saved in memory.processes])
    config = pod.node.config
    async with step("worker.gpu.fill"):
        done = await pod.node.gpus.broker.ask(
            m.Fill(
                pod.container,
                config.store,
                config.store_settings,
                memory,
                dict(manifest.memory),
                pod.node.store_key,
                _kept_key(pod),
            )
        )
    pod.record.gpu_mapping = mapping(memory.devices, pod.record.gpus)
    return done.timings


def _kept_key(pod: Pod) -> str:
    return f"{pod.record.job}/{pod.record.pod}"


async def drop_kept(node: Node, pods: Iterable[Pod]) -> None:
    """Until cancelled: give back what is kept of jobs that are gone, or that went on elsewhere."""
    broker = node.gpus.broker
    doubtful: set[str] = set()
    while True:
        await asyncio.sleep(_KEPT_SECONDS)
        try:
            kept = (await broker.ask(m.ListKept())).kept if broker.alive() else []
            here = {_kept_key(pod) for pod in pods}  # on their way here: they will take it
            stale = set()
            for one in kept:
                current = await node.incarnation(one.key.rpartition("/")[0])
                if one.key not in here and (not current or current > one.incarnation):
                    stale.add(one.key)
            # Twice in a row: a job that is about to come back has its next incarnation already, and no pod yet.
            if gone := stale & doubtful:
                await broker.ask(m.DropKept(sorted(gone)))
            doubtful = stale
        except MoorageError as error:
            log.info("what is kept of parked jobs was not looked at", error=str(error))


def mapping(old: list[str], new: list[str]) -> dict[str, str]:
    """Which GPU takes the place of which, without the ``GPU-`` prefix as the driver wants it; empty: none moved."""
    if old == new:
        return {}
    return {a.removeprefix("GPU-"): b.removeprefix("GPU-") for a, b in zip(old, new, strict=True)}


async def detach(pod: Pod, keep: str = "") -> None:
    """The pod is gone: give its memory (unless it is to be kept, on the gpu or the host) and its GPUs back.

    Raises nothing.
    """
    if has(pod):
        pod.node.gpus.leave(pod.container)
        place: Literal["", "gpu", "host"] = "gpu" if keep == "gpu" else "host" if keep == "host" else ""
        await _quietly(pod, m.Detach(pod.container, place, _kept_key(pod)))
        if not pod.node.gpus.broker.alive():
            await asyncio.to_thread(kept.forget, pod.node.gpus.broker.folder, pod.container)
        pod.node.gpus.release(pod.container)


async def _quietly(pod: Pod, order: m.Request) -> None:
    try:
        if pod.node.gpus.broker.alive():
            await pod.node.gpus.broker.ask(order)
    except (NotFound, Unavailable):
        pass
    except MoorageError as error:
        pod.log.warning("the GPU broker refused", order=type(order).__name__, error=str(error))
