"""The guard's process: its socket, its events, and the loop that ties pod and fence together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from moorage.errors import Conflict, CorruptData, MoorageError, WireError
from moorage.localsocket import may_control
from moorage.worker.guard import kernel, messages
from moorage.worker.guard.fencing import Etcd, Fencing
from moorage.worker.guard.messages import Answer, Call, EventKind, GuardConfig, GuardEvent
from moorage.worker.guard.pod import Pod
from moorage.worker.guard.wire import pack, unpack

log = structlog.get_logger(__name__)

#: Output events are merged over this time; followers of the journal do not need them.
_OUTPUT_SECONDS = 0.1
#: A listener that lets so many events pile up is dropped.
_EVENTS_MAX = 1000
#: A guard whose pod has ended and whom no worker has asked for so long ends; what it knew is on disk.
_IDLE_SECONDS = 300.0

_calls = msgspec.msgpack.Decoder(Call)


class Server:
    """Serves one pod until told to exit."""

    def __init__(self, folder: Path, config: GuardConfig) -> None:
        self.folder = folder
        self.config = config
        self.pod = Pod(folder, config, self._changed)
        self.fencing: Fencing | None = None
        self._listeners: set[_Listener] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._output_due = False
        self._stop = asyncio.Event()
        self._last_call = kernel.now()

    async def run(self, ready: Callable[[], None]) -> None:
        """Adopt what is there, then serve; ``ready`` is called once the socket answers."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self.pod.container.reap)
        await self.pod.adopt()
        self.fencing = Fencing(
            self.pod, own=self.config.incarnation, deadline=self.config.deadline, ask=Etcd(self.config)
        )
        fencing = asyncio.create_task(self.fencing.run())
        server = await asyncio.start_unix_server(self._accept, sock=listen_private(self.folder, messages.SOCKET_FILE))
        ready()
        idle = asyncio.create_task(self._stop_when_idle())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            # The fence's end would be a bug, and a pod without it must not go on unseen.
            await asyncio.wait({fencing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if fencing.done():
                fencing.result()
        finally:
            server.close()
            for task in (fencing, idle, stopping, *self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self.pod.container.close()

    def _changed(self, kind: EventKind, rank: int) -> None:
        if kind == "ended" and self.fencing is not None:
            self.fencing.poke()
        if kind != "output":
            self._publish(kind, rank)
        elif not self._output_due and self._listeners:
            self._output_due = True
            asyncio.get_running_loop().call_later(_OUTPUT_SECONDS, self._publish, "output", -1)

    def _publish(self, kind: EventKind, rank: int) -> None:
        if kind == "output":
            self._output_due = False
        if not self._listeners:
            return
        data = pack(GuardEvent(kind=kind, status=self.pod.status(), rank=rank))
        for listener in self._listeners:
            listener.put(data)

    async def _stop_when_idle(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_SECONDS)
            if self.pod.over and not self._connections and kernel.now() - self._last_call > _IDLE_SECONDS:
                log.info("the pod has ended and nobody asks")
                self._stop.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not may_control(writer.get_extra_info("socket")):
            log.warning("a caller of another user is refused")
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        calls: set[asyncio.Task[None]] = set()
        try:
            while (body := await unpack(reader)) is not None:
                self._last_call = kernel.now()
                call = _calls.decode(body)
                answering = asyncio.create_task(self._answer(call, writer))
                calls.add(answering)
                answering.add_done_callback(calls.discard)
        except (msgspec.DecodeError, CorruptData) as error:
            log.warning("a caller speaks something else", error=str(error))
        except asyncio.CancelledError:
            pass
        finally:
            # Operations go on without their caller: it may come back and ask how they ended.
            self._connections.discard(task)
            for listener in [listener for listener in self._listeners if listener.writer is writer]:
                self._listeners.discard(listener)
                listener.close()
            with contextlib.suppress(OSError):
                writer.close()

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> None:
        try:
            answer = await self._do(call, writer)
        except MoorageError as error:
            answer = Answer(id=call.id, error=WireError(type(error).__name__, error.message, error.hint))
        except Exception as error:
            log.exception("a call failed")
            answer = Answer(id=call.id, error=WireError("MoorageError", f"guard: {type(error).__name__}: {error}"))
        with contextlib.suppress(OSError):
            writer.write(pack(answer))
            await writer.drain()
        if isinstance(call.request, messages.Exit) and answer.error is None:
            self._stop.set()

    async def _do(self, call: Call, writer: asyncio.StreamWriter) -> Answer:
        pod, timings, size = self.pod, {}, 0
        match call.request:
            case messages.Start():
                timings = await pod.start()
            case messages.Restore(images, work):
                timings = await pod.restore(Path(images), Path(work))
            case messages.Freeze(reason):
                timings = await pod.freeze(reason)
            case messages.Thaw(reason):
                timings = await pod.thaw(reason)
            case messages.Drain():
                timings = await pod.drain()
            case messages.Checkpoint(images, work, leave_running):
                timings, size = await pod.checkpoint(Path(images), Path(work), leave_running=leave_running)
            case messages.Kill(grace, reason):
                timings = await pod.kill(grace, reason)
            case messages.Deadline(deadline):
                assert self.fencing is not None
                self.fencing.renew(deadline)
            case messages.Subscribe():
                listener = _Listener(writer)
                listener.put(pack(GuardEvent(kind="status", status=pod.status())))
                self._listeners.add(listener)
            case messages.Exit():
                if pod.alive:
                    raise Conflict("the pod has processes", "kill it first")
            case messages.Status():
                pass
        return Answer(id=call.id, status=pod.status(), timings=timings, image_bytes=size)


class _Listener:
    """One subscriber; a slow one never holds up the guard."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._events: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._task = asyncio.create_task(self._send())

    def put(self, data: bytes) -> None:
        self._events.append(data)
        self._filled.set()
        if len(self._events) > _EVENTS_MAX:
            self.writer.close()

    def close(self) -> None:
        self._task.cancel()

    async def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._events:
                    self.writer.write(self._events.popleft())
                    await self.writer.drain()


def listen_private(folder: Path, name: str) -> socket.socket:
    """A socket (0600 under the process's umask) in ``folder``, whatever the length of its path."""
    path = folder / name
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listening.bind(f"/proc/self/fd/{descriptor}/{name}")  # the umask makes it 0600
    finally:
        os.close(descriptor)
    listening.listen(64)
    listening.setblocking(False)
    return listening
