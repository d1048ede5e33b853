"""A file mapped privately: pages that were written are the process's own, the others the file's."""

import mmap
import os
from collections.abc import Iterator

from kit import equal, pattern, run

PAGE = 4096


def program(nonce: bytes) -> Iterator[None]:
    with open("file", "w+b") as file:
        file.write(pattern(nonce, 8 * PAGE))
        file.flush()
        area = mmap.mmap(file.fileno(), 8 * PAGE, flags=mmap.MAP_PRIVATE)
    whole = bytearray(pattern(nonce, 8 * PAGE))
    step = 0
    yield
    while True:
        step += 1
        at = PAGE * (step % 4)  # pages 4 to 7 stay the file's
        whole[at : at + 16] = area[at : at + 16] = pattern(nonce, 16, step)
        equal(area[:], bytes(whole), "the mapping")
        with open("file", "rb") as file:
            equal(file.read(), pattern(nonce, 8 * PAGE), "the file")
        equal(os.path.getsize("file"), 8 * PAGE, "the file's size")
        yield


run(program)
