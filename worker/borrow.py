"""Descriptors of the pod's processes, borrowed: the same open file or socket, in this process, for a moment."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
from collections.abc import Iterator

libc = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # the same number on every architecture


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


def gone(error: OSError) -> bool:
    """Whether the process or its descriptor went away meanwhile."""
    return error.errno in (errno.ESRCH, errno.EBADF, errno.ENOENT)
