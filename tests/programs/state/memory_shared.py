"""Anonymous memory shared with children, who count in turns with the parent."""

import mmap
import os
import struct
import time
from collections.abc import Iterator

from kit import check, equal, fork, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    area = mmap.mmap(-1, 1 << 20)
    area[4096 : 4096 + 32] = pattern(nonce, 32)

    def child() -> None:
        while True:
            (turn,) = struct.unpack_from("<Q", area)
            if turn % 2:
                equal(area[4096 : 4096 + 32], pattern(nonce, 32), "the shared pattern, in the child")
                struct.pack_into("<Q", area, 0, turn + 1)
            time.sleep(0.002)

    pid = fork(child)
    turn = 0
    yield
    while True:
        struct.pack_into("<Q", area, 0, turn + 1)
        deadline = time.monotonic() + 200
        while struct.unpack_from("<Q", area)[0] != turn + 2:
            check(time.monotonic() < deadline, "the child no longer shares the memory")
            check(os.waitpid(pid, os.WNOHANG) == (0, 0), "the child has ended")
            time.sleep(0.002)
        turn += 2
        equal(area[4096 : 4096 + 32], pattern(nonce, 32), "the shared pattern")
        yield


run(program)
