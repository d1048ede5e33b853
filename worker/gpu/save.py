"""A pod's device memory on its way into the store: hashed in the pause, written beside CRIU's dump and the running job.

Invariants:

* a chunk's name was computed from bytes that nobody could change: those of a copy, or of the pod's memory while it was
  evicted; and what is written under it are those bytes;
* a chunk that is not copied is one that the writer found in the store or brought there itself, under a lease that keeps
  prune away from it until the pod manifest names it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from blake3 import blake3

from moorage.errors import AttemptAborted, DeviceFailed
from moorage.store import Chunk, Content, Store, Writer, WriteStats
from moorage.worker.gpu.blocks import DIGEST, Block, ChangedChunk, changed, saved
from moorage.worker.gpu.clock import Clock
from moorage.worker.gpu.copies import Copier, Copy, OnDevice
from moorage.worker.gpu.device import CHUNK, Device, Region, Slot
from moorage.worker.gpu.ring import at_once, pump, threads_for
from moorage.worker.gpu.wire import BlockName

KIND = "device memory"
_ZERO = bytes(CHUNK)
_STEPS = ("gpu_open", "gpu_hash", "gpu_stage", "gpu_close")


class Saving:
    """One attempt of one pod. `capture` in the pause, `write` after it, `close` when the manifest is written.

    ``devices``: how many GPUs the pod has. They are saved side by side. ``in_place``: the pod does not run on, so that
    its memory itself is what is written, without a copy.
    """

    def __init__(
        self,
        store: Store,
        *,
        label: str,
        nice: int,
        devices: int = 1,
        copier: Copier | None = None,
        in_place: bool = False,
    ) -> None:
        self._store = store
        self._writer: Writer = store.writer(label=label, threads=threads_for(devices), nice=nice)
        self._nice = nice
        self._copier = copier or Copier()
        self.in_place = in_place
        self._zero = blake3(_ZERO, key=store.key.chunks).digest()
        self._copies: list[Copy] = []
        self._names: dict[BlockName, bytes] = {}
        self._blocks: dict[BlockName, Block] = {}
        self._shared: set[bytes] = set()
        self._choosing = threading.Lock()
        self._wanted: set[bytes] = set()  # what several GPUs have alike is copied once
        self._ahead: set[bytes] = set()  # written before the pause
        self.cancelled = threading.Event()

    # -- before the pause

    @property
    def key(self) -> bytes:
        """What digests are keyed with."""
        return self._store.key.chunks

    def known(self, name: bytes) -> bool:
        """Whether the chunk of this name need not be written."""
        return name == self._zero or self._writer.has(name)

    def room(self, device: Device) -> int:
        """Bytes that a copy on the device may take now."""
        return max(0, self._copier.room(device).device) * CHUNK

    def send(self, device: Device, chunks: Sequence[ChangedChunk], halt: threading.Event) -> None:
        """Write chunks that lie where nobody changes them, before the pause. ``halt`` ends that early."""
        fresh = {chunk.name: chunk for chunk in chunks if not self.known(chunk.name)}
        self._write([OnDevice(device, list(fresh.values()))], halt)

    # -- in the pause

    def capture(self, blocks: Mapping[BlockName, Block], device: Callable[[int], Device]) -> dict[str, float]:
        """Hash all of ``blocks`` and copy what the store lacks. Returns seconds by step.

        Raises `NoCapacity` when copies have no room anywhere, `DeviceFailed`. Afterwards the job may have its memory
        back, unless the attempt is ``in_place``.
        """
        by_device: dict[int, dict[BlockName, Block]] = {}
        for name, block in blocks.items():
            by_device.setdefault(block.about.device, {})[name] = block
        timings = dict.fromkeys(_STEPS, 0.0)
        for laps in at_once([partial(self._capture_on, device(index), own) for index, own in by_device.items()]):
            timings = {name: max(seconds, laps[name]) for name, seconds in timings.items()}
        return timings

    def _capture_on(self, device: Device, blocks: Mapping[BlockName, Block]) -> dict[str, float]:
        timings: dict[str, float] = {}
        clock = Clock(timings)
        regions: list[Region] = []
        try:
            for block in blocks.values():
                regions.append(device.open(block.descriptors[0], block.about.size))
            clock.lap("gpu_open")
            digests = device.digests(regions, self.key)
            clock.lap("gpu_hash")
            wanted: list[ChangedChunk] = []
            with self._choosing:
                for (name, block), region, names in zip(blocks.items(), regions, digests, strict=True):
                    self._names[name] = block.names = names
                    self._blocks[name] = block
                    wanted += self._lacking(region, names)
            if self.in_place:
                self._copies.append(OnDevice(device, wanted, regions))
                regions = []
            elif wanted:
                for copy in self._copier.copy(device, wanted):
                    self._copies.append(copy)
            clock.lap("gpu_stage")
        finally:
            with contextlib.suppress(DeviceFailed):
                device.wait()  # nothing may be on its way from there any more
            for region in regions:
                device.close(region)
        clock.lap("gpu_close")
        return timings

    def _lacking(self, region: Region, names: bytes) -> list[ChangedChunk]:
        """Those chunks that have to be written, each once."""
        found = []
        for chunk in changed(region.address, names, {self._zero}):
            if chunk.name in self._wanted or chunk.name in self._shared:
                continue
            if not self._writer.has(chunk.name):
                found.append(chunk)
                self._wanted.add(chunk.name)
            elif chunk.name in self._ahead:
                self._wanted.add(chunk.name)
            else:
                self._shared.add(chunk.name)
        return found

    @property
    def bytes_total(self) -> int:
        """Of all blocks that were captured."""
        return sum(block.about.size for block in self._blocks.values())

    @property
    def bytes_changed(self) -> int:
        """Of chunks that this checkpoint brings into the store, those of the pre-copy included."""
        return len(self._wanted) * CHUNK

    @property
    def bytes_shared(self) -> int:
        """Of chunks that the store had before, each counted once."""
        return len(self._shared) * CHUNK

    @property
    def bytes_ahead(self) -> int:
        """Of all chunks that were written before the pause; some of them may have changed since."""
        return len(self._ahead) * CHUNK

    # -- after it

    def write(self) -> tuple[dict[str, Content], WriteStats]:
        """Bring the copies into the store; the content of each block by `SavedBlock.content_name`.

        Raises `NoCapacity`, `Unavailable`, `AttemptAborted` after `cancelled` was set.
        """
        self._write(self._copies, None)
        known = self.bytes_total - sum(stats.total for stats in self._writer.by_kind.values())
        if known > 0:
            self._writer.count_known(known, known // CHUNK, kind=KIND)
        if self.cancelled.is_set():
            raise AttemptAborted("the attempt is over")
        stats = self._writer.finish()
        self._drop_copies()
        return {
            saved(name.process, self._blocks[name]).content_name: self._content(names)
            for name, names in self._names.items()
        }, stats

    def _write(self, copies: Sequence[Copy], halt: threading.Event | None) -> None:
        """Each copy is closed when it is written. ``halt``: these are ahead of the pause, and may end early."""
        by_device: dict[int, list[Copy]] = {}
        for copy in copies:
            by_device.setdefault(copy.device.index, []).append(copy)
        ways = [_Way(own) for own in by_device.values()]
        go_on = partial(self._go_on, halt)
        for taken in at_once([partial(way.take_all, self._add, go_on, nice=self._nice) for way in ways]):
            if halt is not None:
                self._ahead.update(name for names in taken for name in names)

    def _go_on(self, halt: threading.Event | None) -> bool:
        if self.cancelled.is_set():
            raise AttemptAborted("the attempt is over")
        return halt is None or not halt.is_set()

    def _add(self, slot: Slot, names: list[bytes]) -> None:
        pieces = [(name, slot.view[i * CHUNK : (i + 1) * CHUNK]) for i, name in enumerate(names)]
        self._writer.add_named(pieces, kind=KIND)

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
        for copy in self._copies:
            copy.close()
        self._copies.clear()

    def close(self) -> None:
        """Give the lease and the copies back. Calling it again does nothing."""
        self.cancelled.set()
        self._drop_copies()
        self._writer.abort()


class _Way:
    """Copies of one device on their way through its ring; each is closed when all of it was taken."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._device = copies[0].device
        self._copies = copies
        self._per_slot = len(self._device.slots()[0].view) // CHUNK
        self._left = [-(-len(copy.names) // self._per_slot) for copy in copies]
        self._counting = threading.Lock()

    def take_all(
        self, take: Callable[[Slot, list[bytes]], None], go_on: Callable[[], bool], *, nice: int
    ) -> list[list[bytes]]:
        """``take`` each slot with the names of what is in it, from many threads. Returns all names that were taken."""
        taken: list[list[bytes]] = []

        def begin(part: tuple[int, int], slot: Slot) -> None:
            copy = self._copies[part[0]]
            copy.read(part[1], min(self._per_slot, len(copy.names) - part[1]), slot)

        def arrived(part: tuple[int, int], slot: Slot) -> None:
            number, first = part
            copy = self._copies[number]
            names = copy.names[first : first + self._per_slot]
            take(slot, names)
            with self._counting:
                taken.append(names)
                self._left[number] -= 1
                done = not self._left[number]
            if done:
                copy.close()  # its room is wanted

        pump(self._device, self._parts(go_on), begin, arrived, nice=nice)
        return taken

    def _parts(self, go_on: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        for number, copy in enumerate(self._copies):
            for first in range(0, len(copy.names), self._per_slot):
                if not go_on():
                    return
                yield number, first
