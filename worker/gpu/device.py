"""What the broker needs of a GPU, apart from CUDA itself: `cuda_device` has the real one, tests have another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

CHUNK: Final = 2 << 20  #: bytes; bulk memory is hashed, compared and stored in pieces of this size


class Region(NamedTuple):
    """Device memory as this process sees it: ``size`` bytes at ``address``, behind the driver's ``handle``."""

    address: int
    size: int
    handle: int


class Slot(NamedTuple):
    """One piece of pinned host memory. ``view`` is as long as the piece; ``busy``: whose turn it is."""

    number: int
    view: memoryview
    busy: threading.Lock


class Device(Protocol):
    """One GPU. Thread-safe; all calls block. Each raises `DeviceFailed` naming the driver's call."""

    index: int

    def warm(self) -> None:
        """Have everything that a checkpoint needs: kernels, the ring, the driver's checkpoint functions."""

    def open(self, descriptor: int, size: int) -> Region:
        """Map the memory behind ``descriptor``, which stays the caller's."""

    def create(self, size: int, *, rdma: bool) -> tuple[Region, int]:
        """New memory, mapped here, and a descriptor of it that the caller owns."""

    def close(self, region: Region) -> None:
        """Unmap; the memory lives on as long as a descriptor or another process has it."""

    def place(self, descriptor: int) -> int:
        """The `index` of the GPU on which the memory behind ``descriptor`` lies."""

    def free_bytes(self) -> int:
        """Device memory that nobody has."""

    def digests(self, regions: Sequence[Region], key: bytes) -> list[bytes]:
        """For each region the 32-byte keyed BLAKE3 digests of its chunks, one after the other."""

    def scratch(self, size: int) -> Region:
        """New memory, mapped here, that nobody else can have. Raises `NoCapacity`."""

    def gather(self, sources: Sequence[int], region: Region) -> None:
        """Copy the chunks at these addresses to ``region``, one after the other."""

    def clear(self, address: int, size: int) -> None:
        """Fill with zeros."""

    def slots(self) -> Sequence[Slot]:
        """The pinned ring of this GPU, which all pods share: see `ring.share_out`."""

    def pin(self, size: int) -> Slot:
        """Pinned host memory beside the ring, to be kept. Raises `NoCapacity`."""

    def unpin(self, slot: Slot) -> None:
        """Give back what `pin` gave."""

    def to_host(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Begin to copy pieces ``(offset in the slot, address, size)`` from the device; they are there after `wait`."""

    def to_device(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Begin to copy pieces ``(offset in the slot, address, size)``; the slot is free again after `wait`."""

    def wait(self) -> None:
        """Until all copies that this thread began are done."""
