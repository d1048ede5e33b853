"""A job with an effect outside: at each step it has a ledger book an amount.

A restore does the last steps again, and so makes their calls again; because each call carries the number of its step,
nothing is booked twice. ``job.py URL STEPS``. The key must not hold anything that a restore changes (time, pid,
incarnation, a random number that is drawn after the checkpoint), or the repeated call would be a new one.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request

from moorage import hooks


def book(url: str, step: int) -> None:
    """One call, made again until it is answered: a connection that a move has cut is an error here, not the end."""
    key = f"{os.environ['MOORAGE_JOB']}-{os.environ['MOORAGE_RANK']}-{step}"
    request = urllib.request.Request(f"{url}/book", data=str(step).encode(), headers={"Idempotency-Key": key})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as reply:
                reply.read()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)


@hooks.after_restore
def tell(event: hooks.Event) -> None:
    """The first thing after a restore: whatever was said since the checkpoint will be said again."""
    print(f"incarnation {event.id}: going on from {hooks.environment()['MOORAGE_CHECKPOINT']}", flush=True)


def main() -> None:
    url, steps = sys.argv[1], int(sys.argv[2])
    for step in range(1, steps + 1):
        book(url, step)
        print(f"step {step}", flush=True)
        time.sleep(0.05)


main()
