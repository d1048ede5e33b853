"""signalfd: signals that wait in it, with their values, and its mask."""

import ctypes
import os
import signal
import struct
from collections.abc import Iterator

from kit import call, equal, libc, run


def program(nonce: bytes) -> Iterator[None]:
    queued = signal.SIGRTMIN + 2
    numbers = {signal.SIGUSR1, signal.SIGUSR2, queued}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    mask = struct.pack("<Q", sum(1 << (number - 1) for number in numbers))
    fd = call("signalfd", -1, mask.ljust(128, b"\0"), os.O_CLOEXEC | os.O_NONBLOCK)
    values = list(nonce[:3])
    for value in values:
        libc.sigqueue(os.getpid(), int(queued), ctypes.c_void_p(value))
    yield
    while True:
        os.kill(os.getpid(), signal.SIGUSR1)
        found = os.read(fd, 128)
        equal((found[0], struct.unpack_from("<I", found, 12)[0]), (signal.SIGUSR1, os.getpid()), "signal and sender")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            waiting = [os.read(fd, 128) for _ in values]
            equal([(f[0], struct.unpack_from("<i", f, 44)[0]) for f in waiting], [(queued, v) for v in values], "queue")
            yield
        yield


run(program)
