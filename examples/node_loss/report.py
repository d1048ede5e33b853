"""What the demo found: compares the run with the reference, and tells restored ranks from ranks started again.

Everything here is read from files that the ranks themselves wrote: ``steps-rank<r>.txt`` and ``result-rank<r>.json``
(in the job's folder, so they go back with a restore) and the trail (a live folder, which does not).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from moorage.coordinator.client import CheckpointInfo, EventInfo, JobInfo


def trail_steps(trail: Path, rank: int) -> list[tuple[int, float, str]]:
    """All steps that a rank executed, in order, also those done twice: (step, time, loss)."""
    path = trail / f"rank{rank}.txt"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [(int(row[0]), float(row[1]), row[2]) for row in rows if len(row) == 3 and row[0] != "start"]


def starts(trail: Path, rank: int) -> list[tuple[str, int, str]]:
    """Each time that the rank's program began: the nonce, pid and start time that it then had."""
    path = trail / f"rank{rank}.txt"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(row[2], int(row[3]), row[4]) for row in rows if row[0] == "start"]


def went_on(result: dict[str, Any], began: list[tuple[str, int, str]]) -> bool:
    """Whether the rank that wrote ``result`` at its end is the one that began, once, and was restored since.

    Its memory still holds nonce, pid and start time of its one beginning, and its pid is the same. What the kernel says
    of its start time is when the restore made the process anew: a value that moved is the trace of the restore.
    """
    return began == [(result["nonce"], result["pid"], result["start_time"])] and result["pid"] == result["pid_now"]


def steps_after(trail: Path, rank: int, moment: float) -> int:
    """How many steps a rank has made since ``moment``."""
    return sum(when > moment for _, when, _ in trail_steps(trail, rank))


def digest(folder: Path, ranks: int) -> str:
    """One digest over every step's loss and the final weights of all ranks."""
    total = hashlib.sha256()
    for rank in range(ranks):
        total.update((folder / f"steps-rank{rank}.txt").read_bytes())
        total.update(json.loads((folder / f"result-rank{rank}.json").read_text())["digest"].encode())
    return total.hexdigest()


def first_difference(reference: Path, run: Path, ranks: int) -> str:
    """Where the runs first differ, in words; empty if nowhere."""
    for rank in range(ranks):
        expected = (reference / f"steps-rank{rank}.txt").read_text().splitlines()
        found = (run / f"steps-rank{rank}.txt").read_text().splitlines()
        for wanted, got in zip(expected, found, strict=False):
            if wanted != got:
                return f"rank {rank}: expected {wanted!r}, found {got!r}"
        if len(expected) != len(found):
            return f"rank {rank}: {len(found)} steps instead of {len(expected)}"
    return ""


class Attempt(NamedTuple):
    """A checkpoint that was begun. ``started``: seconds since the epoch."""

    attempt: int
    started: float


def begun(events: Iterable[EventInfo]) -> list[Attempt]:
    """All attempts, from the job's story: the coordinator itself remembers the newest only."""
    return [Attempt(event.attempt, event.time) for event in events if event.kind == "checkpoint.started"]


def pauses(trail: Path, ranks: int, attempts: list[Attempt], checkpoints: dict[int, float]) -> list[float]:
    """For each committed attempt the longest time between two steps of a rank around it."""
    found = []
    for attempt in attempts:
        committed = checkpoints.get(attempt.attempt)
        if committed is None:
            continue
        longest = 0.0
        for rank in range(ranks):
            times = [when for _, when, _ in trail_steps(trail, rank)]
            gaps = [
                after - before
                for before, after in itertools.pairwise(times)
                if before <= committed and after >= attempt.started
            ]
            longest = max([longest, *gaps])
        if longest:  # else no rank had made a step yet
            found.append(round(longest, 3))
    return found


def build(
    reference: Path,
    run: Path,
    trail: Path,
    *,
    exit_code: int,
    destroyed: float,
    job: JobInfo,
    checkpoints: list[CheckpointInfo],
    events: list[EventInfo],
    timeline: list[dict[str, Any]],
    ranks: int,
) -> dict[str, Any]:
    """The report, as ``build/demo-report.json`` holds it."""
    results = [json.loads((run / f"result-rank{rank}.json").read_text()) for rank in range(ranks)]
    survived = all(went_on(result, starts(trail, result["rank"])) for result in results)
    attempts = begun(events)
    committed = {a.attempt: event.time for a in attempts for event in events if _commits(event, a.attempt)}
    ordered = next((e.time for e in events if e.time >= destroyed and e.kind.startswith("restore")), destroyed)
    first_again = max(
        next((when for _, when, _ in trail_steps(trail, rank) if when > ordered), 0.0) for rank in range(ranks)
    )
    repeated = executed_since = 0
    before = [a for a in attempts if committed.get(a.attempt, destroyed) < destroyed]
    for rank in range(ranks):
        steps = [(step, when) for step, when, _ in trail_steps(trail, rank)]
        repeated = max(repeated, len(steps) - len({step for step, _ in steps}))
        if before:
            executed_since = max(executed_since, sum(before[-1].started < when < ordered for _, when in steps))
    difference = first_difference(reference, run, ranks)
    expected, found = digest(reference, ranks), digest(run, ranks)
    pause = pauses(trail, ranks, attempts, committed)
    return {
        "equal": expected == found and not difference,
        "first_difference": difference,
        "nonces_survived": survived,
        "processes_made_anew": all(r["start_time"] != r["start_time_now"] for r in results),
        "exit_code": exit_code,
        "steps": results[0]["steps"],
        "steps_repeated": repeated,
        "steps_since_last_commit": executed_since,
        "reference_digest": expected,
        "restored_digest": found,
        "checkpoints": len(committed),
        "checkpoints_kept": [c.id for c in checkpoints],
        "checkpoint_pause_seconds": pause,
        "checkpoint_pause_seconds_worst": max(pause, default=0.0),
        "restore_seconds": round(first_again - ordered, 3),
        "noticed_seconds": round(ordered - destroyed, 3),
        "checkpoint_bytes": [c.bytes_total for c in checkpoints],
        "checkpoint_bytes_new": [c.bytes_new for c in checkpoints],
        "incarnations": job.incarnation,
        "ranks": [
            {key: r[key] for key in ("rank", "nonce", "pid", "pid_now", "start_time", "start_time_now")}
            for r in results
        ],
        "timeline": timeline,
    }


def _commits(event: EventInfo, attempt: int) -> bool:
    return event.kind == "checkpoint.committed" and event.attempt == attempt


def table(result: dict[str, Any]) -> str:
    """The report for people."""
    ranks = ", ".join(f"rank {r['rank']}: nonce {r['nonce'][:8]}… pid {r['pid']}" for r in result["ranks"])
    rows = [
        ("steps", f"{result['steps']}, {result['steps_repeated']} of them computed twice"),
        ("checkpoints committed", str(result["checkpoints"])),
        ("the job stood still", ", ".join(f"{p:.2f} s" for p in result["checkpoint_pause_seconds"])),
        ("loss of the host noticed", f"after {result['noticed_seconds']:.2f} s"),
        ("order to restore, to first step", f"{result['restore_seconds']:.2f} s"),
        ("every loss and weight equal", "yes" if result["equal"] else f"no: {result['first_difference']}"),
        ("ranks restored, not restarted", f"{'yes' if result['nonces_survived'] else 'no'} ({ranks})"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
