"""The broker's process: daemonise, serve orders on its socket, end when told and nothing is attached."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from moorage.errors import MoorageError, WireError
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.broker import Broker, Devices
from moorage.worker.gpu.kept import Kept
from moorage.worker.guard import kernel
from moorage.worker.guard.detach import detach, log_to, tell
from moorage.worker.guard.files import take_lock
from moorage.worker.guard.server import listen_private
from moorage.worker.guard.wire import pack, unpack

log = structlog.get_logger(__name__)

_calls = msgspec.msgpack.Decoder(m.Call)


def main() -> int:
    """Parse arguments, fork the broker, wait until it answers on its socket. 0, or 1 with the reason on stderr."""
    return detach("moorage.worker.gpu", "the GPU broker", _broker)


def _broker(folder: Path, told: int) -> None:
    os.umask(0o077)
    log_to(folder / m.LOG_FILE)
    lock = take_lock(folder)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    kernel.protect_from_memory_killer()
    asyncio.run(serve(folder, Broker(real_devices(), kept=Kept(folder)), lambda: tell(told, "ready")))
    os.close(lock)


def real_devices() -> Devices:
    """This machine's GPUs, by UUID. Raises `EnvironmentLacking`, `DeviceFailed`."""
    from moorage.worker.gpu.cuda_device import CudaDevice, index_of

    return Devices(CudaDevice, index_of)


async def serve(folder: Path, broker: Broker, ready: Callable[[], None]) -> None:
    """Answer orders on ``folder``'s socket until `Exit` is answered."""
    stop = asyncio.Event()
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await _converse(broker, reader, writer, stop)
        except asyncio.CancelledError:
            pass
        finally:
            connections.discard(task)

    server = await asyncio.start_unix_server(accept, sock=listen_private(folder, m.SOCKET_FILE), limit=1 << 20)
    ready()
    await stop.wait()
    server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)


async def _converse(
    broker: Broker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stop: asyncio.Event
) -> None:
    """Each order in a task of its own: one goes on without its caller."""
    working: set[asyncio.Task[None]] = set()
    try:
        while (body := await unpack(reader, limit=m.MESSAGE_MAX)) is not None:
            task = asyncio.create_task(_answer(broker, _calls.decode(body), writer, stop))
            working.add(task)
            task.add_done_callback(working.discard)
    except (msgspec.DecodeError, MoorageError) as error:
        log.warning("a caller speaks something else", error=str(error))
    finally:
        with contextlib.suppress(OSError):
            writer.close()


async def _answer(broker: Broker, call: m.Call, writer: asyncio.StreamWriter, stop: asyncio.Event) -> None:
    try:
        answer = msgspec.structs.replace(await broker.do(call.request), id=call.id)
    except MoorageError as error:
        answer = m.Answer(id=call.id, error=WireError(type(error).__name__, error.message, error.hint))
    except Exception as error:
        log.exception("an order failed")
        answer = m.Answer(id=call.id, error=WireError("MoorageError", f"GPU broker: {type(error).__name__}: {error}"))
    with contextlib.suppress(OSError):
        writer.write(pack(answer))
        await writer.drain()
    if isinstance(call.request, m.Exit) and answer.error is None:
        stop.set()
