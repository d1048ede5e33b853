"""The GPU broker: one process of the node that keeps the device memory of all pods, alive across checkpoints.

It outlives the worker. Heavy work (hashing, copying, the store) is done in threads; the loop only talks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from moorage.errors import Conflict, CorruptData, NoCapacity, NotFound
from moorage.store import Store
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.blocks import Block, SavedMemory, SavedProcess, owners, saved
from moorage.worker.gpu.copies import Copier
from moorage.worker.gpu.device import Device
from moorage.worker.gpu.driver import DriverProcess
from moorage.worker.gpu.fill import fill
from moorage.worker.gpu.kept import Kept
from moorage.worker.gpu.memory import PodMemory
from moorage.worker.gpu.parked import KeptBlock, Parked, Place, available
from moorage.worker.gpu.precopy import Precopy
from moorage.worker.gpu.reserve import Reserve, share
from moorage.worker.gpu.save import Saving
from moorage.worker.gpu.wire import BlockName

log = structlog.get_logger(__name__)


class Devices:
    """The node's GPUs, opened when they are needed. ``number``: a UUID's index in the driver's order."""

    def __init__(self, make: Callable[[int], Device], number: Callable[[str], int]) -> None:
        self._make = make
        self._number = number
        self._lock = threading.Lock()
        self._open: dict[int, Device] = {}

    def get(self, uuid: str) -> Device:
        """The GPU of this UUID. Raises `NotFound`, `EnvironmentLacking`, `DeviceFailed`."""
        index = self._number(uuid)
        with self._lock:
            if index not in self._open:
                self._open[index] = self._make(index)
            return self._open[index]


class _Attached:
    def __init__(self, memory: PodMemory, gpus: list[str]) -> None:
        self.memory = memory
        self.gpus = gpus
        self.saving: tuple[int, Saving] | None = None
        self.quiesced = 0
        self.captured = 0
        self.written: m.Answer | None = None
        self.writing: asyncio.Task[m.Answer] | None = None
        self.ahead: Precopy | None = None
        self.reserve = Reserve()
        self.driven = bool(memory.expected)  # the driver saved or restored its processes, or may have
        self.snapshot = SavedMemory()
        self.lock = asyncio.Lock()
        self.warming: asyncio.Task[None] | None = None


class Broker:
    """``drive`` makes the driver's part of a process, by its host pid. ``kept``: what outlives this broker."""

    def __init__(
        self, devices: Devices, drive: Callable[[int], DriverProcess] = DriverProcess, kept: Kept | None = None
    ) -> None:
        self._devices = devices
        self._drive = drive
        self._kept = kept
        self.parked = Parked()
        self.host_room: Callable[[], int] = available
        if kept is not None:
            kept.everything = lambda: [pod.memory.everything() for pod in self._pods.values()]
        self._pods: dict[str, _Attached] = {}
        self._stores: dict[str, Store] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """No pod is attached."""
        return not self._pods

    async def do(self, request: m.Request) -> m.Answer:
        """Carry out one order. Raises `MoorageError`."""
        if isinstance(request, m.Attach):
            return await self._attach(request)
        if isinstance(request, m.Exit):
            if self._pods:
                raise Conflict(f"the GPU broker serves {len(self._pods)} pods")
            return m.Answer(id=0)
        if isinstance(request, m.Detach):
            return await self._detach(request)
        if isinstance(request, m.ListKept):
            return m.Answer(
                id=0, kept=[m.Kept(key, k.incarnation, k.place, k.size) for key, k in self.parked.pods.items()]
            )
        if isinstance(request, m.DropKept):
            for key in request.keys:
                await asyncio.to_thread(self.parked.drop, key)
            return m.Answer(id=0)
        pod = self._pods.get(request.pod)
        if pod is None:
            raise NotFound(f"the GPU broker does not know {request.pod}", "its memory was lost with an earlier broker")
        if isinstance(request, m.Look):
            return await self._look(pod)
        if isinstance(request, m.Persist):  # beside the running job
            return await self._persist(pod, request)
        if isinstance(request, m.Precopy):
            if pod.ahead is not None and self._saving(pod, request.attempt):
                await pod.ahead.wait(request.seconds)
            return m.Answer(id=0)
        async with pod.lock:
            match request:
                case m.Begin():
                    return await self._begin(pod, request)
                case m.Quiesce():
                    return await self._quiesce(pod, request)
                case m.Capture():
                    return await self._capture(pod, request)
                case m.BringBack():
                    return await self._bring_back(pod, request)
                case m.Forget():
                    return await self._forget(pod, request)
                case m.Fill():
                    return await self._fill(pod, request)

    # -- pods

    async def _attach(self, request: m.Attach) -> m.Answer:
        if request.pod not in self._pods:
            memory = PodMemory(request.pod, Path(request.socket), request.incarnation, self._drive, self._kept)
            memory.take_over()
            pod = self._pods[request.pod] = _Attached(memory, request.gpus)
            memory.listen()
            pod.warming = asyncio.create_task(self._warm_early(pod))
        return m.Answer(id=0)

    async def _detach(self, request: m.Detach) -> m.Answer:
        pod = self._pods.pop(request.pod, None)
        if pod is not None:
            async with pod.lock:
                await self._end_saving(pod)
                await asyncio.to_thread(pod.reserve.give_back)
                if request.keep and pod.quiesced and pod.captured == pod.quiesced:
                    await asyncio.to_thread(self._keep, pod, request.key, request.keep)
                await pod.memory.close()
        return m.Answer(id=0)

    def _keep(self, pod: _Attached, key: str, place: Place) -> None:
        """Its processes are gone, and its memory is as it was captured."""
        try:
            own = owners(pod.memory.blocks)
        except CorruptData as error:
            log.warning("device memory is not kept", pod=key, error=str(error))
            return
        self.parked.keep(key, place, pod.memory.incarnation, own, self._device(pod))

    async def _look(self, pod: _Attached) -> m.Answer:
        found = await pod.memory.refusals()
        free = await asyncio.to_thread(self._free, pod)
        return m.Answer(
            id=0,
            processes=pod.memory.known(),
            objections=found,
            bytes_total=sum(block.about.size for block in pod.memory.blocks.values()),
            bytes_free=free,
        )

    def _free(self, pod: _Attached) -> int:
        return min((self._devices.get(uuid).free_bytes() for uuid in pod.gpus), default=0)

    def _device(self, pod: _Attached) -> Callable[[int], Device]:
        return lambda index: self._devices.get(pod.gpus[index])

    async def _store(self, request: m.Begin | m.Fill) -> Store:
        location = request.store
        if location not in self._stores:
            opening = asyncio.to_thread(Store.open, location, settings=request.settings, key=request.key)
            self._stores[location] = await opening
        return self._stores[location]

    # -- a checkpoint

    async def _begin(self, pod: _Attached, request: m.Begin) -> m.Answer:
        if pod.saving is not None and pod.saving[0] == request.attempt:
            return m.Answer(id=0, processes=pod.memory.known())
        await self._end_saving(pod)
        store = await self._store(request)
        copier = Copier(Path(request.folder) if request.folder else None, self.host_room)
        make = Saving(
            store,
            label=request.label,
            nice=request.nice,
            devices=len(pod.gpus),
            copier=copier,
            in_place=request.stops,
        )
        pod.saving = request.attempt, make
        await asyncio.to_thread(self._warm, pod)
        if request.precopy:
            pod.ahead = Precopy(make, lambda: _own(pod), self._device(pod))
            await pod.ahead.begin(stops=request.stops, fresh=not pod.driven)
        return m.Answer(id=0, processes=pod.memory.known())

    def _warm(self, pod: _Attached) -> None:
        """Contexts, kernels and the pinned ring are made before the pause, not in it."""
        for uuid in pod.gpus:
            self._devices.get(uuid).warm()

    async def _warm_early(self, pod: _Attached) -> None:
        """From the start of the pod on, so that its first checkpoint takes no longer than the others."""
        try:
            await asyncio.to_thread(self._warm, pod)
        except Exception as error:  # the checkpoint that needs it will say so
            log.warning("the GPU is not ready for checkpoints yet", pod=pod.memory.label, error=str(error))

    async def _quiesce(self, pod: _Attached, request: m.Quiesce) -> m.Answer:
        if pod.quiesced == request.attempt:
            total = sum(block.size for block in pod.snapshot.blocks)
            return m.Answer(id=0, bytes_total=total, processes=pod.memory.known())
        timings: dict[str, float] = {}
        began = time.monotonic()
        pod.driven = True
        await pod.memory.quiesce(request.seconds)
        timings["gpu_quiesce"] = time.monotonic() - began
        began = time.monotonic()
        total = await pod.memory.evict(request.seconds)
        timings["gpu_evict"] = time.monotonic() - began
        await asyncio.to_thread(self._place, pod)
        await asyncio.to_thread(self._hold, pod, pod.memory.driver_bytes, strict=False)
        pod.quiesced = request.attempt
        pod.snapshot = self._snapshot(pod)
        return m.Answer(id=0, bytes_total=total, timings=timings, processes=pod.memory.known())

    def _place(self, pod: _Attached) -> None:
        """Ask where memory lies: a process counts what it sees, which CUDA_VISIBLE_DEVICES may have changed."""
        if len(pod.gpus) < 2:
            return
        device = self._devices.get(pod.gpus[0])
        places = {self._devices.get(uuid).index: number for number, uuid in enumerate(pod.gpus)}
        for block in pod.memory.blocks.values():
            if not block.placed and block.descriptors:
                found = device.place(block.descriptors[0])
                if found in places:
                    block.place(places[found])

    def _hold(self, pod: _Attached, saved_bytes: int, *, strict: bool) -> None:
        """Nobody else may have the room that the driver needs for its own restore."""
        devices = [self._devices.get(uuid) for uuid in pod.gpus]
        pod.reserve.hold(devices, share(saved_bytes, len(devices)), strict=strict)

    def _snapshot(self, pod: _Attached) -> SavedMemory:
        memory = pod.memory
        return SavedMemory(
            processes=[SavedProcess(p.number, p.pod_pid, p.name) for p in memory.processes.values()],
            blocks=[saved(name.process, block) for name, block in sorted(memory.blocks.items())],
            devices=pod.gpus,
            driver_bytes=memory.driver_bytes,
        )

    async def _capture(self, pod: _Attached, request: m.Capture) -> m.Answer:
        saving = self._saving(pod, request.attempt)
        if pod.quiesced != request.attempt:
            raise Conflict(f"{pod.memory.label} is not quiesced for attempt {request.attempt}")
        timings: dict[str, float] = {}
        if pod.captured != request.attempt:
            if pod.ahead is not None:
                await pod.ahead.stop()
            timings = await asyncio.to_thread(saving.capture, owners(pod.memory.blocks), self._device(pod))
            pod.captured = request.attempt
            # The copies do not change any more: they are on their way while CRIU saves the processes.
            pod.writing = asyncio.create_task(self._write(pod, saving))
        return m.Answer(id=0, bytes_new=saving.bytes_changed, timings=timings)

    async def _bring_back(self, pod: _Attached, request: m.BringBack) -> m.Answer:
        began = time.monotonic()
        if pod.saving is not None and pod.saving[1].in_place:
            # It was to stop, and runs on: what was not written yet changes from now on.
            await self._end_saving(pod)
        pod.memory.expect(request.processes)
        await pod.memory.bring_back(
            request.seconds, request.mapping or None, lambda: asyncio.to_thread(pod.reserve.give_back)
        )
        pod.quiesced = 0
        return m.Answer(id=0, timings={"gpu_back": time.monotonic() - began})

    async def _persist(self, pod: _Attached, request: m.Persist) -> m.Answer:
        saving = self._saving(pod, request.attempt)
        if pod.captured != request.attempt:
            raise Conflict(f"{pod.memory.label} was not captured in attempt {request.attempt}")
        if pod.written is None:
            if pod.writing is None:
                pod.writing = asyncio.create_task(self._write(pod, saving))
            pod.written = await asyncio.shield(pod.writing)
        return pod.written

    async def _write(self, pod: _Attached, saving: Saving) -> m.Answer:
        began = time.monotonic()
        contents, stats = await asyncio.to_thread(saving.write)
        seconds = time.monotonic() - began
        told = {"seconds": round(seconds, 3), "bytes": saving.bytes_changed, "ahead": saving.bytes_ahead}
        log.info("device memory is written", pod=pod.memory.label, **told)
        memory = msgspec.structs.replace(
            pod.snapshot,
            bytes_new=saving.bytes_changed,
            bytes_shared=saving.bytes_shared,
            bytes_same=saving.bytes_total - saving.bytes_changed - saving.bytes_shared,
        )
        timings, total, new = {"device": seconds}, stats.bytes_total, stats.bytes_new
        return m.Answer(id=0, memory=memory, contents=contents, bytes_total=total, bytes_new=new, timings=timings)

    async def _forget(self, pod: _Attached, request: m.Forget) -> m.Answer:
        if pod.saving is not None and pod.saving[0] == request.attempt:
            await self._end_saving(pod)
        return m.Answer(id=0)

    def _saving(self, pod: _Attached, attempt: int) -> Saving:
        if pod.saving is None or pod.saving[0] != attempt:
            raise NotFound(f"the GPU broker knows nothing of attempt {attempt} of {pod.memory.label}")
        return pod.saving[1]

    async def _end_saving(self, pod: _Attached) -> None:
        saving, pod.saving, pod.written = pod.saving, None, None
        writing, pod.writing = pod.writing, None
        ahead, pod.ahead = pod.ahead, None
        if saving is not None:
            saving[1].cancelled.set()
            if ahead is not None:
                await ahead.stop()
            if writing is not None:  # nobody may read the copies when they go
                await asyncio.gather(writing, return_exceptions=True)
            with contextlib.suppress(Exception):  # the device may have failed; what it held is gone with it
                await asyncio.to_thread(saving[1].close)

    # -- a restore

    async def _fill(self, pod: _Attached, request: m.Fill) -> m.Answer:
        memory = pod.memory
        if memory.blocks or memory.expected:
            return m.Answer(id=0)
        store = await self._store(request)
        began = time.monotonic()
        pod.driven = True
        timings: dict[str, float] = {}
        kept = self.parked.take(request.kept_key)
        try:
            blocks = await asyncio.to_thread(self._filled, store, pod, request, kept.blocks if kept else {}, timings)
        finally:
            if kept is not None:  # beside the restore: unpinning takes longer than copying
                closing = asyncio.create_task(asyncio.to_thread(kept.close))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        memory.take(request.memory.processes, blocks)
        return m.Answer(id=0, timings=timings | {"gpu_fill": time.monotonic() - began})

    def _filled(
        self,
        store: Store,
        pod: _Attached,
        request: m.Fill,
        kept: dict[BlockName, KeptBlock],
        timings: dict[str, float],
    ) -> dict[BlockName, Block]:
        """From what was kept of the pod as far as that goes, the rest from the store."""

        def make() -> dict[BlockName, Block]:
            self._hold(pod, request.memory.driver_bytes, strict=True)
            saved = request.memory.blocks
            return fill(store, saved, request.contents, self._device(pod), kept, timings)

        try:
            try:
                return make()
            except NoCapacity:
                if not self.parked.drop_on_devices():
                    raise
                log.info("other parked jobs' memory was in the way")
                return make()
        except BaseException:
            pod.reserve.give_back()
            raise


def _own(pod: _Attached) -> dict[BlockName, Block]:
    """Those blocks whose memory is here and not another block's, as far as it is known on which GPU they lie."""
    return {
        name: block
        for name, block in pod.memory.blocks.items()
        if block.descriptors
        and name == BlockName(block.about.owner, block.about.owner_id)
        and (block.placed or len(pod.gpus) < 2)
    }
