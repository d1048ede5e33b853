"""Nice value, scheduling policy, processor affinity, also of single threads; timer slack, OOM score."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kit import equal, libc, run


def program(nonce: bytes) -> Iterator[None]:
    base = os.getpriority(os.PRIO_PROCESS, 0)
    cpus = sorted(os.sched_getaffinity(0))
    threads: list[int] = []
    started = threading.Barrier(4)

    def worker(number: int) -> None:
        own = threading.get_native_id()
        threads.append(own)
        os.sched_setaffinity(own, {cpus[number % len(cpus)]})
        os.setpriority(os.PRIO_PROCESS, own, min(19, base + 2 + number))
        started.wait()
        while True:
            time.sleep(1000)

    for number in range(3):
        threading.Thread(target=worker, args=(number,), daemon=True).start()
    started.wait()
    os.setpriority(os.PRIO_PROCESS, 0, min(19, base + 1))
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.sched_setaffinity(0, {cpus[-1]})
    libc.prctl(29, 123456)
    Path("/proc/self/oom_score_adj").write_text("321")
    tasks = [os.getpid(), *threads]

    def found() -> object:
        each = [(os.getpriority(os.PRIO_PROCESS, t), os.sched_getscheduler(t), os.sched_getaffinity(t)) for t in tasks]
        return each, libc.prctl(30), Path("/proc/self/oom_score_adj").read_text().strip()

    wanted = found()
    yield
    while True:
        equal(found(), wanted, "scheduling")
        yield


run(program)
