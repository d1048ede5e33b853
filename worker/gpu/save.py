"""A pod's device memory on its way into the store: hashed and staged in the pause, written beside the running job.

Invariants:

* a chunk's name was computed from bytes that nobody could change: the pod was evicted, and what is written is a copy
  that was made in the same pause;
* a chunk that is not copied is one that the writer found in the store, under a lease that keeps prune away from it
  until the pod manifest names it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from blake3 import blake3

from moorage.errors import AttemptAborted, NoCapacity
from moorage.store import Chunk, Content, Store, Writer, WriteStats
from moorage.worker.gpu.blocks import DIGEST, Block, ChangedChunk, changed, saved
from moorage.worker.gpu.device import CHUNK, Device, Region, Slot
from moorage.worker.gpu.ring import at_once, share_out, threads_for
from moorage.worker.gpu.wire import BlockName

KIND = "device memory"
_ZERO = bytes(CHUNK)


class Staged:
    """Copies of chunks, one after the other on the device."""

    def __init__(self, device: Device, region: Region, names: list[bytes]) -> None:
        self.device = device
        self.region = region
        self.names = names


class Saving:
    """One attempt of one pod. `capture` in the pause, `write` after it, `close` when the manifest is written.

    ``devices``: how many GPUs the pod has. They are saved side by side.
    """

    def __init__(self, store: Store, *, label: str, nice: int, devices: int = 1) -> None:
        self._store = store
        self._writer: Writer = store.writer(label=label, threads=threads_for(devices), nice=nice)
        self._nice = nice
        self._zero = blake3(_ZERO, key=store.key.chunks).digest()
        self._staged: list[Staged] = []
        self._names: dict[BlockName, bytes] = {}
        self._blocks: dict[BlockName, Block] = {}
        self.bytes_changed = 0
        self.cancelled = threading.Event()
        self._shared: set[bytes] = set()
        self._choosing = threading.Lock()
        self._chosen: set[bytes] = set()  # copied: what several GPUs have alike is copied once

    def capture(self, blocks: Mapping[BlockName, Block], device: Callable[[int], Device]) -> dict[str, float]:
        """Hash all of ``blocks`` and copy what the store lacks. Returns seconds by step.

        Raises `NoCapacity` when the copy has no room, `DeviceFailed`. Afterwards the job may have its memory back.
        """
        by_device: dict[int, dict[BlockName, Block]] = {}
        for name, block in blocks.items():
            by_device.setdefault(block.about.device, {})[name] = block
        timings = dict.fromkeys(("gpu_open", "gpu_hash", "gpu_stage", "gpu_close"), 0.0)
        for laps in at_once([partial(self._capture_on, device(index), own) for index, own in by_device.items()]):
            timings = {name: max(seconds, laps[name]) for name, seconds in timings.items()}
        return timings

    def _capture_on(self, device: Device, blocks: Mapping[BlockName, Block]) -> dict[str, float]:
        timings = dict.fromkeys(("gpu_open", "gpu_hash", "gpu_stage", "gpu_close"), 0.0)
        clock = _Clock(timings)
        regions: list[Region] = []
        try:
            for block in blocks.values():
                regions.append(device.open(block.descriptors[0], block.about.size))
            clock.lap("gpu_open")
            digests = device.digests(regions, self._store.key.chunks)
            clock.lap("gpu_hash")
            wanted: list[ChangedChunk] = []
            with self._choosing:
                for (name, block), region, names in zip(blocks.items(), regions, digests, strict=True):
                    self._names[name] = block.names = names
                    self._blocks[name] = block
                    for chunk in changed(region.address, names, {self._zero}):
                        if chunk.name in self._chosen or chunk.name in self._shared:
                            continue
                        if self._writer.has(chunk.name):
                            self._shared.add(chunk.name)
                        else:
                            self._chosen.add(chunk.name)
                            wanted.append(chunk)
            self._stage(device, wanted)
            clock.lap("gpu_stage")
        finally:
            for region in regions:
                device.close(region)
        clock.lap("gpu_close")
        return timings

    def _stage(self, device: Device, chunks: list[ChangedChunk]) -> None:
        if not chunks:
            return
        size = len(chunks) * CHUNK
        free = device.free_bytes()
        if size > free:
            raise NoCapacity(
                f"GPU {device.index}: {size >> 20} MiB of device memory changed, and only {free >> 20} MiB are free to "
                "copy them to",
                "park the job instead, or leave more device memory free",
            )
        region = device.stage([chunk.address for chunk in chunks])
        with self._choosing:
            self._staged.append(Staged(device, region, [chunk.name for chunk in chunks]))
            self.bytes_changed += size

    @property
    def bytes_total(self) -> int:
        """Of all blocks that were captured."""
        return sum(block.about.size for block in self._blocks.values())

    @property
    def bytes_shared(self) -> int:
        """Of chunks that the store had before, each counted once."""
        return len(self._shared) * CHUNK

    def write(self) -> tuple[dict[str, Content], WriteStats]:
        """Bring the copies into the store; the content of each block by `SavedBlock.content_name`.

        Raises `NoCapacity`, `Unavailable`, `AttemptAborted` after `cancelled` was set.
        """
        at_once([partial(self._write, staged) for staged in self._staged])
        known = self.bytes_total - self.bytes_changed
        self._writer.count_known(known, known // CHUNK, kind=KIND)
        stats = self._writer.finish()
        self._drop_copies()
        return {
            saved(name.process, self._blocks[name]).content_name: self._content(names)
            for name, names in self._names.items()
        }, stats

    def _write(self, staged: Staged) -> None:
        """Each thread writes one slot into its pack while the other is filled from the device."""
        device = staged.device
        slots = device.slots()
        per_slot = len(slots[0].view) // CHUNK

        def add(slot: Slot, names: list[bytes]) -> None:
            pieces = [(name, slot.view[i * CHUNK : (i + 1) * CHUNK]) for i, name in enumerate(names)]
            self._writer.add_named(pieces, kind=KIND)

        def work(slot: Slot, other: Slot, firsts: Iterator[int]) -> None:
            before: tuple[Slot, list[bytes]] | None = None
            try:
                for first in firsts:
                    if self.cancelled.is_set():
                        raise AttemptAborted("the attempt is over")
                    names = staged.names[first : first + per_slot]
                    device.to_host(staged.region.address + first * CHUNK, slot, len(names) * CHUNK)
                    if before is not None:
                        add(*before)
                    device.wait()
                    before = slot, names
                    slot, other = other, slot
                if before is not None:
                    add(*before)
            finally:
                device.wait()  # nothing may be copied to a slot that is another's

        share_out(slots, range(0, len(staged.names), per_slot), work, nice=self._nice)

    def _content(self, names: bytes) -> Content:
        chunks = [names[at : at + DIGEST] for at in range(0, len(names), DIGEST)]
        parts: list[Chunk] = []
        for name in chunks:
            if name != self._zero:
                parts.append(Chunk(name, CHUNK))
            elif parts and not parts[-1].name:
                parts[-1] = Chunk(b"", parts[-1].length + CHUNK)
            else:
                parts.append(Chunk(b"", CHUNK))
        return Content(len(chunks) * CHUNK, parts)

    def _drop_copies(self) -> None:
        for staged in self._staged:
            staged.device.close(staged.region)
        self._staged.clear()

    def close(self) -> None:
        """Give the lease and the copies back. Calling it again does nothing."""
        self.cancelled.set()
        self._drop_copies()
        self._writer.abort()


class _Clock:
    def __init__(self, timings: dict[str, float]) -> None:
        self._timings = timings
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._timings[name] += now - self._last
        self._last = now
