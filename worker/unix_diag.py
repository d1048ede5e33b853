"""The unix sockets of a network namespace, as the kernel's socket monitor tells of them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

LISTENING = 10
_SOCK_DIAG_BY_FAMILY, _DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_SHOW_PEER, _SHOW_WAITING, _SHOW_QUEUES = 4, 8, 16
_PEER, _WAITING, _QUEUES, _SHUTDOWN = 2, 3, 4, 6
_HEADER = struct.Struct("=IHHII")


class UnixSocket(NamedTuple):
    """One socket. ``peer``: inode of the other end (0: none, or one that was not accepted yet); ``waiting``: of a
    listening one, the inodes of those that connected and were not accepted yet, in their order (0: closed since);
    ``unread``: bytes that it sent and that are still in the kernel; ``shutdown``: 1 for reading, 2 for writing;
    ``backlog``: of a listening one, how many may wait behind the first."""

    inode: int
    kind: int
    state: int
    peer: int = 0
    waiting: tuple[int, ...] = ()
    unread: int = 0
    shutdown: int = 0
    backlog: int = 0


def read() -> dict[int, UnixSocket]:
    """All unix sockets of the current network namespace, by inode. Raises `OSError`."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4) as diag:
        diag.settimeout(10)
        show = _SHOW_PEER | _SHOW_WAITING | _SHOW_QUEUES
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, show, 0xFFFFFFFF, 0xFFFFFFFF)
        diag.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + body)
        found: dict[int, UnixSocket] = {}
        while True:
            data, at = diag.recv(1 << 17), 0
            while at < len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind in (_ERROR, _DONE):
                    return found
                one = parse(data[at + _HEADER.size : at + length])
                found[one.inode] = one
                at += (length + 3) & ~3


def parse(message: bytes) -> UnixSocket:
    """One answer behind its netlink header. Pure."""
    _, kind, state, _, inode = struct.unpack_from("=BBBBI", message)
    found = dict(_attributes(message[16:]))

    def word(name: int, at: int = 0) -> int:
        return int(struct.unpack_from("=I", found[name], at)[0]) if name in found else 0

    waiting = found.get(_WAITING, b"")
    return UnixSocket(
        inode,
        kind,
        state,
        peer=word(_PEER),
        waiting=struct.unpack(f"={len(waiting) // 4}I", waiting),
        unread=word(_QUEUES, 4) if state != LISTENING else 0,
        shutdown=found[_SHUTDOWN][0] if _SHUTDOWN in found else 0,
        backlog=word(_QUEUES, 4) if state == LISTENING else 0,
    )


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        yield kind, data[at + 4 : at + length]
        at += max(4, (length + 3) & ~3)
