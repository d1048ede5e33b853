"""The worker's side of a guard: start one, connect to one, give it orders, hear its events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import structlog

from moorage import failpoints
from moorage.errors import MoorageError, Unavailable, by_name
from moorage.worker.guard import messages as m
from moorage.worker.guard.files import guard_alive, write_private
from moorage.worker.guard.wire import pack, unpack

__all__ = ["GuardClient", "guard_alive"]

log = structlog.get_logger(__name__)

failpoints.declare("guard.spawn.before", "guard.spawn.after")

_incoming = msgspec.msgpack.Decoder(m.Answer | m.GuardEvent)
_SPAWN_SECONDS = 30.0


class GuardClient:
    """A connection to the guard of the pod in ``folder``.

    Every operation raises what the guard raised, or `Unavailable` when the guard died or does not answer; the
    operation's outcome is then unknown: connect again (or `spawn` a new guard, which adopts the pod) and look at
    `status`. All operations are idempotent.
    """

    def __init__(self, folder: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.folder = folder
        self._reader = reader
        self._writer = writer
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[m.Answer]] = {}
        self._listener = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls, folder: Path, config: m.GuardConfig) -> GuardClient:
        """Write ``config`` and start a guard, which adopts the folder's pod if there is one; or connect to the guard
        that already serves it. Raises `MoorageError` with the guard's own words when it cannot start."""
        end = time.monotonic() + _SPAWN_SECONDS
        while True:
            try:
                if not guard_alive(folder):
                    await cls._start(folder, config)
                client = await cls.connect(folder)
                try:
                    await client.status()  # one that is just dying, or still adopting the pod, does not answer
                    return client
                except MoorageError:
                    await client.close()
                    raise
            except Unavailable:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(0.05)

    @staticmethod
    async def _start(folder: Path, config: m.GuardConfig) -> None:
        await failpoints.hit("guard.spawn.before")
        await asyncio.to_thread(write_private, folder / m.CONFIG_FILE, msgspec.json.encode(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "moorage.worker.guard", "--folder", str(folder),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            start_new_session=True, cwd="/",
        )  # fmt: skip
        try:
            _, errors = await asyncio.wait_for(process.communicate(), _SPAWN_SECONDS)
        except TimeoutError:
            process.kill()
            raise Unavailable(f"the guard of {folder} did not start in {_SPAWN_SECONDS:.0f} s") from None
        if process.returncode and not guard_alive(folder):  # else another caller was faster
            lines = errors.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            raise MoorageError(f"the guard of {folder} cannot start: {lines[-1]}", f"see {folder / m.LOG_FILE}")
        await failpoints.hit("guard.spawn.after")

    @classmethod
    async def connect(cls, folder: Path) -> GuardClient:
        """Connect to a running guard. Raises `Unavailable` when none serves the folder."""
        try:
            reader, writer = await open_socket(folder / m.SOCKET_FILE)
        except OSError as error:
            raise Unavailable(f"no guard serves {folder}: {error.strerror or error}") from error
        return cls(folder, reader, writer)

    async def close(self) -> None:
        """Close the connection; the guard lives on."""
        self._listener.cancel()
        self._writer.close()
        # Not awaited itself: a caller that is cancelled just now must not mistake that for the listener's end.
        await asyncio.wait({self._listener})
        if not self._listener.cancelled() and (error := self._listener.exception()):
            log.info("the guard's connection broke", folder=str(self.folder), error=str(error))
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> GuardClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> m.Done:
        """Run the bundle. Idempotent while the container exists."""
        return await self._call(m.Start())

    async def restore(self, images: Path, *, work: Path) -> m.Done:
        """Restore from CRIU images; the pod stays frozen until `thaw`. Timings: ``restore``."""
        return await self._call(m.Restore(str(images), str(work)))

    async def freeze(self, reason: str) -> m.Done:
        """Freeze; returns when every process of the pod stands still."""
        return await self._call(m.Freeze(reason))

    async def thaw(self, reason: str) -> m.Done:
        """Let the pod run on. While it is fenced it stays frozen until the guard has confirmed its incarnation."""
        return await self._call(m.Thaw(reason))

    async def drain(self) -> m.Done:
        """Empty the frozen pod's pipe into the journal; ``status.journal_end`` is then the end that belongs to the
        frozen memory. Raises `Conflict` when the pod is not frozen."""
        return await self._call(m.Drain())

    async def checkpoint(self, images: Path, *, work: Path, leave_running: bool = True) -> m.Done:
        """CRIU dump of the frozen pod into ``images`` (created, 0700). With ``leave_running`` the pod lives on, frozen.

        Raises `Refused`, naming process and descriptor, for what CRIU cannot save, and `Conflict` when the pod is
        not frozen. Timings: ``checkpoint``.
        """
        return await self._call(m.Checkpoint(str(images), str(work), leave_running))

    async def kill(self, grace: float = 0.0, *, reason: str = "ordered by the worker") -> m.Done:
        """End the pod; returns when no process of it is left. Works on a frozen pod without letting it run."""
        return await self._call(m.Kill(grace, reason))

    async def deadline(self, deadline: float) -> None:
        """Move the local deadline (CLOCK_BOOTTIME seconds). Earlier ones than the current are ignored."""
        await self._call(m.Deadline(deadline))

    async def status(self) -> m.GuardStatus:
        """The pod as the guard sees it now."""
        return (await self._call(m.Status())).status

    async def exit(self) -> None:
        """End the guard. Raises `Conflict` while the pod has a process."""
        await self._call(m.Exit())

    async def events(self) -> AsyncIterator[m.GuardEvent]:
        """All events from now on, over a connection of its own; the first has kind ``status``. ``output`` events are
        merged while the reader is busy. Ends when the guard ends; raises `Unavailable` when it cannot be reached."""
        try:
            reader, writer = await open_socket(self.folder / m.SOCKET_FILE)
        except OSError as error:
            raise Unavailable(f"no guard serves {self.folder}: {error.strerror or error}") from error
        try:
            writer.write(pack(m.Call(id=0, request=m.Subscribe())))
            while (body := await unpack(reader)) is not None:
                message = _incoming.decode(body)
                if isinstance(message, m.GuardEvent):
                    yield message
        finally:
            writer.close()

    async def _call(self, request: m.Request) -> m.Done:
        if self._listener.done():
            raise Unavailable(f"the guard of {self.folder} is gone")
        number = next(self._ids)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(pack(m.Call(id=number, request=request)))
            answer = await waiting
        finally:
            del self._waiting[number]
        if answer.error is not None:
            raise by_name(answer.error.kind)(answer.error.message, answer.error.hint)
        assert answer.status is not None
        return m.Done(status=answer.status, timings=answer.timings, image_bytes=answer.image_bytes)

    async def _listen(self) -> None:
        try:
            while (body := await unpack(self._reader)) is not None:
                message = _incoming.decode(body)
                if isinstance(message, m.Answer) and (waiting := self._waiting.get(message.id)) and not waiting.done():
                    waiting.set_result(message)
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unavailable(f"the guard of {self.folder} died while it was asked"))


async def open_socket(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a unix socket whatever the length of its path (``sun_path`` holds 107 bytes). Raises `OSError`."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
