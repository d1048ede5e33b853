"""Counts, then exits with the code that it was told."""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--after", type=int, default=3, help="steps")
    parser.add_argument("--code", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds between steps")
    parser.add_argument("--rank", type=int, default=-1, help="only this rank; the others wait for ever")
    parser.add_argument("--signal", type=int, default=0, help="die of this signal instead")
    options = parser.parse_args()
    for step in range(1, options.after + 1):
        print(f"step {step}", flush=True)
        time.sleep(options.delay)
    while options.rank >= 0 and os.environ.get("RANK") != str(options.rank):
        time.sleep(3600)
    print("last words on stderr", file=sys.stderr, flush=True)
    if options.signal:
        os.kill(os.getpid(), options.signal)
    return int(options.code)


if __name__ == "__main__":
    sys.exit(main())
