"""The worker's side of the GPU broker: start it, give it orders."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from pathlib import Path

import msgspec

from moorage import failpoints
from moorage.errors import MoorageError, Unavailable, by_name
from moorage.worker.gpu import messages as m
from moorage.worker.guard.client import open_socket
from moorage.worker.guard.files import guard_alive
from moorage.worker.guard.wire import pack, unpack

failpoints.declare("gpu.spawn.before", "gpu.spawn.after")

_SPAWN_SECONDS = 60.0
PROGRAM = "moorage.worker.gpu"
_answers = msgspec.msgpack.Decoder(m.Answer)


class BrokerClient:
    """The broker of the node whose state folder holds ``folder``; started when it is needed, and again if it died.

    `ask` raises what the broker raised, `Unavailable` when it died meanwhile: what became of the order is then unknown.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ids = itertools.count(1)
        self._lock = asyncio.Lock()
        self._connection: _Connection | None = None

    async def ask(self, request: m.Request, *, start: bool = False) -> m.Answer:
        """Give an order. ``start``: start the broker if there is none."""
        connection = await self._connected(start=start)
        return await connection.ask(m.Call(next(self._ids), request))

    def alive(self) -> bool:
        """Whether there is a broker."""
        return guard_alive(self.folder)

    async def close(self) -> None:
        """Close the connection; the broker lives on."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _connected(self, *, start: bool) -> _Connection:
        async with self._lock:
            if self._connection is not None and not self._connection.lost:
                return self._connection
            if start and not guard_alive(self.folder):
                await self._start()
            try:
                reader, writer = await open_socket(self.folder / m.SOCKET_FILE)
            except OSError as error:
                raise Unavailable(f"the GPU broker does not answer: {error.strerror or error}") from error
            self._connection = _Connection(reader, writer)
            return self._connection

    async def _start(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        await failpoints.hit("gpu.spawn.before")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", PROGRAM, "--folder", str(self.folder),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, cwd="/",
        )  # fmt: skip
        began = time.monotonic()
        try:
            _, errors = await asyncio.wait_for(process.communicate(), _SPAWN_SECONDS)
        except TimeoutError:
            process.kill()
            raise Unavailable(f"the GPU broker did not start in {time.monotonic() - began:.0f} s") from None
        if process.returncode and not guard_alive(self.folder):
            lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            raise MoorageError(f"the GPU broker cannot start: {lines[-1]}", f"see {self.folder / m.LOG_FILE}")
        await failpoints.hit("gpu.spawn.after")


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._waiting: dict[int, asyncio.Future[m.Answer]] = {}
        self._listener = asyncio.create_task(self._listen())

    @property
    def lost(self) -> bool:
        return self._listener.done()

    async def ask(self, call: m.Call) -> m.Answer:
        if self.lost:
            raise Unavailable("the GPU broker is gone")
        waiting: asyncio.Future[m.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[call.id] = waiting
        try:
            self._writer.write(pack(call))
            answer = await waiting
        finally:
            self._waiting.pop(call.id, None)
        if answer.error is not None:
            raise by_name(answer.error.kind)(answer.error.message, answer.error.hint)
        return answer

    async def close(self) -> None:
        self._listener.cancel()
        self._writer.close()
        await asyncio.wait({self._listener})
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _listen(self) -> None:
        try:
            while (body := await unpack(self._reader, limit=m.MESSAGE_MAX)) is not None:
                answer = _answers.decode(body)
                if (waiting := self._waiting.get(answer.id)) and not waiting.done():
                    waiting.set_result(answer)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unavailable("the GPU broker died while it was asked"))
