"""Many random programs against the cut, far more than the tests run, with a record of what came of them.

    python -m bench.cut_campaign [--programs N] [--seed S] [--processes N]     (from the root of the checkout)

Program number i is made from seed S + i alone, so any one that fails can be run again: ``--seed S+i --programs 1``.
Writes bench/results/cut_campaign.json every so often and at the end, so what was done before an early end is kept; exit
code 1 when any program went wrong or not all were run. Needs msgspec and this checkout only (``PYTHONPATH=src``).
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from bench.report import RESULTS, Report, Target, commit, versions
from tests.support.nccl_sim_trial import Trial, trial

SUMS = ("attempts", "cuts", "aborts", "unequal", "midway", "slides", "rounds", "events")
CHUNK = 50
EVERY = 30.0  #: seconds between two writings of the record


class Tally(msgspec.Struct):
    """What came of all programs so far."""

    done: int = 0
    ordered: int = 0
    wrong: int = 0
    sums: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(SUMS, 0))
    wrong_seeds: dict[str, str] = {}
    longest: tuple[float, int] = (0.0, 0)  #: seconds of virtual time that the longest cut took, and its seed
    most_slides: tuple[int, int] = (0, 0)

    def add(self, result: Trial) -> None:
        self.done += 1
        self.ordered += result.ordered
        for name in SUMS:
            self.sums[name] += getattr(result, name)
        if result.ordered:
            self.longest = max(self.longest, (result.longest, result.seed))
            self.most_slides = max(self.most_slides, (result.slides, result.seed))
        if result.problems:
            self.wrong += 1
            print(f"seed {result.seed}: {result.problems[0]}", file=sys.stderr, flush=True)
            if len(self.wrong_seeds) < 50:
                self.wrong_seeds[str(result.seed)] = result.problems[0]


def guarded(seed: int) -> Trial:
    """A trial in which any exception is a problem of that seed, not the end of the campaign."""
    try:
        return trial(seed)
    except Exception as error:
        return Trial(seed, ordered=False, problems=[f"{type(error).__name__}: {error}"])


def report(tally: Tally, arguments: argparse.Namespace, began: float) -> Report:
    """The record of the programs that were run so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)]
    return Report(
        bench="cut_campaign",
        figures={
            "seed": arguments.seed,
            "programs": tally.done,
            "programs_asked_for": arguments.programs,
            "programs_with_the_order": tally.ordered,
            "programs_without_the_order": tally.done - tally.ordered,
            **tally.sums,
            "longest_cut_virtual_seconds": tally.longest[0],
            "longest_cut_seed": tally.longest[1],
            "most_slides": tally.most_slides[0],
            "most_slides_seed": tally.most_slides[1],
            "processes": arguments.processes,
            "seconds": time.perf_counter() - began,
            "cpu_seconds_of_ended_processes": sum(use.ru_utime + use.ru_stime for use in used),
            "failures": tally.wrong,
            "wrong_seeds": tally.wrong_seeds,
        },
        versions=versions("msgspec"),
        targets=[
            Target("failures", tally.wrong, "", "<=", 0),
            Target("programs", tally.done, "", ">=", arguments.programs),
        ],
        commit=arguments.commit or commit(),
    )


def ignore_signals() -> None:
    """In the processes of the pool: the parent ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def campaign(arguments: argparse.Namespace, folder: Path | None) -> Report:
    """Run them all, or as many as there is time for."""
    tally, began = Tally(), time.perf_counter()
    limit = began + arguments.seconds if arguments.seconds else float("inf")
    wrote = began
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    with multiprocessing.get_context("spawn").Pool(arguments.processes, ignore_signals) as pool:
        try:
            for result in pool.imap_unordered(guarded, seeds, chunksize=CHUNK):
                tally.add(result)
                now = time.perf_counter()
                if now - wrote >= EVERY:
                    wrote = now
                    print(
                        f"{tally.done} of {arguments.programs} programs in {now - began:.0f} s, {tally.wrong} wrong",
                        file=sys.stderr,
                        flush=True,
                    )
                    if folder is not None:
                        report(tally, arguments, began).write(folder)
                if now >= limit:
                    break
            else:
                pool.close()
                pool.join()  # so that their times are counted
        except KeyboardInterrupt:
            print("stopped early", file=sys.stderr, flush=True)
    return report(tally, arguments, began)


def stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random programs against the cut.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1_000_000, help="of the first program")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=0.0, help="end after so long; what was done is recorded")
    parser.add_argument("--commit", default="", help="what to record, where the checkout has no git")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the record goes")
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=None, help="write the result")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    # `make bench` runs a small one: it must not replace the record of a large one.
    record = arguments.record if arguments.record is not None else arguments.programs >= 100_000
    found = campaign(arguments, arguments.folder if record else None)
    for name, value in itertools.chain(found.figures.items(), ((t.name, t) for t in found.targets)):
        print(f"{name}: {value}")
    if record:
        print(f"written: {found.write(arguments.folder)}")
    return 0 if found.met() else 1


if __name__ == "__main__":
    sys.exit(main())
