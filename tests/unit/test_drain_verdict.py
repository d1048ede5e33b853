"""How a job of a drain stands, and what is asked of it."""

from __future__ import annotations

from typing import Any

import pytest

from moorage.coordinator.drain.record import MoveRecord
from moorage.coordinator.drain.verdict import TRIES, judge, request_id
from moorage.coordinator.machine.state import AttemptState, Finding, JobState, Queued, Request, Seat

MOVE = MoveRecord(job="j", name="j", wave=1, source=("a",), target=("b",))


def state(phase: str = "running", node: str = "a", **more: Any) -> JobState:
    seats = (Seat(node),) if phase not in ("parked", "finished") else ()
    return JobState(job="j", name="j", owner="me", pods=1, phase=phase, incarnation=1, seats=seats, **more)  # type: ignore[arg-type]


def aborted(error_kind: str, **more: Any) -> JobState:
    attempt = AttemptState(
        number=1, incarnation=1, kind="stop", purpose="move", step="aborted", error_kind=error_kind, **more
    )
    return state(past=(attempt,), attempts=1, requests=(Request(request_id("d", MOVE), "move", 1),))


def test_a_job_that_runs_on_a_node_of_the_drain_is_asked_to_move_once() -> None:
    assert judge("d", MOVE, state(), {"a"}).ask
    under_way = state(requests=(Request(request_id("d", MOVE), "move", 1),), attempts=1)
    assert judge("d", MOVE, under_way, {"a"}) == judge("d", MOVE, state("restoring"), {"a"})
    assert not judge("d", MOVE, under_way, {"a"}).ask
    assert not judge("d", MOVE, state(queued=Queued(purpose="park")), {"a"}).ask


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (state(node="b"), "moved"),
        (state("checkpointing", node="b"), "moved"),
        (state("parked", why_parked="no room"), "parked"),
        (state("finished", reason="done"), "ended"),
        (None, "ended"),
        (state("starting"), None),
        (state("restoring", node="b"), None),
    ],
)
def test_where_it_ends(found: JobState | None, verdict: str | None) -> None:
    assert judge("d", MOVE, found, {"a"}).state == verdict


def test_a_job_that_found_no_place_is_told_from_one_that_somebody_parked() -> None:
    assert judge("d", MOVE, state("parked", why_parked="no room", error_kind="NoCapacity"), {"a"}).unplaced
    assert not judge("d", MOVE, state("parked", why_parked="asked for"), {"a"}).unplaced


def test_what_cannot_be_saved_is_named_with_its_cures_and_not_tried_again() -> None:
    finding = Finding("process 7", "it is traced", "detach the debugger")
    found = judge("d", MOVE, aborted("Refused", reason="process 7 is traced", refusals=(finding,)), {"a"})
    assert (found.state, found.reason) == ("failed", "process 7 is traced")
    assert found.choices[0] == "process 7: detach the debugger" and "moorage stop j" in found.choices


def test_a_cure_is_named_once() -> None:
    findings = (Finding("process 7", "it is traced", "detach it"), Finding("process 7", "again", "detach it"))
    found = judge("d", MOVE, aborted("Refused", reason="no", refusals=findings, hint="detach it"), {"a"})
    assert found.choices == ("process 7: detach it", "moorage stop j")


def test_what_may_work_the_next_time_is_tried_again_but_not_for_ever() -> None:
    import msgspec

    assert judge("d", MOVE, aborted("DeadlineExceeded"), {"a"}).ask
    last = msgspec.structs.replace(MOVE, tries=TRIES - 1)
    tried = msgspec.structs.replace(aborted("AttemptAborted"), requests=(Request(request_id("d", last), "move", 1),))
    assert judge("d", last, tried, {"a"}).state == "failed"
