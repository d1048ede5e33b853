"""timerfd: periodic ones read and unread, one that ticks once, a far one, and one on the wall clock."""

import os
import select
import struct
import time
from collections.abc import Iterator

from kit import call, check, equal, run

NANO = 1_000_000_000


def make(clock: int, first: int, period: int, flags: int = 0) -> int:
    fd: int = call("timerfd_create", clock, os.O_CLOEXEC | os.O_NONBLOCK)
    call("timerfd_settime", fd, flags, struct.pack("<qqqq", *divmod(period, NANO), *divmod(first, NANO)), None)
    return fd


def ticks(fd: int) -> int:
    try:
        return int(struct.unpack("<Q", os.read(fd, 8))[0])
    except BlockingIOError:
        return 0


def remaining(fd: int) -> float:
    new = (b"\0" * 32, bytearray(32))[1]
    from ctypes import c_char

    call("timerfd_gettime", fd, (c_char * 32).from_buffer(new))
    _, _, seconds, nanoseconds = struct.unpack("<qqqq", bytes(new))
    return float(seconds + nanoseconds / NANO)


def program(nonce: bytes) -> Iterator[None]:
    began = time.monotonic()
    read = make(time.CLOCK_MONOTONIC, 20_000_000, 20_000_000)
    unread = make(time.CLOCK_MONOTONIC, 1_000_000, 50_000_000)
    boot = make(time.CLOCK_BOOTTIME, 20_000_000, 20_000_000)
    wall = make(time.CLOCK_REALTIME, 20_000_000, 20_000_000)
    far = make(time.CLOCK_MONOTONIC, 5000 * NANO, 0)
    absolute = make(time.CLOCK_MONOTONIC, int((began + 4000) * NANO), 0, 1)
    once = make(time.CLOCK_MONOTONIC, 1_000_000, 0)
    select.select([once, unread], [], [], 5)
    yield
    while True:
        for name, fd in {"monotonic": read, "boottime": boot, "wall clock": wall}.items():
            check(select.select([fd], [], [], 20)[0], f"the periodic timer on the {name} stands still")
            check(ticks(fd) >= 1, f"the periodic timer on the {name} has no ticks")
        check(select.select([unread, once], [], [], 0)[0] == [unread, once], "ticks that nobody has read are gone")
        passed = time.monotonic() - began
        check(abs(remaining(far) - (5000 - passed)) < 120, f"the far timer: {remaining(far)} after {passed}")
        check(abs(remaining(absolute) - (4000 - passed)) < 30, f"the absolute timer: {remaining(absolute)}")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal(ticks(once), 1, "ticks of the timer that ticks once")
            passed = time.monotonic() - began
            many = ticks(unread)
            check(many >= passed / 0.05 * 0.2, f"{many} unread ticks after {passed:.2f} s")
            check(select.select([unread], [], [], 20)[0], "the timer whose ticks nobody read stands still")
        yield


run(program)
