"""Writes results in every way that a program writes files; `expected_files` says what must come back to the host.

Reads ``input.txt`` and ``old.txt`` of the working directory; run it with ``--prepare`` beforehand to make them.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import shutil
import sys
import time

_LARGE = 3_000_000


def prepare() -> None:
    """What is in the working directory before the job."""
    for name, text in (("input.txt", "input\n"), ("old.txt", "old\n"), ("obsolete.txt", "x\n"), ("kept.txt", "kept\n")):
        with open(name, "w") as file:
            file.write(text)
    os.makedirs("before/sub", exist_ok=True)
    with open("before/sub/file.txt", "w") as file:
        file.write("moved\n")


def expected_files(steps: int, rank: int = 0) -> dict[str, bytes | str]:
    """All files afterwards, by path, with their contents (bytes) or their targets (text)."""
    log = "".join(f"step {step}\n" for step in range(1, steps + 1)).encode()
    return {
        "kept.txt": b"kept\n",
        "input.txt": b"input\n" + f"seen by {rank}\n".encode(),
        "old.txt": b"replaced\n",
        f"out/rank{rank}/log.txt": log,
        f"out/rank{rank}/large.bin": _large(steps),
        f"out/rank{rank}/mapped.bin": steps.to_bytes(8, "little") + bytes(4088),
        "out/latest": f"rank{rank}/large.bin",
        "after/sub/file.txt": b"moved\n",
    }


def _large(step: int) -> bytes:
    block = hashlib.sha256(b"%d" % step).digest()
    return (block * (_LARGE // 32 + 1))[:_LARGE]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds between steps")
    options = parser.parse_args()
    if options.prepare:
        prepare()
        return 0
    rank = os.environ.get("RANK", "0")
    folder = f"out/rank{rank}"
    os.makedirs(folder, exist_ok=True)
    with open("input.txt", "a") as file:
        file.write(f"seen by {rank}\n")
    with open("new.tmp", "w") as file:
        file.write("replaced\n")
    os.replace("new.tmp", "old.txt")
    os.remove("obsolete.txt")
    os.rename("before", "after")
    with open(f"{folder}/mapped.bin", "wb") as file:
        file.truncate(4096)
    with open(f"{folder}/mapped.bin", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)
    os.symlink(f"rank{rank}/large.bin", "out/latest")
    for step in range(1, options.steps + 1):
        with open(f"{folder}/log.txt", "a") as file:
            file.write(f"step {step}\n")
        with open(f"{folder}/large.tmp", "wb") as file:
            file.write(_large(step))
        os.replace(f"{folder}/large.tmp", f"{folder}/large.bin")
        # Only the page changes: no time stamp tells.
        mapped[:8] = step.to_bytes(8, "little")
        os.makedirs("scratch/deep", exist_ok=True)
        shutil.rmtree("scratch")
        print(f"step {step}", flush=True)
        time.sleep(options.delay)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
