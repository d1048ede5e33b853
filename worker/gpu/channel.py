"""One connection with the proxy in one process of a pod: packets with descriptors, commands and their results."""

from __future__ import annotations

import array
import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from moorage.errors import CorruptData, Unavailable
from moorage.worker.gpu import wire

log = structlog.get_logger(__name__)

_CREDENTIALS = struct.Struct("iII")
_DESCRIPTORS = socket.CMSG_SPACE(array.array("i").itemsize)


class Channel:
    """``on_packet`` gets everything that is no result, with the packet's descriptor (its own now) or -1."""

    def __init__(self, connection: socket.socket, on_packet: Callable[[wire.Packet, int], Awaitable[None]]) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._on_packet = on_packet
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.Outcome]] = {}
        self._sending = asyncio.Lock()
        #: The process's pid as this process's namespace numbers it.
        self.pid: int = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )[0]
        self.closed = asyncio.Event()

    async def run(self) -> None:
        """Receive until the other side closes; then every command that waits fails."""
        try:
            while True:
                data, descriptor = await self._receive()
                if not data:
                    return
                packet = wire.unpack(data)
                if packet.type == wire.Type.RESULT:
                    self._result(packet, descriptor)
                else:
                    await self._on_packet(packet, descriptor)
        except (OSError, CorruptData) as error:
            log.info("a connection of a CUDA proxy broke", pid=self.pid, error=str(error))
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection. Calling it again does nothing."""
        if self.closed.is_set():
            return
        self.closed.set()
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Unavailable(f"process {self.pid} closed its connection to the GPU broker"))
        self._waiting.clear()

    async def command(
        self, kind: wire.Type, body: bytes = b"", *, seconds: float, descriptor: int = -1
    ) -> wire.Outcome:
        """Send a command and wait for its result. Raises `Unavailable` when none comes in ``seconds``."""
        if self.closed.is_set():
            raise Unavailable(f"process {self.pid} has no connection to the GPU broker")
        request = next(self._requests)
        future: asyncio.Future[wire.Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        try:
            async with asyncio.timeout(seconds):
                await self.send(kind, request, body, descriptor=descriptor)
                return await future
        except TimeoutError:
            raise Unavailable(f"process {self.pid} did not answer {kind.name} in {seconds:.1f} s") from None
        finally:
            self._waiting.pop(request, None)

    async def send(self, kind: wire.Type, request: int, body: bytes = b"", *, descriptor: int = -1) -> None:
        """Send one packet. Raises `Unavailable` when the connection is gone."""
        data = wire.pack(kind, request, body)
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        async with self._sending:
            while not self.closed.is_set():
                try:
                    self._socket.sendmsg([data], extra)
                    return
                except BlockingIOError:
                    await self._writable()
                except OSError as error:
                    raise Unavailable(f"process {self.pid} is gone: {error.strerror}") from None
        raise Unavailable(f"process {self.pid} has no connection to the GPU broker")

    def _result(self, packet: wire.Packet, descriptor: int) -> None:
        if descriptor >= 0:
            os.close(descriptor)
        future = self._waiting.pop(packet.request, None)
        if future is not None and not future.done():
            future.set_result(wire.outcome(packet.body))

    async def _receive(self) -> tuple[bytes, int]:
        while True:
            try:
                data, extra, _, _ = self._socket.recvmsg(wire.PACKET_MAX, _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                await self._readable()
                continue
            descriptor = -1
            for level, kind, content in extra:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    descriptor = array.array("i", content[:4])[0]
            return data, descriptor

    async def _readable(self) -> None:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        loop.add_reader(self._socket.fileno(), _wake, future)
        closing = asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait({future, closing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            if not self.closed.is_set():
                loop.remove_reader(self._socket.fileno())
        if self.closed.is_set():
            raise ConnectionError("closed")

    async def _writable(self) -> None:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        loop.add_writer(self._socket.fileno(), _wake, future)
        try:
            await future
        finally:
            with contextlib.suppress(ValueError, OSError):
                loop.remove_writer(self._socket.fileno())


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def listen(path: Path) -> socket.socket:
    """A listening SOCK_SEQPACKET socket at ``path``, bound anew: processes that left the old one come back."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listening.bind(str(path))
    listening.listen(128)
    listening.setblocking(False)
    return listening
