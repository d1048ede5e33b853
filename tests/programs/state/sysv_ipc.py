"""System V: shared memory (attached, and of a segment marked for removal), semaphores, messages that wait."""

import ctypes
import os
import struct
import time
from collections.abc import Iterator

from kit import call, check, equal, fork, libc, pattern, run

CREATE, REMOVE, SETVAL, GETVAL = 0o1600, 0, 16, 12


def program(nonce: bytes) -> Iterator[None]:
    libc.shmat.restype = ctypes.c_void_p
    libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    key = int.from_bytes(nonce[:3], "little") + 1
    segment = call("shmget", key, 65536, CREATE)
    address = libc.shmat(segment, None, 0)
    marked = call("shmget", 0, 4096, CREATE)
    other = libc.shmat(marked, None, 0)
    call("shmctl", marked, REMOVE, None)
    area = (ctypes.c_char * 65536).from_address(address)
    removed = (ctypes.c_char * 4096).from_address(other)
    area[100:200], removed[:100] = pattern(nonce, 100), pattern(nonce, 100)
    semaphores = call("semget", key, 2, CREATE)
    call("semctl", semaphores, 0, SETVAL, nonce[0] + 1)
    queue = call("msgget", key, CREATE)
    for kind in (3, 1, 2):
        call("msgsnd", queue, struct.pack("<q", kind) + pattern(nonce, 50, kind), 50, 0)

    def child() -> None:
        while True:
            area[1] = area[0]
            time.sleep(0.001)

    fork(child)
    step = 0
    yield
    while True:
        step = step % 200 + 1
        area[0] = bytes([step])
        deadline = time.monotonic() + 200
        while area[1] != bytes([step]):
            check(time.monotonic() < deadline, "the child has other memory")
            time.sleep(0.001)
        equal(area[100:200], pattern(nonce, 100), "shared memory")
        equal(removed[:100], pattern(nonce, 100), "memory whose segment is marked for removal")
        equal(call("semctl", semaphores, 0, GETVAL), nonce[0] + 1, "the semaphore")
        equal(call("shmget", key, 65536, 0o600), segment, "the segment's id")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            for kind in (1, 2, 3):
                buffer = ctypes.create_string_buffer(100)
                equal(call("msgrcv", queue, buffer, 80, kind, 0), 50, "the length of a message")
                equal(buffer.raw[8:58], pattern(nonce, 50, kind), "a message")
            yield
        yield


run(program)
