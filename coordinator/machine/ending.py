"""How a job ends: kill what runs, collect logs and results, and make sure that nothing can wake up again.

Pods whose node cannot be asked are fenced: the incarnation is raised, so that their guards kill them when contact
returns, and the job is over only when their lease must have run out.
"""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine import attempt
from moorage.coordinator.machine.events import Closed
from moorage.coordinator.machine.instructions import Kill
from moorage.coordinator.machine.state import Ending
from moorage.coordinator.machine.turn import Turn


def begin(t: Turn, plan: Ending) -> None:
    """End the job. With pods of the present incarnation that may hold something to keep, ``plan.step`` says how;
    otherwise they are only fenced."""
    state = t.state
    t.set(bringup=None, broken={})
    if state.seats and not state.fencing:
        t.begin_ending(plan)
        t.phase("stopping" if plan.verdict == "stopped" else "finishing", plan.reason)
        return
    _fence(t, plan)


def stop(t: Turn, grace_seconds: float, why: str) -> None:
    """End the job because somebody asked for it."""
    state = t.state
    plan = Ending(verdict="stopped", step="killing", reason=why, grace_seconds=grace_seconds)
    attempt.leave(t, "the job is being stopped")
    coming = state.bringup is not None
    t.set(bringup=None, broken={})
    if coming or state.fencing or not state.seats:
        _fence(t, plan)
    else:
        begin(t, plan)


def _fence(t: Turn, plan: Ending) -> None:
    if t.state.seats:
        t.raise_incarnation()
    t.begin_ending(msgspec.structs.replace(plan, step="fencing"))
    t.phase("stopping" if plan.verdict == "stopped" else "finishing", plan.reason)
    if not t.state.fencing:
        over(t)


def all_exited(t: Turn) -> None:
    """Every pod has exited with 0."""
    attempt.drop_queue(t, "the job has ended")
    t.set(next_checkpoint=0.0)
    plan = Ending(verdict="finished", step="closing", reason="all ranks exited with 0", exit_code=0)
    t.begin_ending(plan)
    t.phase("finishing", plan.reason)


def closed(t: Turn, event: Closed) -> None:
    """The pods that could be asked are killed, or collected and removed."""
    plan = t.state.ending
    assert plan is not None
    notes = tuple(dict.fromkeys((*plan.notes, *event.notes)))
    if isinstance(event.of, Kill):
        t.ending_step("closing", unreached=event.unreached, notes=notes)
        return
    if not event.unreached:
        t.set(ending=msgspec.structs.replace(plan, unreached=(), notes=notes))
        over(t)
        return
    gone = frozenset(range(t.state.pods)) - frozenset(event.unreached)
    lost = ", ".join(dict.fromkeys(t.state.seats[pod].node for pod in event.unreached))
    t.raise_incarnation(gone=gone)
    lack = f"logs and results on {lost} could not be collected"
    t.ending_step("fencing", lack, unreached=event.unreached, notes=(*notes, lack))


def over(t: Turn) -> None:
    """Nothing of the job can run any more."""
    plan = t.state.ending
    assert plan is not None
    if t.state.seats:
        t.raise_incarnation(gone=frozenset(range(t.state.pods)))
    why = "; ".join((plan.reason, *plan.notes))
    data = {} if plan.exit_code is None else {"exit_code": plan.exit_code}
    t.phase(plan.verdict, why, **data)
    t.set(ending=None, ended=t.now, exit_code=plan.exit_code, queued=None, next_checkpoint=0.0)
