"""The job state machine: pure, replayable, its whole story printed on an illegal event. See docs/coordinator.md.

``handle(state, event)`` gives the next state, what to write with it, and what to order. ``resume(state)`` gives the
orders of a state that was read back from etcd. `Machine` adds the log of what happened.
"""

from moorage.coordinator.machine.invariants import validate
from moorage.coordinator.machine.machine import handle, new_job, resume
from moorage.coordinator.machine.policies import Policies
from moorage.coordinator.machine.state import JobPolicy, JobState
from moorage.coordinator.machine.story import IllegalEvent, Machine
from moorage.coordinator.machine.table import TABLE
from moorage.coordinator.machine.turn import IllegalTransition

__all__ = [
    "TABLE",
    "IllegalEvent",
    "IllegalTransition",
    "JobPolicy",
    "JobState",
    "Machine",
    "Policies",
    "handle",
    "new_job",
    "resume",
    "validate",
]
