"""Every failpoint of the coordinator, the workers and the guards: the process that passes it is killed there.

The lanes of the matrix (tests/support/faults.py) run side by side, each on a cluster of its own with a job that lives
through all of its operations and in the end must have computed what it would have computed undisturbed.
"""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from tests.support import faults

pytestmark = pytest.mark.early


def test_every_transition_of_the_state_machine_has_its_failpoints() -> None:
    assert faults.transitions() <= faults.declared()


def test_every_failpoint_is_reached_by_some_scenario_or_says_why_not() -> None:
    declared, covered, excused = faults.declared(), faults.covered(), faults.NOT_REACHED.keys()
    assert not declared - covered - excused, "declare a scenario for these in tests/support/faults.py"
    assert not (covered | excused) - declared, "these are not declared any more"
    assert not covered & excused


@pytest.mark.root
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lane", faults.LANES)
def test_whoever_dies_wherever_no_job_and_no_checkpoint_is_lost(lanes: dict[str, Future[list[str]]], lane: str) -> None:
    if failures := lanes[lane].result():
        pytest.fail("\n\n".join(failures), pytrace=False)
