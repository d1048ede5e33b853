"""One connection with the libnccl proxy in one process: frames, commands and their answers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import structlog

from moorage.errors import CorruptData, DeviceFailed, Unavailable
from moorage.nccl_quiesce import wire

log = structlog.get_logger(__name__)

T = TypeVar("T")
Message = wire.FromProcess
_CREDENTIALS = struct.Struct("iII")


class Link:
    """``hello`` is what the process said first; ``host_pid`` is its pid as this process's namespace numbers it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self.closed = asyncio.Event()
        sock: socket.socket = writer.get_extra_info("socket")
        self.host_pid: int = _CREDENTIALS.unpack(
            sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[0]
        #: The number of this end of the connection, by which the kernel's list of sockets names it.
        self.inode = _inode(sock)

    async def receive(self) -> Message:
        """The next message. Raises `CorruptData`, `asyncio.IncompleteReadError` at the end, `OSError`."""
        header = await self._reader.readexactly(wire.HEADER_SIZE)
        return wire.from_process(await self._reader.readexactly(wire.length(header)))

    async def run(self) -> None:
        """Hand answers to those who wait for them until the process ends the connection."""
        try:
            while True:
                answer = await self.receive()
                if isinstance(answer, wire.Hello):
                    raise CorruptData("a process said hello twice")
                future = self._waiting.pop(answer.request, None)
                if future is not None and not future.done():
                    future.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except CorruptData as error:
            log.warning("a connection of an NCCL proxy broke", pid=self.host_pid, error=str(error))
        finally:
            self.close()

    def close(self) -> None:
        """End the connection. Calling it again does nothing."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(f"process {self.host_pid} closed its connection to the worker"))
        self._waiting.clear()

    async def welcome(self, message: wire.Welcome) -> None:
        """The answer to the process's hello."""
        await self._send(message)

    async def command(self, make: Callable[[int], wire.ToProcess], kind: type[T], *, seconds: float) -> T:
        """Send a command and wait for its answer.

        Raises `DeviceFailed` when the process says no, `Unavailable` when it does not answer in ``seconds``.
        """
        request = next(self._requests)
        message = make(request)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        what = type(message).__name__
        try:
            async with asyncio.timeout(seconds):
                await self._send(message)
                answer = await future
        except TimeoutError:
            raise Unavailable(f"process {self.host_pid} did not answer {what} in {seconds:.1f} s") from None
        finally:
            self._waiting.pop(request, None)
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, wire.Failed):
            raise DeviceFailed(f"{what} failed with {answer.status}: {answer.text}")
        raise CorruptData(f"process {self.host_pid} answers {type(answer).__name__} to {what}")

    async def _send(self, message: wire.ToProcess) -> None:
        if self.closed.is_set():
            raise Unavailable(f"process {self.host_pid} has no connection to the worker")
        self._writer.write(wire.pack(message))
        try:
            await self._writer.drain()
        except OSError as error:
            raise Unavailable(f"process {self.host_pid} is gone: {error.strerror}") from None


def _inode(sock: socket.socket) -> int:
    import os

    with contextlib.suppress(OSError):
        return os.fstat(sock.fileno()).st_ino
    return 0
