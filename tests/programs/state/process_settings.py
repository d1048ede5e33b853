"""What prctl and the like set: name, death signal, a seccomp filter of the process's own; a pidfd."""

import ctypes
import os
import select
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from kit import call, equal, fork, libc, run


def program(nonce: bytes) -> Iterator[None]:
    name = nonce.hex()[:15].encode()
    libc.prctl(15, name)
    libc.prctl(1, 12)
    # A filter that answers EDOM (33) to `acct`, all else allowed.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, 163), (0x06, 0, 0, 0x00050000 | 33), (0x06, 0, 0, 0x7FFF0000)]
    program_bytes = b"".join(struct.pack("<HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program_bytes)
    call("prctl", 38, 1, 0, 0, 0)
    call("prctl", 22, 2, struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(buffer)), 0, 0)

    def child() -> None:
        while True:
            time.sleep(1000)

    pid = fork(child)
    handle = os.pidfd_open(pid)
    yield
    while True:
        equal(Path("/proc/self/comm").read_bytes().strip(), name, "the name")
        held = ctypes.c_int()
        libc.prctl(2, ctypes.byref(held))
        equal(held.value, 12, "the death signal")
        ctypes.set_errno(0)
        equal((libc.acct(None), ctypes.get_errno()), (-1, 33), "the seccomp filter")
        equal(select.select([handle], [], [], 0)[0], [], "the pidfd")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            os.kill(pid, 9)
            equal(select.select([handle], [], [], 20)[0], [handle], "the pidfd of one that ended")
            yield
        yield


run(program)
