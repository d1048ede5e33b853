"""Pre-copy: what of a pod's device memory can be in the store already when the pause begins.

A chunk is first copied to a small staging buffer on the device, and hashed and sent from there, so a name never covers
bytes that changed meanwhile. Which chunks are worth it is guessed from hashes of the memory in use: one that changed
between two looks will change again. In the pause all is hashed anew: a wrong guess costs a chunk, never truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

import structlog

from moorage.barrier import clock
from moorage.errors import AttemptAborted, MoorageError
from moorage.worker.gpu.blocks import DIGEST, Block
from moorage.worker.gpu.copies import in_region
from moorage.worker.gpu.device import CHUNK, Device, Region
from moorage.worker.gpu.save import Saving
from moorage.worker.gpu.wire import BlockName

log = structlog.get_logger(__name__)

Mode = Literal["no", "beside", "before"]
#: The staging buffer, in bytes, on a device that has so much to spare; at most a quarter of what is free.
BUFFER: Final = 1 << 30
#: Below this it is not worth it to look, in bytes: the pause takes longer by a twentieth of a second.
FEW: Final = 1 << 30
_SETTLE_SECONDS = 0.1


def mode(total: int, room: int, *, stops: bool, fresh: bool, few: int = FEW) -> Mode:
    """Whether to pre-copy, and whether the pause has to wait for it. Pure; bytes.

    ``total``: of the pod's blocks; ``room``: what a copy on the device may take; ``stops``: the pod does not run on,
    so every byte that is written in the pause is one for which it stands still. ``fresh``: no driver checkpoint of the
    pod has been made, so nothing of it is in the store, and nothing bad can come from other work on its GPU.
    """
    if total > few if stops else total > room:
        return "before"
    return "beside" if fresh and total else "no"


def again(before: int, now: int, enough: int) -> bool:
    """Whether another round pays: ``now`` and one round ``before`` so many bytes were found to send. Pure."""
    return enough < now < before


class _Found(NamedTuple):
    """What a look found to send: chunks that stood still, and the bytes of all that the store lacks."""

    chunks: list[tuple[BlockName, int]]
    bytes: int


def cold(seen: Mapping[BlockName, bytes], before: Mapping[BlockName, bytes], known: Callable[[bytes], bool]) -> _Found:
    """Chunks that are not ``known`` and look as they did ``before``. Pure."""
    still: list[tuple[BlockName, int]] = []
    lacking = 0
    for name, digests in seen.items():
        past = before.get(name, b"")
        for number in range(len(digests) // DIGEST):
            at = slice(number * DIGEST, (number + 1) * DIGEST)
            if not known(digests[at]):
                lacking += CHUNK
                if digests[at] == past[at]:
                    still.append((name, number))
    return _Found(still, lacking)


class Precopy:
    """The pre-copy of one attempt. ``blocks``: those that the pod has now, with descriptors; asked in the event loop.

    Whatever fails here is said in the log: what was not sent is sent after the pause.
    """

    def __init__(
        self, saving: Saving, blocks: Callable[[], Mapping[BlockName, Block]], device: Callable[[int], Device]
    ) -> None:
        self._saving = saving
        self._blocks = blocks
        self._device = device
        self._halt = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self.mode: Mode = "no"
        self.rounds: list[int] = []  # bytes found to send, one for each look

    async def begin(self, *, stops: bool, fresh: bool) -> None:
        """Look whether it pays; if so it goes on in the background until `stop`."""
        by_device: dict[int, int] = {}
        for block in self._blocks().values():
            by_device[block.about.device] = by_device.get(block.about.device, 0) + block.about.size
        modes: dict[int, Mode] = {}
        for index, total in by_device.items():
            room = await asyncio.to_thread(self._saving.room, self._device(index))
            modes[index] = mode(total, room, stops=stops, fresh=fresh)
        at_work = {index: one for index, one in modes.items() if one != "no"}
        if at_work:
            self.mode = "before" if "before" in at_work.values() else "beside"
            self._task = asyncio.create_task(self._run(sorted(at_work), stops=stops), name="pre-copy of device memory")

    async def wait(self, seconds: float) -> None:
        """Until the rounds have ended, at most ``seconds``, if the pause has to wait for them."""
        if self._task is not None and self.mode == "before":
            await asyncio.wait({self._task}, timeout=seconds)

    async def stop(self) -> None:
        """Until nothing of it is under way any more. Calling it again does nothing."""
        self._halt.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, indices: Sequence[int], *, stops: bool) -> None:
        began = clock.now()
        for index in indices:
            device = self._device(index)
            try:
                enough = await asyncio.to_thread(self._saving.room, device) if self.mode == "before" else 0
                await self._rounds(index, device, FEW if stops else enough)
            except AttemptAborted:
                return
            except (MoorageError, OSError) as error:
                log.info("the pre-copy of device memory ended early", error=str(error))
        took = round(clock.now() - began, 3)
        log.info("device memory was copied ahead", rounds=self.rounds, bytes=self._saving.bytes_ahead, seconds=took)

    async def _rounds(self, index: int, device: Device, enough: int) -> None:
        room = await asyncio.to_thread(device.free_bytes)
        size = min(BUFFER, room // 4) // CHUNK * CHUNK
        if not size:
            return
        before, past = 1 << 62, await self._look(index, device)
        await asyncio.sleep(_SETTLE_SECONDS)
        buffer: Region | None = None
        try:
            while not self._halt.is_set():
                seen = await self._look(index, device)
                found = await asyncio.to_thread(cold, seen, past, self._saving.known)
                self.rounds.append(found.bytes)
                if not again(before, found.bytes, enough):
                    return
                if buffer is None:
                    buffer = await asyncio.to_thread(device.scratch, size)
                await self._send(device, buffer, found.chunks)
                before, past = found.bytes, seen
        finally:
            if buffer is not None:
                await asyncio.to_thread(device.close, buffer)

    async def _look(self, index: int, device: Device) -> dict[BlockName, bytes]:
        """Digests of the memory in use: what was written to meanwhile has one that means nothing."""
        here = [name for name, block in self._blocks().items() if block.about.device == index]
        async with self._borrowed(here) as held:

            def hash_all() -> dict[BlockName, bytes]:
                with _opened(device, held) as regions:
                    return dict(zip(regions, device.digests(list(regions.values()), self._saving.key), strict=True))

            return await asyncio.to_thread(hash_all)

    async def _send(self, device: Device, buffer: Region, chunks: Sequence[tuple[BlockName, int]]) -> None:
        most = buffer.size // CHUNK
        for first in range(0, len(chunks), most):
            if self._halt.is_set():
                return
            part = chunks[first : first + most]
            # Opened for moments only: what the job frees meanwhile is not to stay taken.
            async with self._borrowed(dict.fromkeys(name for name, _ in part)) as held:
                copied = await asyncio.to_thread(self._stage, device, buffer, part, held)
            await asyncio.to_thread(self._saving.send, device, in_region(buffer, copied), self._halt)

    def _stage(
        self,
        device: Device,
        buffer: Region,
        chunks: Sequence[tuple[BlockName, int]],
        held: Mapping[BlockName, tuple[int, int]],
    ) -> list[bytes]:
        """Copy chunks to the buffer; the names of what lies there now."""
        with _opened(device, held) as regions:
            addresses = [regions[name].address + number * CHUNK for name, number in chunks if name in regions]
            if addresses:
                device.gather(addresses, buffer)
        there = Region(buffer.address, len(addresses) * CHUNK, buffer.handle)
        (digests,) = device.digests([there], self._saving.key)
        return [digests[at : at + DIGEST] for at in range(0, len(digests), DIGEST)]

    @contextlib.asynccontextmanager
    async def _borrowed(self, names: Iterable[BlockName]) -> AsyncIterator[dict[BlockName, tuple[int, int]]]:
        """Descriptors of our own, with the blocks' sizes: the job may free any of them meanwhile."""
        held: dict[BlockName, tuple[int, int]] = {}
        blocks = self._blocks()
        try:
            for name in names:
                if name in blocks:
                    held[name] = os.dup(blocks[name].descriptors[0]), blocks[name].about.size
            yield held
        finally:
            for descriptor, _ in held.values():
                os.close(descriptor)


@contextlib.contextmanager
def _opened(device: Device, held: Mapping[BlockName, tuple[int, int]]) -> Iterator[dict[BlockName, Region]]:
    regions: dict[BlockName, Region] = {}
    try:
        for name, (descriptor, size) in held.items():
            regions[name] = device.open(descriptor, size)
        yield regions
    finally:
        for region in regions.values():
            device.close(region)
