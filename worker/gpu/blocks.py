"""What the broker knows of a pod's device memory, and what follows from it. Pure but for closing descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from moorage.errors import CorruptData
from moorage.worker.gpu.device import CHUNK
from moorage.worker.gpu.wire import BlockFlag, BlockName, Memory

DIGEST = 32


@dataclass
class Block:
    """One allocation. ``descriptors``: every one that stands for it; the first is the one that is handed out.

    ``names``: the digests of its chunks when it was captured last, 32 bytes each; empty before that. ``placed``: its
    device is known to be the pod's, by index; before that it is what its process calls it.
    """

    about: Memory
    descriptors: list[int] = field(default_factory=list)
    names: bytes = b""
    placed: bool = False

    def retold(self, about: Memory) -> None:
        """The process tells about it again."""
        self.about = about._replace(device=self.about.device) if self.placed else about

    def place(self, device: int) -> None:
        """It lies on the pod's GPU of this index."""
        self.about, self.placed = self.about._replace(device=device), True

    def close(self) -> None:
        """Give the memory back, unless a process still has it."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class SavedBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block as a pod manifest holds it; its bytes are the content ``content_name``, unless it is another's."""

    process: int
    id: int
    size: int
    address: int
    owner: int
    owner_id: int
    device: int
    flags: int

    @property
    def own(self) -> bool:
        """Its bytes are saved with it, not with the block of another process."""
        return (self.process, self.id) == (self.owner, self.owner_id)

    @property
    def content_name(self) -> str:
        return f"{self.process:016x}/{self.id}"


class SavedProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process that uses CUDA, as a pod manifest holds it."""

    process: int
    pid: int  # inside the pod
    name: str


class KnownProcess(msgspec.Struct, frozen=True, array_like=True):
    """A process of the pod. ``host_pid`` 0: it is being restored."""

    process: int
    pid: int  # inside the pod
    host_pid: int
    name: str


class SavedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """All device memory of one pod."""

    processes: list[SavedProcess] = []
    blocks: list[SavedBlock] = []
    devices: list[str] = []  # UUIDs by the index that the blocks speak of
    driver_bytes: int = 0  # what the driver put into the processes' own memory: contexts, graphs, small allocations
    #: Bytes of the blocks: written with this checkpoint, in the store from earlier ones, zeros or there twice.
    bytes_new: int = 0
    bytes_shared: int = 0
    bytes_same: int = 0


def saved(process: int, block: Block) -> SavedBlock:
    """The block as it is saved."""
    about = block.about
    return SavedBlock(
        process, about.id, about.size, about.address, about.owner, about.owner_id, about.device, int(about.flags)
    )


def told(block: SavedBlock) -> Memory:
    """The reverse of `saved`: as if the process had just told about it, without a descriptor."""
    flags = BlockFlag(block.flags) & ~BlockFlag.DESCRIPTOR
    return Memory(block.id, block.size, block.address, block.owner, block.owner_id, block.device, flags)


class ChangedChunk(NamedTuple):
    """A chunk whose bytes have to be copied: its digest, and where it lies now."""

    name: bytes
    address: int


def changed(address: int, names: bytes, known: Iterable[bytes] | set[bytes]) -> list[ChangedChunk]:
    """The chunks of a block at ``address`` whose digests are not ``known``, in order."""
    have = known if isinstance(known, set | frozenset | dict) else set(known)
    found = []
    for number in range(len(names) // DIGEST):
        name = names[number * DIGEST : (number + 1) * DIGEST]
        if name not in have:
            found.append(ChangedChunk(name, address + number * CHUNK))
    return found


def owners(blocks: Mapping[BlockName, Block]) -> dict[BlockName, Block]:
    """Those blocks whose bytes are their own. Raises `CorruptData` when the owner or the memory of one is not there."""
    for name, block in blocks.items():
        owner = BlockName(block.about.owner, block.about.owner_id)
        if owner not in blocks:
            raise CorruptData(f"block {name.id} of process {name.process:016x} is one of a process that is not known")
        if not blocks[owner].descriptors:
            raise CorruptData(f"the memory of block {owner.id} of process {owner.process:016x} is not here any more")
    return {name: b for name, b in blocks.items() if name == BlockName(b.about.owner, b.about.owner_id)}
