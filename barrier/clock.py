"""The clock that local deadlines are counted on.

CLOCK_BOOTTIME, not CLOCK_MONOTONIC: a lease runs on in etcd while this machine is suspended, so a deadline must too.
All processes of one machine that share a time namespace read the same value, so a deadline can be handed to a guard.
"""

from __future__ import annotations

import asyncio
import time

# The event loop's timers stand still while the machine is suspended: look at the clock at least this often.
_SLICE = 1.0


def now() -> float:
    """Seconds since boot, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def sleep_until(deadline: float) -> None:
    """Return once `now` has reached ``deadline``; at once if it already has."""
    await wait_until(asyncio.Event(), deadline)


async def wait_until(event: asyncio.Event, deadline: float) -> bool:
    """Wait for ``event``, at most until ``deadline``; returns whether it is set."""
    while not event.is_set() and (left := deadline - now()) > 0:
        try:
            await asyncio.wait_for(event.wait(), min(left, _SLICE))
        except TimeoutError:
            continue
    return event.is_set()
