"""Interval timers: real, virtual and profiling time, and a far alarm that keeps its distance."""

import signal
import time
from collections.abc import Iterator

from kit import check, run

TIMERS = {
    signal.ITIMER_REAL: signal.SIGALRM,
    signal.ITIMER_VIRTUAL: signal.SIGVTALRM,
    signal.ITIMER_PROF: signal.SIGPROF,
}


def program(nonce: bytes) -> Iterator[None]:
    seen = dict.fromkeys(TIMERS.values(), 0)

    def tick(number: int, _frame: object) -> None:
        seen[signal.Signals(number)] += 1

    for timer, number in TIMERS.items():
        signal.signal(number, tick)
        signal.setitimer(timer, 0.01, 0.01)
    yield
    while True:
        before, deadline = dict(seen), time.monotonic() + 200
        while any(seen[number] == before[number] for number in seen):
            check(time.monotonic() < deadline, f"a timer stands still: {before} {seen}")
        for timer in TIMERS:
            check(abs(signal.getitimer(timer)[1] - 0.01) < 0.005, "an interval changed")
        yield
        time.sleep(0.05)


run(program)
