"""Sockets that are under way: sent over a unix socket (SCM_RIGHTS), and in no process until somebody receives them."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import stat
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path

from moorage.worker.borrow import borrowed_socket, libc

_SO_PEEK_OFF = 42
_PIECE_BYTES = 1 << 20
_DESCRIPTORS = 253  # the most that one message has


def sockets(host_pids: Iterable[int]) -> Iterator[socket.socket]:
    """The sockets that wait in unix sockets of these frozen processes, each until the next one; they stay there."""
    seen: set[int] = set()
    for pid in host_pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for link in Path("/proc", str(pid), "fd").iterdir():
                with contextlib.suppress(OSError):
                    inode = link.stat().st_ino
                    if inode not in seen and str(link.readlink()).startswith("socket:"):
                        seen.add(inode)
                        yield from _within(pid, int(link.name))


def _within(pid: int, fd: int) -> Iterator[socket.socket]:
    with borrowed_socket(pid, fd) as sock:
        if sock.family != socket.AF_UNIX or not _waiting_bytes(sock):  # which one that listens does not tell
            return
        found: list[int] = []
        with _looking(sock):
            while (piece := _peek(sock, _PIECE_BYTES))[0]:
                found += piece[1]
    while found:
        one = found.pop()
        if stat.S_ISSOCK(os.fstat(one).st_mode):
            with socket.socket(fileno=one) as under_way:
                yield under_way
        else:
            os.close(one)


def starts(sock: socket.socket) -> list[int]:
    """Where, in the bytes that wait in this stream, a message begins that has descriptors with it.

    A look ends behind such a message, and takes in what was sent before it: whoever reads only that would lose the
    descriptors, if it were sent as one. Raises `OSError`.
    """
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) or not _waiting_bytes(sock):
        return []
    found: list[int] = []
    base = 0
    with _looking(sock):
        while True:
            sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, base)
            try:
                data, _, flags, _ = sock.recvmsg(_PIECE_BYTES, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            if not data:
                return found
            if flags & socket.MSG_CTRUNC:  # something was with it
                sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, base)
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


def _peek(sock: socket.socket, size: int) -> tuple[bytes, list[int]]:
    room, flags = socket.CMSG_SPACE(4 * _DESCRIPTORS), socket.MSG_PEEK | socket.MSG_DONTWAIT
    try:
        data, notes, *_ = sock.recvmsg(size, room, flags)
    except BlockingIOError:
        return b"", []
    rights = [text for level, kind, text in notes if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)]
    return data, [fd for text in rights for fd in array.array("i", text[: len(text) - len(text) % 4])]


@contextlib.contextmanager
def _looking(sock: socket.socket) -> Iterator[None]:
    offset = sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)  # each look begins where the last one ended
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, offset)


def _waiting_bytes(sock: socket.socket) -> int:
    waiting = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, waiting)
    return waiting[0]
