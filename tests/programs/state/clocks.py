"""Clocks: monotonic and boot time go on where they stood, also on a host with a smaller uptime; wall clock time."""

import os
import time
from collections.abc import Iterator

from kit import check, run


def program(nonce: bytes) -> Iterator[None]:
    names = ("CLOCK_MONOTONIC", "CLOCK_MONOTONIC_RAW", "CLOCK_MONOTONIC_COARSE", "CLOCK_BOOTTIME", "CLOCK_REALTIME")
    clocks = {name: getattr(time, name, 6) for name in names}
    last = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    cpu = time.process_time()
    uptime = int(os.environ["STATE_UPTIME"])  # no host that comes after the first one has run for so long
    check(last["CLOCK_MONOTONIC"] > uptime and last["CLOCK_BOOTTIME"] > uptime, f"the clocks of the first host: {last}")
    yield
    while True:
        for name, clock in clocks.items():
            now = time.clock_gettime(clock)
            check(now >= last[name], f"{name} went back from {last[name]} to {now}")
            check(now < last[name] + 60 or name == "CLOCK_REALTIME", f"{name} leapt from {last[name]} to {now}")
            last[name] = now
        check(time.process_time() >= 0 or cpu, "the processor time is negative")
        yield


run(program)
