"""Descriptors of the pod's processes, borrowed: the same open file or socket, in this process, for a moment."""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import termios
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

libc = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # the same number on every architecture
_SO_PEEK_OFF = 42


class Place(NamedTuple):
    """A descriptor of a process. ``pid``: on the host."""

    pid: int
    fd: int


@contextlib.contextmanager
def borrowed(host_pid: int, fd: int) -> Iterator[int]:
    """Descriptor ``fd`` of the process, as one of this process; closed at the end of the block.

    What is changed through it (options, offset, flags) is changed for the owner too. Raises `OSError`:
    `ProcessLookupError` when the process is gone, EBADF when it has no such descriptor.
    """
    handle = os.pidfd_open(host_pid)
    try:
        copy = libc.syscall(_PIDFD_GETFD, handle, fd, 0)
        if copy < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"descriptor {fd} of process {host_pid}: {os.strerror(number)}")
    finally:
        os.close(handle)
    try:
        yield copy
    finally:
        os.close(copy)


@contextlib.contextmanager
def borrowed_socket(host_pid: int, fd: int) -> Iterator[socket.socket]:
    """As `borrowed`, as a socket object."""
    with borrowed(host_pid, fd) as copy:
        sock = socket.socket(fileno=copy)
        try:
            yield sock
        finally:
            sock.detach()


def holders_of(host_pids: Iterable[int], inodes: Container[int] | None = None) -> dict[int, list[Place]]:
    """Where these processes have the sockets with these inode numbers open, or all sockets."""
    found: dict[int, list[Place]] = {}
    for pid in host_pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for link in Path("/proc", str(pid), "fd").iterdir():
                with contextlib.suppress(OSError):
                    kind, _, number = str(link.readlink()).partition(":[")
                    if kind == "socket" and (inodes is None or int(number[:-1]) in inodes):
                        found.setdefault(int(number[:-1]), []).append(Place(pid, int(link.name)))
    return found


def readable_bytes(file: int | socket.socket) -> int:
    """How many bytes a read of this descriptor would give at once. Raises `OSError`."""
    waiting = array.array("i", [0])
    fcntl.ioctl(file, termios.FIONREAD, waiting)
    return waiting[0]


@contextlib.contextmanager
def peeking(sock: socket.socket) -> Iterator[None]:
    """In the block each look (MSG_PEEK) begins where the last one ended, the first at the beginning."""
    offset = sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
    try:
        peek_from(sock, 0)
        yield
    finally:
        peek_from(sock, offset)


def peek_from(sock: socket.socket, offset: int) -> None:
    """Where the next look begins, in bytes of what waits."""
    sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, offset)


def gone(error: OSError) -> bool:
    """Whether the process or its descriptor went away meanwhile."""
    return error.errno in (errno.ESRCH, errno.EBADF, errno.ENOENT)
