"""What a UDP socket holds back (UDP_CORK, MSG_MORE): pieces of a datagram that is to be sent as one later.

No call reads them. So the datagram is sent, to this process: on its way out a rule leads it there, and keeps whom it
was for. Afterwards, and after a restore, the same is written into the socket again and held back as before.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import select
import socket
import termios
from typing import Any

import msgspec

from moorage.errors import MoorageError
from moorage.worker.network import rules

_SOL_UDP, _UDP_CORK = 17, 1
_SO_RCVBUFFORCE = 33
_LARGEST = 1 << 16
_SECONDS = 2.0


class Corked(msgspec.Struct, frozen=True):
    """A UDP socket (``pid`` and ``fd`` are those inside the pod). ``option``: UDP_CORK is set; ``data`` is what it
    holds back for ``remote``, None if it holds nothing back."""

    pid: int
    fd: int
    option: bool
    remote: tuple[str, int] | None = None
    data: bytes = b""


def look(sock: socket.socket, pid: int, fd: int) -> Corked | None:
    """Whether this UDP socket holds something back, or will; `take` gets what. Raises `OSError`."""
    option = bool(sock.getsockopt(_SOL_UDP, _UDP_CORK))
    return Corked(pid, fd, option) if option or holds(sock) else None


def holds(sock: socket.socket) -> bool:
    """Whether something of this UDP socket, whose owner stands still, was not sent yet. Raises `OSError`."""
    waiting = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, waiting)
    return bool(waiting[0])


def take(sock: socket.socket, found: Corked) -> Corked:
    """Get what this socket holds back out of it, in the current network; the option is off then.

    Raises `OSError`, `EnvironmentLacking`, `MoorageError`.
    """
    if not holds(sock):
        sock.setsockopt(_SOL_UDP, _UDP_CORK, 0)
        return found
    with contextlib.ExitStack() as stack:
        ends = []
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError):  # a network without IPv6
                end = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                end.bind((address, 0))
                end.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 4 * _LARGEST)
                ends.append(end)
        stack.callback(rules.apply, rules.UNCORK)
        rules.apply(rules.uncork(sock.getsockname()[1], [end.getsockname()[1] for end in ends]))
        sock.setsockopt(_SOL_UDP, _UDP_CORK, 0)
        ready, _, _ = select.select(ends, [], [], _SECONDS)
        if not ready:
            raise MoorageError("what a UDP socket held back did not come out of it")
        data = ready[0].recv(_LARGEST)
        return msgspec.structs.replace(found, data=data, remote=_target(rules.list_table("inet", rules.UNCORK_TABLE)))


def _target(listing: list[dict[str, Any]]) -> tuple[str, int]:
    for entry in listing:
        for element in entry.get("set", {}).get("elem", []):
            value = element["elem"]["val"] if "elem" in element else element
            address, port = value["concat"]
            return str(address), int(port)
    raise MoorageError("whom a UDP socket held something back for is not known")


def give(sock: socket.socket, found: Corked) -> None:
    """Let the socket hold back what `take` found, unless it does. Raises `OSError`."""
    sock.setsockopt(_SOL_UDP, _UDP_CORK, found.option)
    if found.remote is None or holds(sock):
        return
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL | (0 if found.option else socket.MSG_MORE)
    try:
        sock.getpeername()
    except OSError:
        address, port = found.remote
        if sock.family == socket.AF_INET6 and ":" not in address:
            address = f"::ffff:{address}"
        sock.sendto(found.data, flags, (address, port))
    else:
        sock.send(found.data, flags)
