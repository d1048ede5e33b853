"""One process of a pod that uses CUDA, as the broker sees it: its connection, its answers, its driver state."""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from moorage.errors import DeadlineExceeded, DeviceFailed
from moorage.worker.gpu import wire
from moorage.worker.gpu.channel import Channel
from moorage.worker.gpu.wire import BlockName, Type

_ANSWER_SECONDS = 60.0
STATUS_SECONDS = 10.0  # of a process that is running, before anything is touched
_SYS_KCMP = 312
_KCMP_FILE = 0


class Asked(NamedTuple):
    """A request of a process: its type and number, the block it names, the descriptor that came with it or -1."""

    type: int
    request: int
    block: BlockName
    descriptor: int


class CudaProcess:
    """``number`` is the proxy's own, which survives checkpoints. ``pid`` is the host's, of the newest connection."""

    def __init__(self, channel: Channel, hello: wire.Hello) -> None:
        self.number = hello.process
        self.name = hello.name
        self.pod_pid = hello.pid
        self.connect(channel, hello)

    def connect(self, channel: Channel, hello: wire.Hello) -> None:
        """A new connection of the process; what it has is told again."""
        self.channel = channel
        self.pid = channel.pid
        self.evicted = hello.evicted
        self.sealed = hello.level == 3
        self.expected = hello.blocks
        self.told: set[int] = set()

    def __str__(self) -> str:
        return f"process {self.pod_pid} ({self.name})"

    @property
    def connected(self) -> bool:
        return not self.channel.closed.is_set()

    def alive(self) -> bool:
        """Whether the host still has the process."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def resident(self) -> int:
        """Bytes of host memory that the process has; 0 when it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            return 0

    async def quiesce(self, seconds: float) -> None:
        """Until no thread submits work and the device is done. Raises `DeadlineExceeded` with who is in the way."""
        body = wire.pack_number(max(1, round(seconds * 1000)))
        found = await self.channel.command(Type.QUIESCE, body, seconds=seconds + _ANSWER_SECONDS)
        if found.status == wire.DEADLINE:
            raise DeadlineExceeded(f"{self}: the GPU did not come to rest in {seconds:.1f} s: {found.text}")
        self._check("QUIESCE", found)
        self.sealed = True

    async def evict(self) -> int:
        """Unmap all bulk memory; the connection ends. Returns its bytes."""
        found = await self.channel.command(Type.EVICT, seconds=_ANSWER_SECONDS)
        self._check("EVICT", found)
        self.evicted = True
        await asyncio.wait_for(self.channel.closed.wait(), _ANSWER_SECONDS)
        return found.bytes

    async def adopt(self, block: int, descriptor: int) -> None:
        """Give the process the memory of one of its blocks."""
        body = wire.pack_block(BlockName(self.number, block))
        self._check("ADOPT", await self._command(Type.ADOPT, body, descriptor))

    async def map(self) -> None:
        """Map what was adopted."""
        self._check("MAP", await self._command(Type.MAP))
        self.evicted = False

    async def resume(self) -> None:
        """Open the gate. Nothing happens when it is open."""
        self._check("RESUME", await self._command(Type.RESUME))
        self.sealed = False

    async def status(self) -> str:
        """What the proxy says of itself, as JSON."""
        return (await self.channel.command(Type.STATUS, seconds=STATUS_SECONDS)).text

    async def _command(self, kind: Type, body: bytes = b"", descriptor: int = -1) -> wire.Outcome:
        return await self.channel.command(kind, body, seconds=_ANSWER_SECONDS, descriptor=descriptor)

    def _check(self, what: str, found: wire.Outcome) -> None:
        if found.status:
            raise DeviceFailed(f"{self}: {what} failed with {found.status}{': ' + found.text if found.text else ''}")


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors of this process stand for the same open file."""
    own = os.getpid()
    return bool(ctypes.CDLL(None).syscall(_SYS_KCMP, own, own, _KCMP_FILE, one, other) == 0)
