"""Credentials: groups, capabilities (dropped, inheritable, ambient, bounding), securebits, no_new_privs, dumpable."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from kit import call, equal, libc, run

KILL, CHOWN, SETPCAP, MKNOD = 5, 0, 8, 27
FIELDS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


def found() -> list[str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = [line for line in lines if line.split(":")[0] in FIELDS]
    return [*fields, f"securebits {libc.prctl(27)}", f"dumpable {libc.prctl(3)}", f"keepcaps {libc.prctl(7)}"]


def program(nonce: bytes) -> Iterator[None]:
    os.setgroups([3, 1000 + nonce[0], 70000])
    call("prctl", 24, MKNOD, 0, 0, 0)
    bits = sum(1 << cap for cap in (KILL, CHOWN, SETPCAP))
    header = struct.pack("<Ii", 0x20080522, 0)
    call("capset", header, struct.pack("<IIIIII", bits & ~(1 << CHOWN), bits, 1 << KILL, 0, 0, 0))
    call("prctl", 47, 2, KILL, 0, 0)
    call("prctl", 28, 0b1010, 0, 0, 0)  # no fixup of setuid, no raising of ambient ones… as far as allowed
    call("prctl", 38, 1, 0, 0, 0)
    wanted = found()
    yield
    while True:
        equal(found(), wanted, "credentials")
        yield


run(program)
