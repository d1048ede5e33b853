"""What becomes of a job when an etcd from an older backup is accepted: it is parked, above every incarnation of it."""

from __future__ import annotations

import pytest

from moorage.coordinator.machine.state import JobState, Seat, Target
from moorage.coordinator.restored import LEAP, leapt

SEATS = (Seat("a", 10.0, True), Seat("b", 10.0, True))


def running(**changes: object) -> JobState:
    known = {"phase": "running", "incarnation": 3, "seats": SEATS, "attempts": 2, "latest": "j-0002", "base": "j-0002"}
    return JobState(job="j", name="j", owner="user:ann", pods=2, **(known | changes))  # type: ignore[arg-type]


def test_nothing_older_runs_before_every_place_where_it_may_be_is_fenced() -> None:
    job = leapt(running(), {"b": (5.0, True), "c": (5.0, False)})
    assert (job.phase, job.incarnation, job.seats, job.latest) == ("parking", 3 + LEAP, (), "j-0002")
    assert set(job.fencing) >= {Target(pod, node, 5.0, node == "b") for pod in (0, 1) for node in ("b", "c")}
    assert Target(0, "a", 10.0, True) in job.fencing


@pytest.mark.parametrize("phase", ["parked", "pending"])
def test_a_job_with_no_node_that_could_hold_it_is_parked_at_once(phase: str) -> None:
    job = leapt(running(phase=phase, seats=()), {})
    assert (job.phase, job.fencing, job.bringup) == ("parked", (), None)
