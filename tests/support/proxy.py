"""A TCP proxy on 127.0.0.1 that loses what it is told to lose."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Proxy:
    """``async with Proxy(port) as proxy``: ``proxy.endpoint`` leads to ``127.0.0.1:port``.

    ``lose_requests`` and ``lose_answers`` swallow bytes of one direction, while connections stay up; after either, only
    `cut` leads back to sense. ``requests_lost`` is set once bytes of a client were swallowed.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.lose_requests = False
        self.lose_answers = False
        self.requests_lost = asyncio.Event()
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self._writers.add(writer)
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(up_writer)
            try:
                await asyncio.gather(self._pump(reader, up_writer, True), self._pump(up_reader, writer, False))
            finally:
                up_writer.close()
                self._writers.discard(up_writer)
        except OSError:
            pass
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bool) -> None:
        try:
            while data := await reader.read(1 << 16):
                if request and self.lose_requests:
                    self.requests_lost.set()
                elif request or not self.lose_answers:
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()

    def cut(self) -> None:
        """Reset all connections and lose nothing from now on."""
        self.lose_requests = self.lose_answers = False
        for writer in list(self._writers):
            writer.transport.abort()
