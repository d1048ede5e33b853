"""Decisions that may be replaced one by one: what a failure leads to, when a checkpoint is due, what hangs.

All of them are plain functions of plain data; no clock is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from moorage.coordinator.machine.state import FailureKind, JobPolicy

#: Failures of the job itself in a row, with no new checkpoint between them, after which it is given up.
MAX_IN_ROW = 3


class FailureVerdict(msgspec.Struct, frozen=True):
    """``again`` starts from nothing; ``why`` is a clause for the story."""

    action: Literal["restore", "again", "fail"]
    why: str = ""


class FailurePolicy(msgspec.Struct, frozen=True):
    """What follows a failure. Lost nodes count as restarts, but they never make a job that makes no progress."""

    max_in_row: int = MAX_IN_ROW

    def decide(
        self, policy: JobPolicy, *, kind: FailureKind, restarts: int, in_row: int, has_checkpoint: bool
    ) -> FailureVerdict:
        """``restarts`` and ``in_row`` do not count this failure."""
        if policy.on_failure == "fail":
            kept = f"bringing it back is left to {policy.keeper}"
            return FailureVerdict("fail", kept if policy.keeper else "its owner wants no restore")
        if policy.max_restarts and restarts >= policy.max_restarts:
            return FailureVerdict("fail", f"its {policy.max_restarts} restarts are used up")
        if kind != "node" and in_row >= self.max_in_row and policy.elastic and policy.max_restarts:
            return FailureVerdict("again", "its newest checkpoint did not help")
        if kind != "node" and in_row >= self.max_in_row:
            return FailureVerdict("fail", f"it failed {in_row + 1} times with no new checkpoint between")
        if has_checkpoint:
            return FailureVerdict("restore")
        if kind == "rank" and not policy.elastic:
            # The same program from nothing meets the same end: tell the user at once.
            return FailureVerdict("fail", "it has no checkpoint to go back to")
        return FailureVerdict("again")


class HeartbeatPolicy(msgspec.Struct, frozen=True):
    """When the next checkpoint is due: the interval after the end of the last attempt, longer after failures."""

    max_factor: int = 8

    def next_due(self, policy: JobPolicy, *, end: float, failed_attempts: int) -> float:
        """Seconds since the epoch; 0: never. ``end``: when the last attempt ended, or the job came to run."""
        every = policy.checkpoint_every_seconds
        return end + every * min(1 << min(failed_attempts, 16), self.max_factor) if every > 0 else 0.0


class PlacementPolicy(msgspec.Struct, frozen=True):
    """How long a job that failed waits for a node before it is parked. A user who asked is answered at once."""

    patience_seconds: float = 60.0


class Policies(msgspec.Struct, frozen=True):
    """All of them."""

    failure: FailurePolicy = FailurePolicy()
    heartbeat: HeartbeatPolicy = HeartbeatPolicy()
    placement: PlacementPolicy = PlacementPolicy()
    persist_factor: float = 10.0  # persisting beside the running job may take so many attempt deadlines


class Sample(msgspec.Struct, frozen=True):
    """What a pod had used at ``time``: CPU seconds and bytes of output since its start."""

    time: float
    cpu_seconds: float
    output_bytes: int


class HangPolicy(msgspec.Struct, frozen=True):
    """A job hangs when none of its pods made output or used CPU time for ``hang_seconds``.

    One quiet pod is no hang: it may wait for a busy one. ``idle_share`` of one core counts as nothing, because watchdog
    threads wake up now and then. Only samples are evidence: with no news nothing is concluded.
    """

    idle_share: float = 0.005

    def moved(self, active: Sample, new: Sample) -> bool:
        """Whether the pod did something between the sample at which it was last active and ``new``."""
        used = new.cpu_seconds - active.cpu_seconds
        return new.output_bytes != active.output_bytes or used > self.idle_share * max(1.0, new.time - active.time)

    def hangs(self, policy: JobPolicy, active: Mapping[int, Sample], newest: Mapping[int, Sample]) -> float:
        """How long the job hangs, in seconds; 0 if it does not. Both maps: pod to sample, for all pods that live."""
        if policy.hang_seconds <= 0 or not active or set(active) != set(newest):
            return 0.0
        quiet = min(newest[pod].time - active[pod].time for pod in active)
        return quiet if quiet >= policy.hang_seconds else 0.0
