"""What the libnccl proxy costs a call, over an NCCL that does nothing.

    python -m bench.nccl_proxy_cost [--calls N] [--times N]          (from the root of the checkout)

An all-reduce, and a group of a send and a receive (four calls), with and without the proxy in turns. No worker, no GPU.
Writes bench/results/nccl_proxy_cost.json; exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import ROOT, Report, Target, spread
from moorage.worker.sandbox import native

PROGRAMS = ROOT / "bench" / "programs"
TARGET = 200.0  #: nanoseconds a call
CALLS_IN_GROUP = 4


def build(folder: Path) -> None:
    """The program and its libraries. Raises `CalledProcessError`."""
    shared = ["-shared", "-fPIC"]
    for name, source, options in (
        ("libcuda.so.1", "nccl_nothing.cpp", [*shared, "-Wl,-soname,libcuda.so.1"]),
        ("libnccl-nothing.so", "nccl_nothing.cpp", [*shared, "-Wl,-soname,libnccl.so.2"]),
        ("nccl_cost", "nccl_cost.cpp", ["-ldl"]),
    ):
        command = ["g++", "-std=c++20", "-O2", "-o", str(folder / name), str(PROGRAMS / source), *options]
        subprocess.run(command, check=True)


def measure(folder: Path, library: Path, calls: int) -> tuple[float, float]:
    """Nanoseconds for an all-reduce and for a group."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(folder),
        "MOORAGE_REAL_LIBNCCL": str(folder / "libnccl-nothing.so"),
        "MOORAGE_NCCL_SOCKET": str(folder / "none"),
    }
    command = [str(folder / "nccl_cost"), str(library), str(calls)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    one, group = map(float, done.stdout.split())
    return one, group


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the libnccl proxy costs a call.")
    parser.add_argument("--calls", type=int, default=2_000_000)
    parser.add_argument("--times", type=int, default=20)
    arguments = parser.parse_args()
    proxy = native.find("libnccl.so.2", "intercept/nccl", variable="MOORAGE_LIBNCCL_PROXY")
    ones, groups = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        for _ in range(arguments.times):
            bare = measure(folder, folder / "libnccl-nothing.so", arguments.calls)
            through = measure(folder, proxy, arguments.calls)
            ones.append(through[0] - bare[0])
            groups.append((through[1] - bare[1]) / CALLS_IN_GROUP)
    figures = {"all_reduce_ns": spread(ones), "call_in_a_group_ns": spread(groups), "times": len(ones)}
    report = Report(
        bench="nccl_proxy_cost",
        figures=figures,
        targets=[
            Target("an all-reduce, median", spread(ones)["median"], "ns", "<=", TARGET),
            Target("a call in a group, median", spread(groups)["median"], "ns", "<=", TARGET),
        ],
    )
    report.show()
    print(f"written: {report.write()}")
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
