"""Many random programs against the cut, far more than the tests run, with a record of what came of them.

    python -m bench.cut_campaign [--programs N] [--first SEED] [--processes N]     (from the root of the checkout)

Program number s is made from seed s alone, so any one that fails can be run again: ``--first s --programs 1``. Writes
bench/results/cut_campaign.json; exit code 1 when any program went wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from bench.report import Report, Target, versions
from tests.support.nccl_sim_trial import Trial, trial

SUMS = ("cuts", "aborts", "unequal", "midway", "slides", "admitted", "rounds", "events")


def guarded(seed: int) -> Trial:
    """A trial in which any exception is a problem of that seed, not the end of the campaign."""
    try:
        return trial(seed)
    except Exception as error:
        return Trial(seed, ordered=seed > 0, problems=[f"{type(error).__name__}: {error}"])


def campaign(first: int, programs: int, processes: int) -> Report:
    totals = dict.fromkeys(SUMS, 0)
    failed: list[Trial] = []
    ordered, longest, most_slides = 0, (0.0, 0), (0, 0)
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.imap_unordered(guarded, range(first, first + programs), chunksize=50)
        for number, result in enumerate(found, 1):
            for name in SUMS:
                totals[name] += getattr(result, name)
            ordered += result.ordered
            if result.ordered:
                longest = max(longest, (result.longest, result.seed))
                most_slides = max(most_slides, (result.slides, result.seed))
            if result.problems:
                failed.append(result)
                print(f"seed {result.seed}: {result.problems[0]}", file=sys.stderr, flush=True)
            if number % 5000 == 0:
                print(f"{number} programs, {len(failed)} wrong", file=sys.stderr, flush=True)
    figures = {
        "first_seed": first,
        "programs": programs,
        "programs_with_the_order": ordered,
        "programs_without_the_order": programs - ordered,
        **totals,
        "longest_cut_virtual_seconds": longest[0],
        "longest_cut_seed": longest[1],
        "most_slides": most_slides[0],
        "most_slides_seed": most_slides[1],
        "seconds": time.perf_counter() - began,
        "wrong_seeds": {str(result.seed): result.problems[0] for result in failed[:50]},
    }
    return Report(
        bench="cut_campaign",
        figures=figures,
        versions=versions("msgspec"),
        targets=[Target("programs that went wrong", len(failed), "", "<=", 0)],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random programs against the cut.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=None, help="write the result")
    arguments = parser.parse_args()
    report = campaign(arguments.first, arguments.programs, arguments.processes)
    report.show()
    # `make bench` runs a small one: it must not replace the record of a large one.
    if arguments.record or (arguments.record is None and arguments.programs >= 100_000):
        print(f"written: {report.write()}")
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
