"""torchrun's restarts: from the last checkpoint first, else from nothing, as often as was said."""

from __future__ import annotations

import pytest

from moorage.coordinator.machine.policies import FailurePolicy
from moorage.coordinator.machine.state import FailureKind, JobPolicy

ELASTIC = JobPolicy(elastic=True, max_restarts=5)


@pytest.mark.parametrize("kind", ["rank", "pod", "node", "hang"])
def test_a_restart_first_tries_the_last_checkpoint(kind: FailureKind) -> None:
    decide = FailurePolicy().decide
    assert decide(ELASTIC, kind=kind, restarts=0, in_row=0, has_checkpoint=True).action == "restore"
    assert decide(ELASTIC, kind=kind, restarts=0, in_row=0, has_checkpoint=False).action == "again"


def test_a_checkpoint_that_does_not_help_is_left_for_a_start_from_nothing() -> None:
    decide = FailurePolicy().decide
    assert decide(ELASTIC, kind="rank", restarts=3, in_row=3, has_checkpoint=True).action == "again"
    assert decide(ELASTIC, kind="rank", restarts=5, in_row=0, has_checkpoint=True).action == "fail"


def test_a_job_of_moorage_itself_is_not_run_again_to_meet_the_same_end() -> None:
    decide = FailurePolicy().decide
    plain = JobPolicy(max_restarts=5)
    assert decide(plain, kind="rank", restarts=0, in_row=0, has_checkpoint=False).action == "fail"
    assert decide(plain, kind="rank", restarts=3, in_row=3, has_checkpoint=True).action == "fail"
