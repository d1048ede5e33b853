"""The witness judge: reads what ranks wrote to a file outside of their pods and says what really ran when.

A witness line is ``realtime_ns rank nonce body seq`` (tests/programs/pingpong.py). All lines stand in the order in
which they were written, since each is one append to one file. A *body* is one running process: the same rank restored
from a checkpoint is another body with the same nonce. Pure functions over the lines.

What holds for a job of which never two incarnations ran at once:

* The lines of one rank's bodies do not interleave: once a later one has written, an earlier one never does.
* Within a body the sequence numbers follow each other; a later body leaves out none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """One step of one rank, ``number`` lines from the beginning."""

    number: int
    time_ns: int
    rank: int
    nonce: str
    body: str
    seq: int


class Rollback(NamedTuple):
    """A restore: the rank had done ``reached``, its next body began with ``resumed_at``."""

    rank: int
    reached: int
    resumed_at: int
    pause_seconds: float

    @property
    def repeated(self) -> int:
        """Steps that were done twice."""
        return self.reached - self.resumed_at + 1


@dataclass
class Verdict:
    """``faults``: sentences, empty if all is well. ``restores``: in order of the file."""

    faults: list[str] = field(default_factory=list)
    restores: list[Rollback] = field(default_factory=list)
    nonces: dict[int, list[str]] = field(default_factory=dict)  # of each rank, in order of appearance
    reached: dict[int, int] = field(default_factory=dict)  # highest step of each rank

    @property
    def sound(self) -> bool:
        return not self.faults


def read(path: Path) -> list[Line]:
    """The lines of a witness file. A last line without its end is left out: its writer was killed within it."""
    text = path.read_text() if path.exists() else ""
    return parse(text[: text.rfind("\n") + 1].splitlines())


def parse(lines: Iterable[str]) -> list[Line]:
    """Raises ValueError for a line that is none."""
    parsed = []
    for number, line in enumerate(lines):
        time_ns, rank, nonce, body, seq = line.split(" ")
        parsed.append(Line(number, int(time_ns), int(rank), nonce, body, int(seq)))
    return parsed


def judge(lines: Iterable[Line], *, committed: Mapping[int, int] | None = None) -> Verdict:
    """Whether these lines can come from one incarnation at a time.

    ``committed``: for each rank the highest step that a committed checkpoint is known to hold; no restore after that
    line may fall behind it. Give it only when no restore came before that commit.
    """
    verdict = Verdict()
    for rank, own in sorted(_by_rank(lines).items()):
        verdict.nonces[rank] = list(dict.fromkeys(line.nonce for line in own))
        verdict.reached[rank] = max(line.seq for line in own)
        _judge_rank(rank, own, verdict, (committed or {}).get(rank, 0))
    verdict.restores.sort(key=lambda restore: (restore.rank, restore.resumed_at))
    return verdict


def _judge_rank(rank: int, lines: list[Line], verdict: Verdict, committed: int) -> None:
    runs = _runs(lines)
    ended: set[str] = set()
    for run in runs:
        if run[0].body in ended:
            verdict.faults.append(
                f"rank {rank}: two processes at once: {run[0].body} wrote step {run[0].seq} (line {run[0].number}) "
                "after another had taken over"
            )
        ended.add(run[0].body)
        for before, after in pairwise(run):
            if after.seq != before.seq + 1:
                verdict.faults.append(f"rank {rank}: step {after.seq} follows {before.seq} in one process")
    if runs and runs[0][0].seq != 1:
        verdict.faults.append(f"rank {rank}: the first step seen is {runs[0][0].seq}")
    for old, new in pairwise(runs):
        reached, resumed_at = old[-1].seq, new[0].seq
        pause = (new[0].time_ns - old[-1].time_ns) / 1e9
        verdict.restores.append(Rollback(rank, reached, resumed_at, pause))
        if resumed_at > reached + 1:
            verdict.faults.append(f"rank {rank}: steps {reached + 1} to {resumed_at - 1} were done unseen")
        if resumed_at <= committed <= reached:
            verdict.faults.append(f"rank {rank}: went back to step {resumed_at}, behind the committed {committed}")


def _runs(lines: list[Line]) -> list[list[Line]]:
    """Neighbouring lines of the same body.

    A process reads who it is just before it writes. Saved between the two and restored, it writes one line more in its
    old name: a last line that breaks the old order and fits the new one is the new body's.
    """
    runs: list[list[Line]] = []
    for line in lines:
        if runs and runs[-1][-1].body == line.body:
            runs[-1].append(line)
        else:
            runs.append([line])
    for old, new in pairwise(runs):
        if len(old) > 1 and old[-1].seq != old[-2].seq + 1 and old[-1].seq + 1 == new[0].seq:
            new.insert(0, old.pop()._replace(body=new[0].body))
    return runs


def incarnations_overlap(lines: Iterable[Line]) -> list[str]:
    """Sentences about ranks that ran at the same time though they belong to different incarnations.

    The n-th body of each rank is taken for its n-th incarnation, so every rank must have had equally many; else the
    answer is empty, as nothing can be said.
    """
    spans: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, own in _by_rank(lines).items():
        for generation, run in enumerate(_runs(own)):
            spans.setdefault(generation, {})[rank] = (run[0].number, run[-1].number)
    if len({len(ranks) for ranks in spans.values()}) > 1:
        return []
    faults = []
    for generation in range(len(spans) - 1):
        for rank, (_, last) in spans[generation].items():
            for other, (first, _) in spans[generation + 1].items():
                if first < last:
                    faults.append(
                        f"rank {rank} of incarnation {generation + 1} wrote line {last}, after rank {other} of the "
                        f"next one had written line {first}"
                    )
    return faults


def _by_rank(lines: Iterable[Line]) -> dict[int, list[Line]]:
    by_rank: dict[int, list[Line]] = {}
    for line in lines:
        by_rank.setdefault(line.rank, []).append(line)
    return by_rank
