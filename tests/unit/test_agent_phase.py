from __future__ import annotations

import typing

import pytest

from moorage.errors import Conflict
from moorage.worker.pod_phase import (
    ATTEMPT_PHASES,
    GONE_PHASES,
    LIVING_PHASES,
    STEPS,
    TRANSITIONS,
    Change,
    Phase,
    follow,
    step_done,
)

PHASES = typing.get_args(Phase)


def test_every_phase_is_living_or_gone() -> None:
    assert sorted(LIVING_PHASES + GONE_PHASES) == sorted(PHASES)


def test_pairs_outside_the_table_are_refused() -> None:
    for phase in PHASES:
        for change in Change:
            if (phase, change) in TRANSITIONS:
                assert follow(phase, change) == TRANSITIONS[phase, change]
            else:
                with pytest.raises(Conflict):
                    follow(phase, change)


def test_every_phase_can_be_reached() -> None:
    reached = {"starting"}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached:
        reached |= more
    assert reached == set(PHASES)


def test_nothing_comes_back_from_the_dead() -> None:
    for phase in GONE_PHASES:
        assert {after for (before, _), after in TRANSITIONS.items() if before == phase} == {"killed"}


def test_a_frozen_phase_runs_again_only_when_thawed() -> None:
    for (before, change), after in TRANSITIONS.items():
        if before in ("frozen", "sealed", "captured") and after == "running":
            assert change is Change.THAWED


def test_an_attempt_walks_through_its_phases_in_order() -> None:
    phase: Phase = "running"
    for step, (before, after) in STEPS.items():
        assert phase == before
        assert not step_done(step, phase, order_attempt=4, pod_attempt=0 if step == "prepare" else 4, last_attempt=3)
        phase = after
        assert step_done(step, phase, order_attempt=4, pod_attempt=4, last_attempt=4)


def test_a_repeated_earlier_order_is_answered_and_not_carried_out() -> None:
    assert step_done("freeze", "captured", order_attempt=2, pod_attempt=2, last_attempt=2)


def test_an_order_that_skips_a_step_is_refused() -> None:
    with pytest.raises(Conflict, match="must be frozen first"):
        step_done("seal", "preparing", order_attempt=2, pod_attempt=2, last_attempt=2)


def test_orders_of_another_attempt_are_refused() -> None:
    with pytest.raises(Conflict, match="attempt 3 is under way"):
        step_done("capture", "sealed", order_attempt=2, pod_attempt=3, last_attempt=3)
    with pytest.raises(Conflict, match="in no attempt"):
        step_done("freeze", "running", order_attempt=2, pod_attempt=0, last_attempt=2)


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_is_over_cannot_be_prepared_again(attempt: int) -> None:
    with pytest.raises(Conflict, match="is over"):
        step_done("prepare", "running", order_attempt=attempt, pod_attempt=0, last_attempt=2)


@pytest.mark.parametrize("phase", ATTEMPT_PHASES)
def test_a_second_attempt_waits_for_the_first(phase: Phase) -> None:
    with pytest.raises(Conflict):
        step_done("prepare", phase, order_attempt=5, pod_attempt=4, last_attempt=4)


@pytest.mark.parametrize("phase", GONE_PHASES)
@pytest.mark.parametrize("step", list(STEPS))
def test_a_pod_without_processes_has_nothing_to_do(phase: Phase, step: str) -> None:
    assert step_done(step, phase, order_attempt=5, pod_attempt=0, last_attempt=4)
