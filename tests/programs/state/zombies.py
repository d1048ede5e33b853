"""Children that ended and were not waited for keep their exit code, or the signal that ended them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from kit import equal, run


def program(nonce: bytes) -> Iterator[None]:
    wanted = {}
    for code in (0, nonce[0] % 128, 128, 128 + nonce[1] % 128, 255, -signal.SIGKILL, -signal.SIGTERM):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        wanted[pid] = code
    yield
    while True:
        for pid in wanted:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            equal(state, "Z", f"the state of child {pid}")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            found = {pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in wanted}
            equal(found, wanted, "exit codes")
            yield
        yield


run(program)
