"""Which checkpoints to forget: a pure decision."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Retained(Protocol):
    """What the decision looks at; `moorage.records.CheckpointRecord` has it."""

    @property
    def checkpoint(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def pinned(self) -> bool: ...


C = TypeVar("C", bound=Retained)


def forget(checkpoints: Iterable[C], keep_last: int) -> list[C]:
    """Those of ``checkpoints`` to forget, oldest first: of each job all but the newest ``keep_last`` and the pinned.

    The newest of a job is never forgotten, whatever ``keep_last`` says; pinned ones do not count towards it.
    Checkpoints of a job are ordered by attempt.
    """
    by_job: dict[str, list[C]] = {}
    for checkpoint in checkpoints:
        by_job.setdefault(checkpoint.job, []).append(checkpoint)
    old: list[C] = []
    for found in by_job.values():
        found.sort(key=lambda c: c.attempt)
        loose = [c for c in found if not c.pinned and c is not found[-1]]
        kept = max(keep_last, 1) - (0 if found[-1].pinned else 1)
        old += loose[: max(0, len(loose) - kept)]
    return sorted(old, key=lambda c: (c.job, c.attempt))
