"""A file mapped shared and writable: memory and file are the same, also for a second mapping."""

import mmap
from collections.abc import Iterator

from kit import equal, pattern, run

SIZE = 64 << 10


def program(nonce: bytes) -> Iterator[None]:
    with open("file", "w+b") as file:
        file.truncate(SIZE)
        one = mmap.mmap(file.fileno(), SIZE)
        two = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
    whole = bytearray(SIZE)
    step = 0
    yield
    while True:
        step += 1
        at = step * 997 % (SIZE - 32)
        whole[at : at + 32] = one[at : at + 32] = pattern(nonce, 32, step)
        equal(two[:], bytes(whole), "the second mapping")
        with open("file", "rb") as file:
            equal(file.read(), bytes(whole), "the file")
        yield


run(program)
