"""eventfd: a counter with a value in it, a large one, one that does not block, one of two processes, EFD_SEMAPHORE."""

import contextlib
import os
import struct
from collections.abc import Iterator

from kit import call, equal, fork, run

EFD_SEMAPHORE = 1
LARGE = (1 << 40) + 12345


def program(nonce: bytes) -> Iterator[None]:
    counter = call("eventfd", 1000, 0)
    quiet = call("eventfd", 7, os.O_NONBLOCK)
    question, answer = call("eventfd", 0, 0), call("eventfd", 0, 0)

    def child() -> None:
        while True:
            (value,) = struct.unpack("<Q", os.read(question, 8))
            os.write(answer, struct.pack("<Q", value + 1))

    fork(child)
    large, semaphore, empty = (
        call("eventfd", 0, 0),
        call("eventfd", 5, EFD_SEMAPHORE),
        call("eventfd", 0, EFD_SEMAPHORE),
    )
    os.write(large, struct.pack("<Q", LARGE))
    held, step = 1000, 0
    yield
    while True:
        step += 1
        equal(struct.unpack("<Q", os.read(counter, 8)), (held,), "the counter")
        held = int.from_bytes(nonce[:4], "little") + step
        os.write(counter, struct.pack("<Q", held))
        os.write(question, struct.pack("<Q", step))
        equal(struct.unpack("<Q", os.read(answer, 8)), (step + 1,), "the child's answer")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal(struct.unpack("<Q", os.read(quiet, 8)), (7,), "the one that nobody has read")
            equal(struct.unpack("<Q", os.read(large, 8)), (LARGE,), "a counter of more than 32 bits")
            os.write(empty, struct.pack("<Q", 2))
            for fd, count in ((semaphore, 5), (empty, 2)):
                os.set_blocking(fd, False)
                taken = 0
                with contextlib.suppress(BlockingIOError):
                    while True:
                        equal(struct.unpack("<Q", os.read(fd, 8)), (1,), "what a semaphore gives")
                        taken += 1
                equal(taken, count, "how often it gives")
            with contextlib.suppress(BlockingIOError):
                os.read(quiet, 8)
            yield
        yield


run(program)
