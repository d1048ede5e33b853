"""A process that became another user and another group, with and without capabilities kept."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from kit import Lacks, call, equal, fork, libc, run


def fields(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("Uid", "Gid", "Groups", "Cap"))]


def program(nonce: bytes) -> Iterator[None]:
    if why := os.environ.get("STATE_LACKS_RESOURCE"):
        raise Lacks(why)
    read, write = os.pipe()

    def child() -> None:
        call("prctl", 8, 1, 0, 0, 0)
        os.setgroups([50])
        os.setresgid(1001, 1002, 1003)
        os.setresuid(2001, 2002, 2003)
        libc.prctl(1, 9)  # a change of user takes the death signal back
        os.write(write, b"x")
        while True:
            time.sleep(1000)

    pid = fork(child)
    os.read(read, 1)
    wanted = fields(pid)
    yield
    while True:
        equal(fields(pid), wanted, "the child's credentials")
        yield


run(program)
