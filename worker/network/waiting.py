"""Connections that wait in the queue of a listening socket: taken out of it, and put back as they were.

CRIU cannot save them, and a kernel has no call that puts a connection into that queue. It is got to do it by itself:

1. `take` accepts them, notes numbers, options and what they have received, and lets them vanish without a word to the
   other end. While they are away a shield keeps every packet of theirs from a kernel that would answer with a reset.
2. `put_back` lets the kernel go through the opening of the connection once more, with segments that seem to come from
   the other end. The kernel chooses the number that its own end begins with; only for a connection that opens again
   while the last one with the same addresses is in TIME_WAIT is it the last one's number + 65537. So such a last one
   is made first, by TCP_REPAIR, with the number that leads to the right one.

The other end notices nothing: addresses, numbers, options and data are those that it knows. It need not be in this pod.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from moorage.errors import MoorageError
from moorage.worker.borrow import readable_bytes
from moorage.worker.network import packets, rules
from moorage.worker.network.packets import ACK, FIN, PSH, RST, SYN, Injector
from moorage.worker.network.sockets import CLOSE_WAIT, CLOSED, ESTABLISHED, Connection, Diagnosis

_TCP_INFO, _TCP_REPAIR, _TCP_REPAIR_QUEUE, _TCP_QUEUE_SEQ, _TCP_REPAIR_WINDOW = 11, 19, 20, 21, 29
_SO_RCVBUFFORCE, _SO_BUF_LOCK = 33, 72
_NO_QUEUE, _RECEIVED, _SENT = 0, 1, 2
_OFF_SILENTLY = -1
_WORD = 0xFFFFFFFF
#: What a kernel adds to the last number of a connection in TIME_WAIT for the first number of the next one.
_AFTER_TIME_WAIT = 65535 + 2
_TIMESTAMPS, _SACK, _SCALING = 1, 2, 4  # tcpi_options
_PIECE_BYTES = 32_000
_ROOM_BYTES = 2 << 20
_ANY_WINDOW = 65535
_TRIES, _PAUSE_SECONDS = 50, 0.005


class Waiting(msgspec.Struct, frozen=True):
    """One connection. ``sent`` and ``received``: the next numbers of both directions (``received`` counts the end of
    the stream, if it ``ended``); ``options``: bits of ``tcpi_options``; ``reset``: the other end has broken it off;
    ``data``: all that was received and not read."""

    local: tuple[str, int]
    remote: tuple[str, int]
    sent: int
    received: int
    mss: int
    options: int
    scale: int
    ended: bool = False
    reset: bool = False
    data: bytes = b""

    def __str__(self) -> str:
        return f"{self.remote[0]}:{self.remote[1]} to port {self.local[1]}"


def take(listeners: Iterable[socket.socket]) -> tuple[list[Waiting], list[socket.socket]]:
    """Accept all that wait. The sockets are the accepted ones: `vanish` them once the notes are safe.

    The owners of the listening sockets stand still, and no packet reaches these ports. Raises `OSError`.
    """
    notes, accepted = [], []
    for listener in listeners:
        look = select.poll()
        look.register(listener, select.POLLIN)
        while look.poll(0):  # its flags are its owner's, and it may be one that waits
            fd, peer = listener._accept()  # type: ignore[attr-defined]
            connection = socket.socket(fileno=fd)
            accepted.append(connection)
            notes.append(_note(connection, peer))
    return notes, accepted


def _note(connection: socket.socket, peer: tuple[str, int]) -> Waiting:
    info = connection.getsockopt(socket.SOL_TCP, _TCP_INFO, 104)
    data = b""
    if size := readable_bytes(connection):
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            data = connection.recv(size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    connection.setsockopt(socket.SOL_TCP, _TCP_REPAIR, 1)
    sent, received = (_number(connection, queue) for queue in (_SENT, _RECEIVED))
    connection.setsockopt(socket.SOL_TCP, _TCP_REPAIR_QUEUE, _NO_QUEUE)
    return Waiting(
        local=_address(connection.getsockname()),
        remote=_address(peer),
        sent=sent,
        received=received,
        mss=struct.unpack_from("=I", info, 16)[0],
        options=info[5],
        scale=info[6] & 15,
        ended=info[0] == CLOSE_WAIT,
        reset=info[0] == CLOSED,
        data=data,
    )


def _number(connection: socket.socket, queue: int) -> int:
    connection.setsockopt(socket.SOL_TCP, _TCP_REPAIR_QUEUE, queue)
    return connection.getsockopt(socket.SOL_TCP, _TCP_QUEUE_SEQ) & _WORD


def _address(name: Sequence[object]) -> tuple[str, int]:
    return str(name[0]).removeprefix("::ffff:"), int(str(name[1]))


def vanish(accepted: Iterable[socket.socket]) -> None:
    """Close the sockets that `take` gave without a packet."""
    for connection in accepted:
        connection.close()  # under TCP_REPAIR


def put_back(waiting: Sequence[Waiting]) -> list[Waiting]:
    """Into the queues they came from, in their order, within the pod's network and behind the shield.

    Returns those that did not get in. Raises `OSError`.
    """
    with Injector() as injector, Diagnosis() as diagnosis:
        return [one for one in waiting if not _put_back(one, injector, diagnosis)]


def _put_back(one: Waiting, injector: Injector, diagnosis: Diagnosis) -> bool:
    first = one.sent - 1
    theirs = one.received - len(one.data) - one.ended - 1
    _prepare_number(one, first, theirs, injector)
    options = struct.pack("!BBH", 2, 4, max(one.mss, 88))
    stamps = b""
    if one.options & _SACK:
        options += b"\4\2"
    if one.options & _TIMESTAMPS:
        # 0 counts as no time at all: the other end's own clock stays valid.
        options += b"\x08\x0a" + bytes(8)
        stamps = b"\1\1\x08\x0a" + bytes(8)
    if one.options & _SCALING:
        options += struct.pack("!BBB", 3, 3, one.scale)

    def send(at: int, flags: int, data: bytes = b"", text: bytes = stamps) -> None:
        acknowledged = 0 if flags == SYN else first + 1
        injector.send(
            packets.segment(
                one.remote, one.local, sequence=theirs + at, acknowledged=acknowledged, flags=flags,
                window=_ANY_WINDOW >> (0 if flags == SYN else one.scale), options=text, data=data,
            )
        )  # fmt: skip

    send(0, SYN, text=options)
    send(1, ACK)
    for tried in range(_TRIES):
        there = _find(one, diagnosis)
        have = there.receive_queue if there is not None else 0
        if there is not None and have >= len(one.data) + one.ended:
            # An old number is acknowledged at once, so that no acknowledgement is left for later: one that came to an
            # other end that is gone by now would be answered with a reset.
            send(0, ACK)
            if one.reset:
                send(1 + len(one.data), RST | ACK)
            return True
        if tried:
            time.sleep(_PAUSE_SECONDS)  # the kernel makes room as it likes
        for at in range(have, len(one.data), _PIECE_BYTES):
            send(1 + at, ACK | PSH, one.data[at : at + _PIECE_BYTES])
        if one.ended:
            send(1 + len(one.data), ACK | FIN)
        elif not one.data:
            send(1, ACK)
    return False


def _prepare_number(one: Waiting, first: int, theirs: int, injector: Injector) -> None:
    """Leave a connection in TIME_WAIT after which the kernel begins the next one with the number ``first``."""
    number = (first - _AFTER_TIME_WAIT - 1) & _WORD
    before = (theirs - 1000) & _WORD
    family = socket.AF_INET6 if ":" in one.local[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as last:
        # Whatever it sends goes over lo and ends at the shield.
        last.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        last.setsockopt(socket.SOL_TCP, _TCP_REPAIR, 1)
        for queue, value in ((_SENT, number), (_RECEIVED, before)):
            last.setsockopt(socket.SOL_TCP, _TCP_REPAIR_QUEUE, queue)
            last.setsockopt(socket.SOL_TCP, _TCP_QUEUE_SEQ, struct.pack("=I", value))
        last.bind(one.local)
        last.connect(one.remote)
        window = struct.pack("=5I", (before - 1) & _WORD, _ANY_WINDOW, _ANY_WINDOW, _ANY_WINDOW, before)
        last.setsockopt(socket.SOL_TCP, _TCP_REPAIR_WINDOW, window)
        last.setsockopt(socket.SOL_TCP, _TCP_REPAIR, _OFF_SILENTLY)
        last.shutdown(socket.SHUT_WR)
        injector.send(
            packets.segment(
                one.remote, one.local, sequence=before, acknowledged=number + 1, flags=ACK | FIN, window=1000
            )
        )


def _find(one: Waiting, diagnosis: Diagnosis) -> Connection | None:
    for found in diagnosis.tcp(1 << ESTABLISHED | 1 << CLOSE_WAIT):
        if ((found.local, found.local_port), (found.remote, found.remote_port)) == (one.local, one.remote):
            return found
    return None


@contextlib.contextmanager
def roomy(listeners: Iterable[socket.socket], size: int) -> Iterator[None]:
    """Let connections that come into these queues have room for ``size`` bytes at once, as those that were there had
    been given little by little; afterwards the listening sockets are as before. Raises `OSError`."""
    before = []
    try:
        for listener in listeners:
            room = listener.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2  # it tells the double
            if room < (wanted := max(_ROOM_BYTES, 2 * size)):
                locked = listener.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
                before.append((listener, room, locked))
                _resize(listener, wanted, locked)
        yield
    finally:
        for listener, room, locked in before:
            _resize(listener, room, locked)


def _resize(listener: socket.socket, room: int, locked: int) -> None:
    listener.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, room)
    listener.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locked)  # or the size would be as if the program had set it


def shield(ports: Iterable[int] = (), waiting: Iterable[Waiting] = ()) -> None:
    """Drop, before they reach TCP, the packets of these ports or of these connections, in both directions, but for
    those of `Injector`. What was shielded before is not any more. Raises as `rules.apply` does."""
    rules.apply(rules.shield(packets.MARK, list(ports), [(one.local, one.remote) for one in waiting]))


def lost(waiting: Sequence[Waiting]) -> MoorageError:
    """The error that names those that `put_back` returned."""
    return MoorageError(
        "connections could not be put back for their program to accept: " + ", ".join(map(str, waiting))
    )
