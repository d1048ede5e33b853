"""File locks: POSIX (ranges, read and write), flock, those of open file descriptions; who waits for one gets it."""

import fcntl
import os
import struct
import time
from collections.abc import Iterator

from kit import check, equal, fork, run

OFD_SET, OFD_SETW = 37, 38


def record(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqixxxx", kind, 0, start, length, 0)


def refused(action: object) -> bool:
    try:
        action()  # type: ignore[operator]
    except OSError:
        return True
    return False


def program(nonce: bytes) -> Iterator[None]:
    whole = os.open("flock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(whole, fcntl.LOCK_EX)
    shared = os.open("shared", os.O_RDWR | os.O_CREAT)
    fcntl.flock(shared, fcntl.LOCK_SH)
    posix = os.open("posix", os.O_RDWR | os.O_CREAT)
    fcntl.lockf(posix, fcntl.LOCK_EX, 10, 5)
    fcntl.lockf(posix, fcntl.LOCK_SH, 10, 100)
    ofd = os.open("ofd", os.O_RDWR | os.O_CREAT)
    fcntl.fcntl(ofd, OFD_SET, record(fcntl.F_WRLCK, nonce[0], 7))
    question, answer = os.pipe(), os.pipe()

    def child() -> None:
        other = {name: os.open(name, os.O_RDWR) for name in ("flock", "shared", "posix", "ofd")}
        while os.read(question[0], 1):
            tries = (
                lambda: fcntl.flock(other["flock"], fcntl.LOCK_EX | fcntl.LOCK_NB),
                lambda: fcntl.flock(other["shared"], fcntl.LOCK_EX | fcntl.LOCK_NB),
                lambda: fcntl.lockf(other["posix"], fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 14),
                lambda: fcntl.lockf(other["posix"], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 109),
                lambda: fcntl.lockf(other["posix"], fcntl.LOCK_SH | fcntl.LOCK_NB, 1, 5009),
                lambda: fcntl.lockf(other["posix"], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 99999),
                lambda: fcntl.fcntl(other["ofd"], OFD_SET, record(fcntl.F_RDLCK, nonce[0] + 6, 1)),
            )
            os.write(answer[1], b"".join(b"1" if refused(each) else b"0" for each in tries))

    def heir() -> None:
        fcntl.lockf(posix, fcntl.LOCK_EX, 10, 5000)  # on its parent's open file
        fcntl.lockf(posix, fcntl.LOCK_SH, 0, 9000)  # to the end, wherever that is
        os.write(answer[1], b"heir")
        while True:
            time.sleep(1000)

    def waiter() -> None:
        fd = os.open("flock", os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(answer[1], b"waiter")
        while True:
            time.sleep(1000)

    fork(heir)
    check(os.read(answer[0], 20) == b"heir", "a child gets locks of its own")
    fork(child)
    waits = fork(waiter)
    yield
    while True:
        os.write(question[1], b"?")
        equal(os.read(answer[0], 20), b"1111111", "locks that hold")
        equal(os.waitpid(waits, os.WNOHANG), (0, 0), "the one that waits")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            fcntl.flock(whole, fcntl.LOCK_UN)
            check(os.read(answer[0], 20) == b"waiter", "the one that waited did not get the lock")
            yield
        yield


run(program)
