"""A memfd with seals, mapped by two processes and open in one of them at an offset."""

import fcntl
import mmap
import os
import time
from collections.abc import Iterator

from kit import check, equal, fork, pattern, run

SIZE = 1 << 20


def program(nonce: bytes) -> Iterator[None]:
    fd = os.memfd_create("state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, pattern(nonce, 4096), 8192)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    area = mmap.mmap(fd, SIZE)
    os.lseek(fd, 8192, os.SEEK_SET)

    def child() -> None:
        while True:
            area[1] = area[0]
            time.sleep(0.001)

    fork(child)
    step = 0
    yield
    while True:
        step = (step + 1) % 251
        area[0] = step
        deadline = time.monotonic() + 200
        while area[1] != step:
            check(time.monotonic() < deadline, "the child has another memory")
            time.sleep(0.001)
        equal(os.pread(fd, 2, 0), bytes([step, step]), "descriptor and mapping")
        equal(os.lseek(fd, 0, os.SEEK_CUR), 8192, "the offset")
        equal(os.pread(fd, 4096, 8192), pattern(nonce, 4096), "the content")
        equal(fcntl.fcntl(fd, fcntl.F_GET_SEALS), seals, "the seals")
        try:
            os.ftruncate(fd, 1)
            check(False, "a sealed memfd was cut")
        except PermissionError:
            pass
        yield


run(program)
