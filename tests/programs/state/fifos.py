"""FIFOs: with data in them, open at both ends in two processes, and one whose name was removed."""

import os
from collections.abc import Iterator

from kit import equal, fork, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    for name in ("there", "back", "ahead", "gone"):
        os.mkfifo(name)
    ahead = os.open("ahead", os.O_RDWR)
    os.write(ahead, pattern(nonce, 500, 0))
    gone = os.open("gone", os.O_RDWR)
    os.write(gone, pattern(nonce, 500, "gone"))
    os.unlink("gone")

    def child() -> None:
        source, sink = os.open("there", os.O_RDONLY), os.open("back", os.O_WRONLY)
        while word := os.read(source, 100):
            os.write(sink, word + b"!")

    fork(child)
    sink, source = os.open("there", os.O_WRONLY), os.open("back", os.O_RDONLY)
    step = 0
    yield
    while True:
        step += 1
        os.write(sink, b"%d" % step)
        equal(os.read(source, 100), b"%d!" % step, "the answer")
        os.write(ahead, pattern(nonce, 500, step))
        equal(os.read(ahead, 500), pattern(nonce, 500, step - 1), "what was in the FIFO")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal(os.read(gone, 1000), pattern(nonce, 500, "gone"), "the FIFO without a name")
            yield
        yield


run(program)
