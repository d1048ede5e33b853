"""Pipes with data in them: one that is ahead, a full one of another size, one whose writer is gone, one of packets."""

import fcntl
import os
from collections.abc import Iterator

from kit import check, equal, pattern, run

PIPE_SIZE, GET_SIZE = 1031, 1032


def program(nonce: bytes) -> Iterator[None]:
    ahead = os.pipe()  # always holds what was written in the last look
    os.write(ahead[1], pattern(nonce, 3000, 0))
    full = os.pipe2(os.O_NONBLOCK)
    fcntl.fcntl(full[1], PIPE_SIZE, 1 << 17)
    written = 0
    whole = pattern(nonce, 1 << 18)
    try:
        while True:
            written += os.write(full[1], whole[written : written + 1000])
    except BlockingIOError:
        pass
    closed = os.pipe()
    os.write(closed[1], whole[:777])
    os.close(closed[1])
    packets = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    sizes = (1, 100, 4096, 3, 3, 2000)
    for number, size in enumerate(sizes):
        os.write(packets[1], pattern(nonce, size, f"packet {number}"))
    unused = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    step = 0
    yield
    while True:
        step += 1
        os.write(ahead[1], pattern(nonce, 3000, step))
        equal(os.read(ahead[0], 3000), pattern(nonce, 3000, step - 1), "what was in the pipe")
        equal(fcntl.fcntl(full[0], GET_SIZE), 1 << 17, "the size of a pipe")
        try:
            os.write(full[1], b"x" * 5000)
            check(False, "a full pipe has room")
        except BlockingIOError:
            pass
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            got = b""
            while len(got) < written:
                got += os.read(full[0], 65536)
            equal(got, whole[:written], "the full pipe")
            equal((os.read(closed[0], 1000), os.read(closed[0], 1000)), (whole[:777], b""), "a pipe without a writer")
            for number, size in enumerate(sizes):
                equal(os.read(packets[0], 65536), pattern(nonce, size, f"packet {number}"), f"packet {number}")
            for reader, writer in (packets, unused):
                os.write(writer, b"one")
                os.write(writer, b"two")
                equal((os.read(reader, 100), os.read(reader, 100)), (b"one", b"two"), "new packets")
            yield
        yield


run(program)
