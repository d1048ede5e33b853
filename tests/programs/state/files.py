"""Open files: offset, append, shared offsets after dup and fork, flags, folders, O_PATH, owner and signal of a file."""

import fcntl
import os
import signal
import time
from collections.abc import Iterator

from kit import check, equal, fork, pattern, run

LENGTH = 100_000


def program(nonce: bytes) -> Iterator[None]:
    content = pattern(nonce, LENGTH)
    with open("content", "wb") as file:
        file.write(content)
    reader = os.open("content", os.O_RDONLY)
    twin = os.dup(reader)
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 777)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_DSYNC)
    path = os.open("content", os.O_PATH)
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    signals, answers = os.pipe(), os.pipe()
    fcntl.fcntl(signals[0], fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(signals[0], fcntl.F_SETSIG, signal.SIGRTMIN + 3)
    far = os.open("sparse", os.O_RDWR | os.O_CREAT)
    os.lseek(far, 1 << 40, os.SEEK_SET)

    def child() -> None:
        while word := os.read(signals[0], 1):
            os.write(answers[1], word + os.read(reader, 7))

    fork(child)
    os.close(answers[1])
    at = length = 0
    flags = {fd: fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (reader, log, path, far)}
    yield
    while True:
        os.write(signals[1], b"+")
        equal(os.read(answers[0], 8), b"+" + content[at : at + 7], "what the child reads")
        equal(os.read(twin, 5), content[at + 7 : at + 12], "what is read after it")
        at += 12
        equal(os.lseek(high, 0, os.SEEK_CUR), at, "the shared offset")
        if at > LENGTH - 20:
            at = os.lseek(high, 0, os.SEEK_SET)
        os.pwrite(log, b"12345", 0)
        length += 5
        equal(os.stat("log").st_size, length, "the length of what is appended to")
        equal({fd: fcntl.fcntl(fd, fcntl.F_GETFL) for fd in flags}, flags, "flags")
        equal(os.fstat(path).st_size, LENGTH, "a file open by path only")
        check("content" in os.listdir(folder), "a folder that is open")
        equal(os.lseek(far, 0, os.SEEK_CUR), 1 << 40, "a far offset")
        check(not os.get_inheritable(high), "close on exec is lost")
        equal(fcntl.fcntl(signals[0], fcntl.F_GETOWN), os.getpid(), "the owner")
        equal(fcntl.fcntl(signals[0], fcntl.F_GETSIG), signal.SIGRTMIN + 3, "the signal")
        yield
        time.sleep(0)


run(program)
