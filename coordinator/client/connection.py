"""Calls to whichever coordinator leads, across its death and succession.

Mutations carry a request id, and the coordinator answers the same id with the first call's result, so every call may be
made again after the connection broke: a caller never has to ask whether a lost call took effect.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from moorage import rpc
from moorage.config import ClientConfig
from moorage.errors import Unavailable
from moorage.v1 import coordinator_pb2_grpc


class Connection:
    """A channel to the first coordinator that answers; moves to the next when one is unavailable.

    ``patience`` is how many seconds a call keeps trying before it raises `Unavailable`.
    """

    def __init__(self, config: ClientConfig, *, patience: float = 30.0) -> None:
        self._targets = config.coordinators
        self._tls = config.tls
        self._patience = patience
        self._current = 0
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    def _connected(self) -> Any:
        if self._stub is None:
            self._channel = rpc.aio_channel(self._targets[self._current], self._tls)
            self._stub = coordinator_pb2_grpc.CoordinatorAsyncStub(self._channel)
        return self._stub

    @property
    def what(self) -> str:
        return f"coordinator {', '.join(self._targets)}"

    async def _next(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        self._current = (self._current + 1) % len(self._targets)
        if channel is not None:
            await channel.close(None)

    async def close(self) -> None:
        """Close the channel. A later call opens a new one."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    async def call(self, method: str, request: Any, *, timeout: float = 60.0) -> Any:
        """One unary call, made again while no coordinator answers. Raises what the coordinator raised."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        pause = 0.1
        while True:
            try:
                return await rpc.unary(getattr(self._connected(), method), request, what=self.what, timeout=timeout)
            except Unavailable:
                if loop.time() + pause > give_up:
                    raise
                await self._next()
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)

    async def stream(self, method: str, request: Callable[[], Any]) -> AsyncIterator[Any]:
        """A stream of replies, opened again when it broke: ``request()`` is asked anew each time.

        Ends when the server ends it. The caller must tolerate a repeated first reply.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        pause = 0.1
        while True:
            call = getattr(self._connected(), method)(request(), metadata=rpc.metadata())
            try:
                async for reply in call:
                    give_up, pause = loop.time() + self._patience, 0.1
                    yield reply
                return
            except grpc.aio.AioRpcError as error:
                translated = rpc.translate(error, self.what)
                if not isinstance(translated, Unavailable) or loop.time() + pause > give_up:
                    raise translated from error
                await self._next()
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
            finally:
                call.cancel()

    def open(self, method: str, requests: AsyncIterator[Any]) -> Any:
        """A bidirectional stream on the current channel; not repeated when it breaks."""
        return getattr(self._connected(), method)(requests, metadata=rpc.metadata())


def request_id() -> str:
    """A fresh id for one mutation."""
    return uuid.uuid4().hex
