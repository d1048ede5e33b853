"""NVIDIA's NCCL behind the libnccl proxy: what a cut takes on real ranks, and what the proxy costs, paired.

    python -m bench.gpu_nccl [--cuts N] [--blocks N] [--tests F]          (from the root of the checkout)

Needs one or more GPUs; two ranks, on a GPU each if there are two, each a host of its own to NCCL. *Cuts*: DDP training
whose ranks pause at different times is stopped at random instants; from the request until all streams are dry at a
cut, until all communicators are destroyed, and until they are made anew and the gates are open (what of a checkpoint is
NCCL's; nothing is saved here). *Cost*: one process calls NCCL with and without the proxy, block by block.
Writes bench/results/gpu_nccl.json; exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from bench.report import ROOT, Report, Target, commit, gpu, machine, versions
from moorage.worker import gpu_host
from tests.support.nccl_cuts import cut_again_and_again, proxied
from tests.support.nccl_jobs import Program, free_port, rank_environment

PAIR = ROOT / "bench" / "programs" / "nccl_pair.py"
MOST = 1.01
_START_SECONDS = 60.0


def cuts(times: int) -> dict[str, Any]:
    """Median and worst seconds of the steps of a cut."""
    with tempfile.TemporaryDirectory() as folder:
        work = cut_again_and_again(Program("ddp.py"), Path(folder), proxied(), times, beside=False)
        found = asyncio.run(work).cuts
    steps = ("drained", "destroyed", "running")
    figures: dict[str, Any] = {
        step: {"median": statistics.median(one[step] for one in found), "worst": max(one[step] for one in found)}
        for step in steps
    }
    unequal = sum(one["unequal"] for one in found)
    return figures | {"cuts": len(found), "unequal": unequal, "slides": sum(one["slides"] for one in found)}


def cost(blocks: int, seconds: float) -> dict[str, Any]:
    """For each kind of work the time behind the proxy by the time without it, pair by pair."""
    found = proxied()
    extra = {"NCCL_PROXY": found["LD_PRELOAD"], "MOORAGE_REAL_LIBNCCL": found["MOORAGE_REAL_LIBNCCL"]}
    program, port = Program("ddp.py"), free_port()
    command = [sys.executable, str(PAIR), str(blocks), str(seconds)]
    ranks = [
        subprocess.Popen(
            command, env=rank_environment(program, rank, port, "bench") | extra, stdout=subprocess.PIPE, text=True
        )
        for rank in range(program.world)
    ]
    try:
        output = [rank.communicate(timeout=3 * seconds + _START_SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    figures: dict[str, Any] = {}
    for name, (behind, bare) in json.loads(output[0].splitlines()[-1]).items():
        pairs = list(zip(behind, bare, strict=True))
        figures[name] = {
            "ratio": statistics.median(one[1] / other[1] for one, other in pairs),
            "microseconds behind the proxy": statistics.median(one[1] for one, _ in pairs) * 1e6,
            "microseconds without it": statistics.median(other[1] for _, other in pairs) * 1e6,
            "microseconds more until the calls return": statistics.median(one[0] - other[0] for one, other in pairs)
            * 1e6,
            "pairs": len(pairs),
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=12.0, help="at most, for each kind of work")
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    parser.add_argument("--tests", type=Path, help="lines of tests/gpu/test_nccl_cuts.py, to stand beside the figures")
    options = parser.parse_args()
    figures: dict[str, Any] = {"gpus": len(gpu_host.information())}
    targets: list[Target] = []
    if options.tests is not None and options.tests.exists():
        figures["programs"] = [json.loads(line) for line in options.tests.read_text().splitlines()]
        differing = sum(not line["equal"] for line in figures["programs"])
        targets.append(Target("programs that did not end as undisturbed", differing, "", "<=", 0))
    failed = False
    try:
        if options.blocks:
            figures["cost"] = cost(options.blocks, options.seconds)
            targets += [
                Target(f"{name}, times slower", one["ratio"], "", "<=", MOST) for name, one in figures["cost"].items()
            ]
    except Exception:  # the other part is worth having without this one
        traceback.print_exc()
        failed = True
    if options.cuts:
        figures["cut"] = cuts(options.cuts)
        targets += [
            Target("from request to drained, worst", figures["cut"]["drained"]["worst"], "s", "<=", 2.0),
            Target("from restored to running, worst", figures["cut"]["running"]["worst"], "s", "<=", 2.0),
        ]
    report = Report(
        bench="gpu_nccl", figures=figures, targets=targets, versions=versions("torch", "nvidia-nccl-cu13"),
        machine=machine() | gpu(), commit=options.commit or commit(),
    )  # fmt: skip
    report.write()
    report.show()
    return 0 if report.met() and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
