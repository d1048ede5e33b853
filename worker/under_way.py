"""Sockets that are under way: sent over a unix socket (SCM_RIGHTS), and in no process until somebody receives them."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import socket
import stat
from collections.abc import Iterable, Iterator

from moorage.worker.borrow import borrowed_socket, holders_of, libc, peek_from, peeking, readable_bytes

#: More than any packet has.
_PIECE_BYTES = 1 << 20
_DESCRIPTORS = 253  # the most that one message has


def sockets(host_pids: Iterable[int]) -> Iterator[socket.socket]:
    """The sockets that wait in unix sockets of these frozen processes, each until the next one; they stay there."""
    for places in holders_of(host_pids).values():
        with contextlib.suppress(OSError):
            yield from _within(*places[0])


def _within(pid: int, fd: int) -> Iterator[socket.socket]:
    with borrowed_socket(pid, fd) as sock:
        if sock.family != socket.AF_UNIX or not readable_bytes(sock):  # which one that listens does not tell
            return
        found = [fd for _, descriptors in pieces(sock) for fd in descriptors]
    while found:
        one = found.pop()
        if stat.S_ISSOCK(os.fstat(one).st_mode):
            with socket.socket(fileno=one) as under_way:
                yield under_way
        else:
            os.close(one)


def pieces(sock: socket.socket) -> Iterator[tuple[bytes, list[int]]]:
    """What waits in it, which stays there, in pieces with the descriptors that came with each: they are the caller's.
    Raises `OSError`."""
    with peeking(sock):
        while (piece := _peek(sock))[0]:
            yield piece


def starts(sock: socket.socket) -> list[int]:
    """Where, in the bytes that wait in this stream, a message begins that has descriptors with it.

    A look ends behind such a message, and takes in what was sent before it: whoever reads only that would lose the
    descriptors, if it were sent as one. Raises `OSError`.
    """
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or not readable_bytes(sock):
        return []
    found: list[int] = []
    base = 0
    with peeking(sock):
        while True:
            peek_from(sock, base)
            try:
                data, _, flags, _ = sock.recvmsg(_PIECE_BYTES, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            if not data:
                return found
            if flags & socket.MSG_CTRUNC:  # something was with it
                peek_from(sock, base)
                found += [base + before] if (before := _before_last(sock, len(data))) else []
            base += len(data)


def _before_last(sock: socket.socket, size: int) -> int:
    """How many of the next bytes were sent before the last message among them.

    The kernel copies a message whole or not at all: with room for all but the last byte, the last one is not copied.
    """
    page = mmap.PAGESIZE
    pages = -(-size // page)
    with mmap.mmap(-1, (pages + 1) * page) as room:
        first = ctypes.c_char.from_buffer(room)
        end = ctypes.addressof(first) + pages * page
        del first
        if libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        got = libc.recv(sock.fileno(), ctypes.c_void_p(end - size + 1), ctypes.c_size_t(size), flags)
        number = ctypes.get_errno()
        libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 3)
    if got < 0 and number != errno.EFAULT:
        raise OSError(number, os.strerror(number))
    return max(0, int(got))


def _peek(sock: socket.socket) -> tuple[bytes, list[int]]:
    room, flags = socket.CMSG_SPACE(4 * _DESCRIPTORS), socket.MSG_PEEK | socket.MSG_DONTWAIT
    try:
        data, notes, *_ = sock.recvmsg(_PIECE_BYTES, room, flags)
    except BlockingIOError:
        return b"", []
    rights = [text for level, kind, text in notes if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    return data, [fd for text in rights for fd in array.array("i", text[: len(text) - len(text) % 4])]
