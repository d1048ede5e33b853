"""Where chunks stand from the pause until the store has them: on the device, in pinned host memory, on disk.

The fastest that has room: a copy on the device takes a millisecond a GiB, one in host memory a fiftieth of a second,
one on disk as long as the disk says. What stays where it is (`OnDevice` over the pod's own memory) needs no room, but
nobody may have that memory meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog

from moorage.errors import DeviceFailed, NoCapacity
from moorage.store.posix import translated
from moorage.worker.gpu.blocks import ChangedChunk
from moorage.worker.gpu.device import CHUNK, Device, Region, Slot
from moorage.worker.gpu.parked import SPARE, available
from moorage.worker.gpu.ring import pump

log = structlog.get_logger(__name__)

#: The most pinned host memory that the copies of one pod's GPU take.
HOST_MOST: Final = 2 << 30
_DEVICE_PIECE = 1 << 30  # what is written is given back in pieces of this size, while the rest is on its way
_HOST_PIECE = 256 << 20
_DEVICE_SPARE = 256 << 20  # for neighbours and for what hashing takes
_DISK_SPARE = 1 << 30


class Room(NamedTuple):
    """What copies may take, or what they take, in chunks."""

    device: int
    host: int
    disk: int


class Copy(Protocol):
    """Chunks that nobody changes, ``names`` by their order."""

    device: Device
    names: list[bytes]

    def read(self, first: int, count: int, slot: Slot) -> None:
        """Begin to bring chunks to the slot's beginning; they are there after the device's `wait`."""

    def close(self) -> None:
        """Give the room back. Calling it again does nothing."""


def place(chunks: int, room: Room) -> Room:
    """How many of ``chunks`` go where. Raises `NoCapacity`."""
    device = min(chunks, max(0, room.device))
    host = min(chunks - device, max(0, room.host))
    disk = chunks - device - host
    if disk > max(0, room.disk):
        sizes = [f"{max(0, part) * CHUNK >> 20} MiB" for part in room]
        raise NoCapacity(
            f"{chunks * CHUNK >> 20} MiB of device memory changed, and there is room for a copy of {sizes[0]} on the "
            f"device, {sizes[1]} in host memory, {sizes[2]} on disk",
            "park the job (that needs no copy), or free device memory, host memory or space on the node's state folder",
        )
    return Room(device, host, disk)


class OnDevice:
    """Chunks at their addresses; ``regions`` are closed with it."""

    def __init__(self, device: Device, chunks: Sequence[ChangedChunk], regions: Sequence[Region] = ()) -> None:
        self.device = device
        self.names = [chunk.name for chunk in chunks]
        self._addresses = [chunk.address for chunk in chunks]
        self._regions = list(regions)

    def read(self, first: int, count: int, slot: Slot) -> None:
        self.device.to_host(slot, joined(self._addresses[first : first + count]))

    def close(self) -> None:
        while self._regions:
            self.device.close(self._regions.pop())


class InHost:
    """Chunks in pinned memory, one after the other."""

    def __init__(self, device: Device, chunks: Sequence[ChangedChunk]) -> None:
        self.device = device
        self.names = [chunk.name for chunk in chunks]
        self._memory: Slot | None = device.pin(len(chunks) * CHUNK)
        device.to_host(self._memory, joined([chunk.address for chunk in chunks]))

    def read(self, first: int, count: int, slot: Slot) -> None:
        assert self._memory is not None
        slot.view[: count * CHUNK] = self._memory.view[first * CHUNK : (first + count) * CHUNK]

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self.device.unpin(memory)


class OnDisk:
    """Chunks in a file that has no name, one after the other."""

    def __init__(self, device: Device, chunks: Sequence[ChangedChunk], folder: Path) -> None:
        self.device = device
        self.names = [chunk.name for chunk in chunks]
        self._what = str(folder)
        with translated(self._what):
            self._file, name = tempfile.mkstemp(prefix="device-memory-", dir=folder)
            os.unlink(name)  # noqa: PTH108
        try:
            self._fill([chunk.address for chunk in chunks])
        except BaseException:
            self.close()
            raise

    def _fill(self, addresses: Sequence[int]) -> None:
        per_slot = len(self.device.slots()[0].view) // CHUNK

        def begin(first: int, slot: Slot) -> None:
            self.device.to_host(slot, joined(addresses[first : first + per_slot]))

        def take(first: int, slot: Slot) -> None:
            left = slot.view[: min(per_slot, len(addresses) - first) * CHUNK]
            at = first * CHUNK
            with translated(self._what):
                while left:
                    written = os.pwrite(self._file, left, at)
                    left, at = left[written:], at + written

        pump(self.device, range(0, len(addresses), per_slot), begin, take)

    def read(self, first: int, count: int, slot: Slot) -> None:
        left = slot.view[: count * CHUNK]
        at = first * CHUNK
        with translated(self._what):
            while left:
                got = os.preadv(self._file, [left], at)
                if not got:
                    raise DeviceFailed(f"the copy of device memory in {self._what} became shorter")
                left, at = left[got:], at + got

    def close(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class Copier:
    """``folder``: on disk, for what fits nowhere else; None: there is none. ``host``: free host memory in bytes."""

    def __init__(self, folder: Path | None = None, host: Callable[[], int] = available) -> None:
        self._folder = folder
        self._host = host

    def room(self, device: Device) -> Room:
        """What copies may take now."""
        free = device.free_bytes()
        disk = 0
        if self._folder is not None:
            with contextlib.suppress(OSError):
                status = os.statvfs(self._folder)
                disk = status.f_bavail * status.f_frsize - _DISK_SPARE
        host = min(HOST_MOST, self._host() - SPARE)
        return Room(*(size // CHUNK for size in (free - min(_DEVICE_SPARE, free // 8), host, disk)))

    def copy(self, device: Device, chunks: Sequence[ChangedChunk]) -> Iterator[Copy]:
        """Copies of all ``chunks``, the caller's to close. Raises `NoCapacity`, `DeviceFailed`."""
        left, room = list(chunks), self.room(device)
        while left:
            counts = place(len(left), room)
            part = left[: min(counts.device, _DEVICE_PIECE // CHUNK) or min(counts.host, _HOST_PIECE // CHUNK) or None]
            try:
                if counts.device:
                    copy: Copy = _on_device(device, part)
                    room = room._replace(device=room.device - len(part))
                elif counts.host:
                    copy = InHost(device, part)
                    room = room._replace(host=room.host - len(part))
                else:
                    assert self._folder is not None
                    log.info("device memory is copied to disk", bytes=len(part) * CHUNK, folder=str(self._folder))
                    copy = OnDisk(device, part, self._folder)
            except NoCapacity as error:  # a neighbour was faster
                log.info("less room for copies than there was", error=error.message)
                room = Room(0, 0 if not counts.device else room.host, room.disk if counts.device or counts.host else 0)
                continue
            yield copy
            del left[: len(part)]
        device.wait()


def _on_device(device: Device, chunks: Sequence[ChangedChunk]) -> Copy:
    region = device.scratch(len(chunks) * CHUNK)
    try:
        device.gather([chunk.address for chunk in chunks], region)
    except BaseException:
        device.close(region)
        raise
    return OnDevice(device, in_region(region, [chunk.name for chunk in chunks]), [region])


def in_region(region: Region, names: Sequence[bytes]) -> list[ChangedChunk]:
    """Chunks of these names, one after the other from the region's beginning."""
    return [ChangedChunk(name, region.address + number * CHUNK) for number, name in enumerate(names)]


def joined(addresses: Sequence[int]) -> list[tuple[int, int, int]]:
    """Pieces ``(offset, address, size)`` that bring chunks at these addresses one behind the other. Pure."""
    pieces: list[tuple[int, int, int]] = []
    for number, address in enumerate(addresses):
        if pieces and address == pieces[-1][1] + pieces[-1][2]:
            offset, first, size = pieces[-1]
            pieces[-1] = (offset, first, size + CHUNK)
        else:
            pieces.append((number * CHUNK, address, CHUNK))
    return pieces
