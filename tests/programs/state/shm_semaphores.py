"""/dev/shm: files and folders in it, a mapped one without a name, named semaphores with a value."""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator

from kit import check, equal, fork, libc, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    base = f"/dev/shm/state-{nonce.hex()}"
    os.mkdir(base)
    with open(f"{base}/file", "w+b") as file:
        file.write(pattern(nonce, 1 << 20))
        file.flush()
        area = mmap.mmap(file.fileno(), 1 << 20)
    os.symlink("file", f"{base}/link")
    libc.sem_open.restype = ctypes.c_void_p
    names = [f"/state-{nonce.hex()}-{kind}".encode() for kind in ("held", "asked", "answered")]
    held, asked, answered = (
        ctypes.c_void_p(libc.sem_open(name, os.O_CREAT, 0o600, value))
        for name, value in zip(names, (5, 0, 0), strict=True)
    )
    check(held.value, "sem_open")
    libc.sem_unlink(names[2])

    def child() -> None:
        while True:
            libc.sem_wait(asked)
            area[0] = (area[0] + 1) % 256
            libc.sem_post(answered)

    fork(child)
    yield
    while True:
        before = area[0]
        libc.sem_post(asked)
        deadline = time.monotonic() + 200
        while libc.sem_trywait(answered):
            check(time.monotonic() < deadline, "the child does not answer")
            time.sleep(0.001)
        equal(area[0], (before + 1) % 256, "what the child wrote")
        value = ctypes.c_int()
        libc.sem_getvalue(held, ctypes.byref(value))
        equal(value.value, 5, "the semaphore's value")
        with open(f"{base}/link", "rb") as link:
            equal(link.read()[1:], pattern(nonce, 1 << 20)[1:], "the file")
        check(os.path.exists(f"/dev/shm/sem.{names[0][1:].decode()}"), "the name of the semaphore")
        yield


run(program)
