"""Resource limits, soft and hard, as they were set."""

import os
import resource
from collections.abc import Iterator

from kit import check, equal, run

NAMES = (
    "CPU",
    "FSIZE",
    "DATA",
    "STACK",
    "CORE",
    "NOFILE",
    "AS",
    "MEMLOCK",
    "NPROC",
    "SIGPENDING",
    "MSGQUEUE",
    "RTTIME",
)


def program(nonce: bytes) -> Iterator[None]:
    kinds = {name: getattr(resource, f"RLIMIT_{name}") for name in NAMES if hasattr(resource, f"RLIMIT_{name}")}
    most = 200 + nonce[0]
    resource.setrlimit(kinds["NOFILE"], (most, most + 10))
    resource.setrlimit(kinds["CORE"], (0, 4096))
    resource.setrlimit(kinds["FSIZE"], (1 << 40, 1 << 41))
    resource.setrlimit(kinds["STACK"], (8 << 20, resource.getrlimit(kinds["STACK"])[1]))
    wanted = {name: resource.getrlimit(kind) for name, kind in kinds.items()}
    yield
    while True:
        equal({name: resource.getrlimit(kind) for name, kind in kinds.items()}, wanted, "limits")
        files = []
        try:
            for _ in range(most + 1):
                files.append(os.open("/dev/null", os.O_RDONLY))
            check(False, "more files than the limit allows")
        except OSError as error:
            equal(error.errno, 24, "the error at the limit")
        finally:
            for fd in files:
                os.close(fd)
        yield


run(program)
