"""The keeper: a small process that holds a duplicate of every descriptor of the GPU broker.

Device memory thus outlives the broker. The keeper knows nothing of CUDA; its only client is the broker, or the next
one. It ends when nobody is connected and it holds nothing, or when its folder is gone.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from moorage.worker.guard import kernel
from moorage.worker.guard.detach import detach, log_to, tell
from moorage.worker.guard.files import take_lock

FOLDER: Final = "keeper"  #: below the broker's
SOCKET_FILE: Final = "keeper.sock"
PACKET_MAX: Final = 256 * 1024
_LOOK_SECONDS: Final = 10.0


class Put(msgspec.Struct, frozen=True, tag=True):
    """Hold the descriptor that comes along, one more of this block. ``about``: the broker's own words."""

    pod: str
    process: int
    id: int
    about: bytes


class Drop(msgspec.Struct, frozen=True, tag=True):
    """The block is gone."""

    pod: str
    process: int
    id: int


class DropPod(msgspec.Struct, frozen=True, tag=True):
    """All of the pod is gone."""

    pod: str


class Note(msgspec.Struct, frozen=True, tag=True):
    """What the next broker has to know of the pod."""

    pod: str
    text: bytes


class Take(msgspec.Struct, frozen=True, tag=True):
    """Hand out duplicates of all that is held of the pod: a `Put` for each descriptor, then the `Note`."""

    pod: str


Message = Put | Drop | DropPod | Note | Take
_messages = msgspec.msgpack.Decoder(Message)


class _Held(NamedTuple):
    about: bytes
    descriptors: list[int]


def send(line: socket.socket, message: Message, descriptor: int = -1) -> None:
    """One packet, with a descriptor if it is one. Raises `OSError`."""
    extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
    line.sendmsg([msgspec.msgpack.encode(message)], extra)


def receive(line: socket.socket) -> tuple[Message | None, int]:
    """One packet, and the descriptor that came with it (the caller's now) or -1. None: the line is closed.

    Raises `OSError`, `msgspec.MsgspecError`.
    """
    data, extra, _, _ = line.recvmsg(PACKET_MAX, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    descriptor = -1
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptor = array.array("i", content[:4])[0]
    return (_messages.decode(data) if data else None), descriptor


class Keeper:
    """What is held, by pod and block."""

    def __init__(self) -> None:
        self._held: dict[str, dict[tuple[int, int], _Held]] = {}
        self._notes: dict[str, bytes] = {}

    @property
    def empty(self) -> bool:
        return not any(self._held.values())

    def obey(self, line: socket.socket, message: Message, descriptor: int) -> None:
        """Raises `OSError` when the answer cannot be sent."""
        match message:
            case Put():
                block = self._held.setdefault(message.pod, {}).setdefault(
                    (message.process, message.id), _Held(message.about, [])
                )
                block.descriptors.append(descriptor)
                return
            case Drop():
                self._close(self._held.get(message.pod, {}).pop((message.process, message.id), None))
            case DropPod():
                self._notes.pop(message.pod, None)
                for block in self._held.pop(message.pod, {}).values():
                    self._close(block)
            case Note():
                self._notes[message.pod] = message.text
            case Take():
                for (process, number), block in self._held.get(message.pod, {}).items():
                    for held in block.descriptors:
                        send(line, Put(message.pod, process, number, block.about), held)
                send(line, Note(message.pod, self._notes.get(message.pod, b"")))
        if descriptor >= 0:
            os.close(descriptor)

    @staticmethod
    def _close(block: _Held | None) -> None:
        for descriptor in block.descriptors if block else ():
            os.close(descriptor)


def serve(folder: Path, told: int) -> None:
    """Hold what clients bring until there is nothing to hold and nobody to hold it for."""
    path = folder / SOCKET_FILE
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listening.bind(str(path))
    listening.listen(8)
    tell(told, "ready")
    keeper = Keeper()
    clients: set[socket.socket] = set()
    served = False

    def hear(line: socket.socket) -> bool:
        """One message of a client. False: it is gone."""
        try:
            message, descriptor = receive(line)
            if isinstance(message, Take):
                # What an earlier broker said before it died comes first.
                for other in clients - {line}:
                    while select.select([other], [], [], 0)[0] and hear(other):
                        pass
            if message is not None:
                keeper.obey(line, message, descriptor)
                return True
        except (OSError, msgspec.MsgspecError):
            pass
        return False

    with selectors.DefaultSelector() as selector:
        selector.register(listening, selectors.EVENT_READ)
        while clients or not served or not keeper.empty:
            ready = selector.select(_LOOK_SECONDS)
            if not ready and not clients and not folder.exists():
                return
            served = served or not ready  # whoever started it and never came
            for key, _ in ready:
                line = key.fileobj
                assert isinstance(line, socket.socket)
                if line is listening:
                    client, _ = listening.accept()
                    clients.add(client)
                    selector.register(client, selectors.EVENT_READ)
                    served = True
                    continue
                if not hear(line):
                    selector.unregister(line)
                    clients.discard(line)
                    line.close()


def main() -> int:
    """Fork the keeper, and wait until it listens. 0, or 1 with the reason on stderr."""
    return detach("moorage.worker.gpu.keeper", "the keeper of device memory", _become)


def _become(folder: Path, told: int) -> None:
    os.umask(0o077)
    log_to(folder / "keeper.log")
    lock = take_lock(folder)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ValueError, OSError):
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kernel.protect_from_memory_killer()
    serve(folder, told)
    os.close(lock)


if __name__ == "__main__":
    sys.exit(main())
