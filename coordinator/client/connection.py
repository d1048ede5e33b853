"""Calls to whichever coordinator leads, across its death and succession.

Mutations carry a request id, and the coordinator answers the same id with the first call's result, so every call may be
made again after the connection broke: a caller never has to ask whether a lost call took effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from moorage import dialing, rpc
from moorage.config import ClientConfig
from moorage.errors import Unavailable
from moorage.v1 import coordinator_pb2_grpc

#: Seconds without an answer after which somebody who waits wants to know why.
TOLD_AFTER = 3.0


class _Line:
    """A channel and how many calls are under way on it: one call's move to another coordinator must not end others."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = coordinator_pb2_grpc.CoordinatorAsyncStub(channel)
        self.users = 0


class Connection:
    """A channel to the first coordinator that answers; moves to the next when one is unavailable.

    ``patience`` is how many seconds a call keeps trying before it raises `Unavailable`. ``on_silence`` is told once a
    call, in a sentence, when that takes more than `TOLD_AFTER` seconds.
    """

    def __init__(
        self, config: ClientConfig, *, patience: float = 30.0, on_silence: Callable[[str], None] | None = None
    ) -> None:
        self._targets = config.coordinators
        self._tls = config.tls
        self._patience = patience
        self._on_silence = on_silence
        self._current = 0
        self._line: _Line | None = None
        self._stamp: object = None

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncIterator[_Line]:
        """The present channel, which stays open within the block whatever others do with the connection."""
        stamp = self._tls.stamp()
        if self._line is not None and not self._line.users and stamp != self._stamp:
            await self.close()  # the certificate was replaced
        line = self._line or await self._dial(stamp)
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            if not line.users and line is not self._line:
                await line.channel.close(None)

    async def _dial(self, stamp: object) -> _Line:
        """The line to the present coordinator, or the one that another call has made meanwhile. Raises `Unavailable`;
        then the next call tries the next coordinator."""
        tried = self._current
        try:
            channel = await dialing.coordinator_channel(self._targets[tried], self._tls)
        except Unavailable:
            if self._line is None and self._current == tried:
                self._current = (tried + 1) % len(self._targets)
            raise
        if self._line is not None:
            await channel.close(None)
            return self._line
        self._stamp, self._line = stamp, _Line(channel)
        return self._line

    @property
    def patience(self) -> float:
        return self._patience

    def _wait(self, left: float) -> bool:
        """Whether it was told that nobody answers: only when that has taken a while and ``left`` seconds remain."""
        if self._on_silence is None or self._patience - left < TOLD_AFTER or left < 1:
            return False
        self._on_silence(f"{self.what} does not answer; trying for {left:.0f} s more")
        return True

    @property
    def what(self) -> str:
        return f"coordinator {', '.join(self._targets)}"

    def _next(self, failed: _Line) -> None:
        """Go to the next coordinator, unless another call has done so. Calls on the old channel end by themselves."""
        if self._line is failed:
            self._line = None
            self._current = (self._current + 1) % len(self._targets)

    async def close(self) -> None:
        """Close the channel. A later call opens a new one."""
        line, self._line = self._line, None
        if line is not None:
            await line.channel.close(None)

    async def call(self, method: str, request: Any, *, timeout: float = 60.0) -> Any:
        """One unary call, made again while no coordinator answers. Raises what the coordinator raised."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        pause, told = 0.1, False
        while True:
            try:
                async with self._in_use() as line:
                    try:
                        return await rpc.unary(getattr(line.stub, method), request, what=self.what, timeout=timeout)
                    except Unavailable:
                        self._next(line)
                        raise
            except Unavailable:
                if loop.time() + pause > give_up:
                    raise
                told = told or self._wait(give_up - loop.time())
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def stream(self, method: str, request: Callable[[], Any]) -> AsyncIterator[Any]:
        """A stream of replies, opened again when it broke: ``request()`` is asked anew each time.

        Ends when the server ends it. The caller must tolerate a repeated first reply.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        pause, told = 0.1, False
        while True:
            try:
                async with self._in_use() as line:
                    call = getattr(line.stub, method)(request(), metadata=rpc.metadata())
                    try:
                        async for reply in call:
                            give_up, pause, told = loop.time() + self._patience, 0.1, False
                            yield reply
                        return
                    except grpc.aio.AioRpcError as error:
                        translated = rpc.translate(error, self.what)
                        if isinstance(translated, Unavailable):
                            self._next(line)
                        raise translated from error
                    finally:
                        call.cancel()
            except Unavailable:
                if loop.time() + pause > give_up:
                    raise
                told = told or self._wait(give_up - loop.time())
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    @contextlib.asynccontextmanager
    async def open(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """A bidirectional stream on the present channel; not repeated when it breaks."""
        async with self._in_use() as line:
            call = getattr(line.stub, method)(requests, metadata=rpc.metadata())
            try:
                yield call
            finally:
                call.cancel()


def request_id() -> str:
    """A fresh id for one mutation."""
    return uuid.uuid4().hex
