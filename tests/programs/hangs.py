"""Works for some steps, then neither prints nor computes anything ever again, as a deadlock does."""

from __future__ import annotations

import argparse
import threading
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--after", type=int, default=3, help="steps")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds between steps")
    options = parser.parse_args()
    for step in range(1, options.after + 1):
        print(f"step {step}", flush=True)
        time.sleep(options.delay)
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


if __name__ == "__main__":
    main()
