"""Device memory of parked jobs, kept on the GPU or in pinned host memory, so that a restore need not read the store.

It is a copy of what the store has: it can be dropped at any time, and nothing depends on it. What comes back from it is
compared with the checkpoint's digests on the device, as everything is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import structlog

from moorage.errors import MoorageError, NoCapacity
from moorage.store import Content
from moorage.worker.gpu.blocks import DIGEST, Block
from moorage.worker.gpu.device import CHUNK, Device, Slot
from moorage.worker.gpu.wire import BlockName

log = structlog.get_logger(__name__)

Place = Literal["gpu", "host"]
#: Host memory that stays free beside what is kept, in bytes.
SPARE: Final = 4 << 30


@dataclass
class KeptBlock:
    """One block: its digests, and its bytes behind ``descriptor`` (-1: none) or in ``memory``."""

    names: bytes
    size: int
    device: Device
    descriptor: int = -1
    memory: Slot | None = None

    def close(self) -> None:
        """Give the memory back. Calling it again does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.memory is not None:
            self.device.unpin(self.memory)
            self.memory = None

    def holds(self, content: Content, zero: bytes) -> bool:
        """Whether these are the bytes that ``content`` names. ``zero``: the digest of a chunk of zeros."""
        at = 0
        for chunk in content.chunks:
            count = chunk.length // CHUNK
            expected = chunk.name if chunk.name else zero * count
            if self.names[at * DIGEST : (at + count) * DIGEST] != expected:
                return False
            at += count
        return content.size == self.size and at * DIGEST == len(self.names)


@dataclass
class KeptPod:
    """All that is kept of one pod. ``incarnation``: the one that was parked."""

    place: Place
    incarnation: int
    blocks: dict[BlockName, KeptBlock] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks.values())

    def close(self) -> None:
        for block in self.blocks.values():
            block.close()


def available() -> int:
    """Bytes of host memory that can be taken."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


class Parked:
    """What is kept, by ``job/pod``. Its methods block."""

    def __init__(self, room: Callable[[], int] = available) -> None:
        self._room = room
        self.pods: dict[str, KeptPod] = {}

    def keep(
        self,
        key: str,
        place: Place,
        incarnation: int,
        blocks: Mapping[BlockName, Block],
        device: Callable[[int], Device],
    ) -> bool:
        """Keep these blocks, whose bytes nobody changes any more. False: there was no room, or the device failed."""
        self.drop(key)
        kept = KeptPod(place, incarnation)
        try:
            size = sum(block.about.size for block in blocks.values())
            if place == "host" and size + SPARE > self._room():
                raise NoCapacity(f"{size >> 20} MiB of host memory to keep device memory in")
            for name, block in blocks.items():
                gpu = device(block.about.device)
                one = kept.blocks[name] = KeptBlock(block.names, block.about.size, gpu)
                if place == "gpu":
                    one.descriptor = os.dup(block.descriptors[0])
                else:
                    _to_host(one, block.descriptors[0])
        except (MoorageError, OSError) as error:
            log.warning("device memory is not kept: a restore reads the store", pod=key, error=str(error))
            kept.close()
            return False
        self.pods[key] = kept
        log.info("device memory is kept", pod=key, place=place, bytes=kept.size)
        return True

    def take(self, key: str) -> KeptPod | None:
        """It is the caller's now."""
        return self.pods.pop(key, None)

    def drop(self, key: str) -> None:
        """Give back what is kept under ``key``, if anything."""
        kept = self.pods.pop(key, None)
        if kept is not None:
            kept.close()
            log.info("kept device memory is given back", pod=key, place=kept.place, bytes=kept.size)

    def drop_on_devices(self) -> bool:
        """Give back everything that takes device memory. False: nothing did."""
        keys = [key for key, kept in self.pods.items() if kept.place == "gpu"]
        for key in keys:
            self.drop(key)
        return bool(keys)


def _to_host(one: KeptBlock, descriptor: int) -> None:
    one.memory = one.device.pin(one.size)
    region = one.device.open(descriptor, one.size)
    try:
        one.device.to_host(one.memory, [(0, region.address, one.size)])
    finally:
        one.device.wait()
        one.device.close(region)
