"""The few system calls that the guard needs and Python 3.11 does not have."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import time
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_CHILD_SUBREAPER: Final = 36
_SPLICE_F_NONBLOCK: Final = 2
_TFD_TIMER_ABSTIME: Final = 1
_TFD_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1
F_SETPIPE_SZ: Final = 1031


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def now() -> float:
    """CLOCK_BOOTTIME in seconds: goes on while the machine sleeps, and no administrator can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def become_subreaper() -> None:
    """From now on the orphans among this process's descendants become its children: so it learns how a container's
    init ended although runc, which started it, has left."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def tee(source: int, target: int, length: int) -> int:
    """Copy up to ``length`` bytes from one pipe to another without taking them. 0: no writer is left.
    Raises `BlockingIOError` when the pipe is empty."""
    result = _libc.tee(source, target, ctypes.c_size_t(length), _SPLICE_F_NONBLOCK)
    if result < 0 and ctypes.get_errno() == errno.EAGAIN:
        raise BlockingIOError(errno.EAGAIN, "tee")
    return _check(result, "tee")


def boottime_timer() -> int:
    """A timerfd on CLOCK_BOOTTIME. asyncio's own timers stand still while the machine sleeps."""
    return _check(_libc.timerfd_create(time.CLOCK_BOOTTIME, _TFD_FLAGS), "timerfd_create")


def set_timer(descriptor: int, when: float) -> None:
    """Make it readable at ``when`` (CLOCK_BOOTTIME seconds; at once if that has passed). Clears an earlier expiry."""
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 8)
    nanoseconds = max(1, int(when * 1e9))
    spec = struct.pack("=qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)
    _check(_libc.timerfd_settime(descriptor, _TFD_TIMER_ABSTIME, spec, None), "timerfd_settime")


def set_link(name: str, *, up: bool) -> None:
    """Set a network interface of this network namespace up or down. One that is gone carries nothing: no error."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", name.encode()[:15], 0)
        try:
            (flags,) = struct.unpack_from("h", fcntl.ioctl(control, _SIOCGIFFLAGS, request), 16)
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ENXIO):
                return
            raise
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", name.encode()[:15], flags))


def protect_from_memory_killer() -> None:
    """Ask the kernel to take other processes first when memory runs out. Not every root may."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-900")
