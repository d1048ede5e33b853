"""Deleted files that are open: an empty one, one of megabytes, a sparse one of gigabytes, one in two processes."""

import mmap
import os
import time
from collections.abc import Iterator

from kit import equal, fork, pattern, run

SIZE = 12 << 20


def gone(name: str) -> int:
    fd = os.open(name, os.O_RDWR | os.O_CREAT)
    os.unlink(name)
    return fd


def program(nonce: bytes) -> Iterator[None]:
    empty, large, sparse, mapped = gone("empty"), gone("large"), gone("sparse"), gone("mapped")
    piece = pattern(nonce, 1 << 20)
    for _ in range(SIZE >> 20):
        os.write(large, piece)
    os.pwrite(sparse, piece[:4096], 3 << 30)
    os.pwrite(mapped, piece[:4096], 0)
    area = mmap.mmap(mapped, 4096)
    os.close(mapped)
    unnamed = os.open(".", os.O_TMPFILE | os.O_RDWR)
    os.write(unnamed, piece[:100])

    def child() -> None:
        while True:
            equal(os.pread(large, 100, SIZE - 100), piece[-100:], "the large file, in the child")
            time.sleep(0.02)

    pid = fork(child)
    step = 0
    yield
    while True:
        step += 1
        at = step * 4096 % SIZE
        equal(os.pread(large, 4096, at), piece[at % (1 << 20) :][:4096], "the large file")
        equal((os.fstat(large).st_size, os.fstat(large).st_nlink), (SIZE, 0), "size and links")
        equal(os.lseek(large, 0, os.SEEK_CUR), SIZE, "the offset")
        equal(os.pread(sparse, 4096, 3 << 30), piece[:4096], "the sparse file")
        equal(os.pread(sparse, 4096, 1 << 30), bytes(4096), "a hole")
        equal(os.fstat(sparse).st_blocks < 1000, True, f"blocks of the sparse file: {os.fstat(sparse).st_blocks}")
        equal(os.fstat(empty).st_size, 0, "the empty file")
        equal(area[:], piece[:4096], "the mapped file")
        equal(os.pread(unnamed, 200, 0), piece[:100], "the file that never had a name")
        equal(os.waitpid(pid, os.WNOHANG), (0, 0), "the child")
        yield


run(program)
