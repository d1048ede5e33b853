"""A GPU made of host memory, a driver that saves nothing, and a process that speaks as the libcuda proxy does."""

from __future__ import annotations

import array
import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from moorage.errors import DeviceFailed, NoCapacity
from moorage.worker.gpu import wire
from moorage.worker.gpu.device import CHUNK, Region, Slot
from moorage.worker.gpu.wire import Type

_HELLO = struct.Struct("<QQIIIIQ16s")
_MEMORY = struct.Struct("<QQQQQII")
_OUTCOME = struct.Struct("<iIQ")


class FakeDevice:
    """See `moorage.worker.gpu.device.Device`. ``room`` in bytes; memory behind a descriptor is a memfd."""

    def __init__(self, index: int = 0, room: int = 1 << 30) -> None:
        self.index = index
        self.room = room
        self.pinned = 0
        self.broken = ""  # the step that fails
        self.grain = 0  # the size of the largest scratch memory that was asked for
        self._maps: dict[int, mmap.mmap] = {}
        self._made: dict[int, int] = {}  # bytes of what was made here, by address
        self._next = 0x7F0000000000
        self._copies = threading.local()
        self._slots = [Slot(number, memoryview(bytearray(4 * CHUNK)), threading.Lock()) for number in range(4)]

    def _map(self, descriptor: int, size: int) -> Region:
        address, self._next = self._next, self._next + size + CHUNK
        self._maps[address] = mmap.mmap(descriptor, size)
        return Region(address, size, address)

    def _at(self, address: int) -> tuple[mmap.mmap, int]:
        for base, mapped in self._maps.items():
            if base <= address < base + len(mapped):
                return mapped, address - base
        raise DeviceFailed(f"no memory at {address:#x}")

    def _may(self, step: str) -> None:
        if self.broken == step:
            raise DeviceFailed(f"GPU {self.index}: {step} answered CUDA_ERROR_UNKNOWN")

    def warm(self) -> None:
        self._may("warm")

    def open(self, descriptor: int, size: int) -> Region:
        self._may("open")
        return self._map(descriptor, size)

    def place(self, descriptor: int) -> int:
        name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        return int(name.removeprefix("/memfd:device-memory-").split()[0])

    def create(self, size: int, *, rdma: bool) -> tuple[Region, int]:
        self._may("create")
        if size > self.free_bytes():
            raise NoCapacity(f"GPU {self.index} has too little free memory")
        descriptor = memory(bytes([0xEE]) * size, self.index)  # not zeros: what is restored must be written
        region = self._map(descriptor, size)
        self._made[region.address] = size
        return region, descriptor

    def close(self, region: Region) -> None:
        self._made.pop(region.address, None)
        self._maps.pop(region.address).close()

    def free_bytes(self) -> int:
        return self.room - sum(self._made.values())

    def digests(self, regions: Sequence[Region], key: bytes) -> list[bytes]:
        self._may("digests")
        found = []
        for region in regions:
            mapped, _ = self._at(region.address)
            parts = (mapped[at : at + CHUNK] for at in range(0, region.size, CHUNK))
            found.append(b"".join(blake3(part, key=key).digest() for part in parts))
        return found

    def scratch(self, size: int) -> Region:
        self._may("scratch")
        if size > self.free_bytes():
            raise NoCapacity(f"GPU {self.index} has too little free memory")
        descriptor = os.memfd_create("scratch", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        region = self._map(descriptor, size)
        os.close(descriptor)
        self._made[region.address] = size
        self.grain = max(self.grain, size)
        return region

    def gather(self, sources: Sequence[int], region: Region) -> None:
        self._may("gather")
        mapped, at = self._at(region.address)
        for number, source in enumerate(sources):
            mapped[at + number * CHUNK : at + (number + 1) * CHUNK] = self._read(source, CHUNK)

    def clear(self, address: int, size: int) -> None:
        mapped, at = self._at(address)
        mapped[at : at + size] = bytes(size)

    def slots(self) -> Sequence[Slot]:
        return self._slots

    def pin(self, size: int) -> Slot:
        self._may("pin")
        self.pinned += size
        return Slot(-1, memoryview(bytearray(size)), threading.Lock())

    def unpin(self, slot: Slot) -> None:
        self.pinned -= len(slot.view)

    def to_host(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._may("to_host")
        for offset, _, size in pieces:
            slot.view[offset : offset + size] = bytes([0xDD]) * size  # nobody may take it before `wait`

        def copy() -> None:
            for offset, address, size in pieces:
                slot.view[offset : offset + size] = self._read(address, size)

        self._begun(copy)

    def to_device(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._may("to_device")

        def copy() -> None:
            for offset, address, size in pieces:
                mapped, at = self._at(address)
                mapped[at : at + size] = slot.view[offset : offset + size]

        self._begun(copy)

    def _begun(self, copy: Callable[[], None]) -> None:
        self._copies.__dict__.setdefault("begun", []).append(copy)

    def wait(self) -> None:
        begun, self._copies.begun = self._copies.__dict__.get("begun", []), []
        for copy in begun:
            copy()

    def _read(self, address: int, size: int) -> bytes:
        mapped, at = self._at(address)
        return mapped[at : at + size]

    @property
    def mapped(self) -> int:
        """How many regions are open: none may stay."""
        return len(self._maps)


def memory(data: bytes, device: int = 0) -> int:
    """A descriptor of memory on a device that holds ``data``."""
    descriptor = os.memfd_create(f"device-memory-{device}", os.MFD_CLOEXEC)
    os.write(descriptor, data)
    return descriptor


def content(descriptor: int) -> bytes:
    """All that is behind a descriptor."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


class FakeDriver:
    """The driver's part of a process: only its state."""

    states: ClassVar[dict[int, str]] = {}

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def state(self) -> str:
        return self.states.get(self.pid, "running")

    def lock(self, seconds: float) -> None:
        self.states[self.pid] = "locked"

    def checkpoint(self) -> None:
        assert self.state == "locked"
        self.states[self.pid] = "checkpointed"

    def restore(self, mapping: dict[str, str] | None = None) -> None:
        if self.state == "checkpointed":
            self.states[self.pid] = "locked"

    def unlock(self) -> None:
        if self.state == "locked":
            self.states[self.pid] = "running"


class FakeProcess:
    """A process of a job: blocks with bytes, and the proxy's side of the channel. ``blocks``: number to descriptor."""

    def __init__(self, path: Path, blocks: dict[int, int], number: int = 0) -> None:
        self.path = path
        self.number = number or secrets.randbits(63)
        self.blocks = dict(blocks)
        self.sizes = {block: os.fstat(descriptor).st_size for block, descriptor in blocks.items()}
        self.level = 0
        self.evicted = False
        self.refuses = 0  # the status that the next Quiesce is answered with
        self.adopted: dict[int, int] = {}
        self._left: tuple[int, int] | None = None
        self.task = asyncio.create_task(self._run())

    def restored(self, path: Path) -> FakeProcess:
        """The same process as CRIU brings it back: without memory, waiting for a broker."""
        other = FakeProcess(path, {}, self.number)
        other.sizes, other.level, other.evicted = dict(self.sizes), 3, True
        return other

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                status = self.path.stat()
                if self._left != (status.st_ino, status.st_ctime_ns):
                    await self._serve()
            await asyncio.sleep(0.005)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.setblocking(False)
            await loop.sock_connect(line, str(self.path))
            size = sum(self.sizes.values())
            hello = _HELLO.pack(self.number, 0, 77, self.level, self.evicted, len(self.sizes), size, b"fake")
            line.send(wire.pack(Type.HELLO, 0, hello))
            for block, length in self.sizes.items():
                self._tell(line, block, length)
            while True:
                data, extra, _, _ = await self._receive(line)
                if not data:
                    raise EOFError
                descriptor = array.array("i", extra[0][2])[0] if extra else -1
                if self._obey(line, wire.unpack(data), descriptor):
                    return

    def _tell(self, line: socket.socket, block: int, length: int) -> None:
        held = self.blocks.get(block, -1)
        body = _MEMORY.pack(block, length, 0x10_0000 * block, self.number, block, 0, 1 if held >= 0 else 0)
        self._send(line, wire.pack(Type.MEMORY, 0, body), held)

    @staticmethod
    async def _receive(line: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        while True:
            with contextlib.suppress(BlockingIOError):
                return line.recvmsg(wire.PACKET_MAX, socket.CMSG_SPACE(4))
            await asyncio.sleep(0.001)

    @staticmethod
    def _send(line: socket.socket, data: bytes, descriptor: int = -1) -> None:
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        line.sendmsg([data], extra)

    def _obey(self, line: socket.socket, packet: wire.Packet, descriptor: int) -> bool:
        """True: the process leaves the connection."""
        status, text, leaves = 0, b"", False
        match packet.type:
            case Type.QUIESCE:
                status, self.refuses = self.refuses, 0
                text = b"thread 7 (fake) is in cuMemcpyDtoH_v2" if status else b""
                self.level = 0 if status else 3
            case Type.EVICT:
                for held in self.blocks.values():
                    os.close(held)
                self.blocks.clear()
                self.evicted = leaves = True
                found = self.path.stat()
                self._left = found.st_ino, found.st_ctime_ns
            case Type.ADOPT:
                self.adopted[wire.block(packet.body).id] = descriptor
            case Type.MAP:
                status = 0 if self.adopted.keys() == self.sizes.keys() else wire.INCOMPLETE
                if not status:
                    self.blocks, self.adopted, self.evicted = dict(self.adopted), {}, False
            case Type.RESUME:
                self.level = 0
            case Type.STATUS:
                text = b'{"refusals": []}'
            case _:
                return False
        size = sum(self.sizes.values())
        self._send(line, wire.pack(Type.RESULT, packet.request, _OUTCOME.pack(status, len(self.sizes), size) + text))
        return leaves
