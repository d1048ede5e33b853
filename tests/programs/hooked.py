"""Says into a live file what it is told of its checkpoints and restores, by signal and by callback.

``hooked.py FILE``: one line each, appended at once; ``MOORAGE_TEST_SIGNALS`` names the signals.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from moorage import hooks

_file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def say(text: str) -> None:
    os.write(_file, f"{text}\n".encode())


def main() -> None:
    for name in os.environ["MOORAGE_TEST_SIGNALS"].split(","):
        signal.signal(getattr(signal, name), lambda number, _: say(f"signal {signal.Signals(number).name}"))
    for kind in hooks.KINDS:
        hooks.on(kind, lambda event: say(f"callback {event.kind} {event.id} {hooks.incarnation()}"))
    say(f"start {hooks.incarnation()}")
    while True:
        time.sleep(0.02)


main()
