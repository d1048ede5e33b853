"""Children and grandchildren: who is whose parent, names, the death signal, exit codes that come later."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from kit import check, equal, fork, libc, run


def program(nonce: bytes) -> Iterator[None]:
    name = nonce.hex()[:15].encode()
    read, write = os.pipe()
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def grandchild() -> None:
        os.write(write, b"%d\n" % os.getpid())
        while True:
            time.sleep(1000)

    def child() -> None:
        libc.prctl(15, name)
        fork(grandchild)
        signal.sigwait({signal.SIGUSR1})
        os._exit(37)

    pid = fork(child)
    grand = int(os.read(read, 20))
    libc.prctl(36, 1)  # orphans become children of this process
    me = os.getpid()
    yield
    while True:
        equal(os.getpid(), me, "the process id")
        status = Path(f"/proc/{grand}/status").read_text()
        check(f"PPid:\t{pid}\n" in status, "the grandchild has another parent")
        equal(Path(f"/proc/{pid}/comm").read_bytes().strip(), name, "the child's name")
        equal(os.waitpid(-1, os.WNOHANG), (0, 0), "children that ended")
        held = ctypes.c_int()
        libc.prctl(37, ctypes.byref(held))
        equal(held.value, 1, "who takes orphans")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            os.kill(pid, signal.SIGUSR1)
            ended = os.waitpid(pid, 0)
            equal(os.waitstatus_to_exitcode(ended[1]), 37, "the child's exit code")
            # The child's death signal ends the grandchild, who has come to this process.
            ended = os.waitpid(grand, 0)
            equal(os.waitstatus_to_exitcode(ended[1]), -9, "the end of the grandchild")
            yield
        yield


run(program)
