"""Ignores every signal that can be ignored, and its children do, too: only SIGKILL ends it."""

from __future__ import annotations

import os
import signal
import time


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one write: two processes share the pipe


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda got, _: say(f"ignored signal {got}"))
    child = os.fork()
    say(f"ready {'child' if child == 0 else 'parent'} pid={os.getpid()}")
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
