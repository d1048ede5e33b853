"""What is to be done in a state: the orders that follow from it alone."""

from __future__ import annotations

from moorage.coordinator.machine.instructions import (
    Alarm,
    Capture,
    Collect,
    Fence,
    Finish,
    Freeze,
    Kill,
    Load,
    Observe,
    Order,
    Place,
    Prepare,
    Release,
    Seal,
    Settle,
    WriteManifest,
)
from moorage.coordinator.machine.policies import Policies
from moorage.coordinator.machine.state import AttemptState, BringUp, Ending, JobState

_STEPS = {
    "preparing": Prepare,
    "freezing": Freeze,
    "sealing": Seal,
    "capturing": Capture,
    "persisting": Collect,
    "committing": WriteManifest,
    "settling": Settle,
}


def pending(state: JobState, policies: Policies) -> list[Order]:
    """The orders that must be under way in ``state``. Equal states give equal orders, in the same sequence."""
    orders: list[Order] = []
    if state.fencing:
        orders.append(Fence(incarnation=state.incarnation, bound=state.incarnation - 1, targets=state.fencing))
    if state.bringup is not None:
        orders += _bringup(state, state.bringup, policies)
    if state.attempt is not None:
        orders += _attempt(state.attempt)
    if state.ending is not None:
        orders += _ending(state, state.ending)
    if state.phase == "running" and state.attempt is None and state.trouble is None and state.next_checkpoint:
        orders.append(Alarm(incarnation=state.incarnation, what="heartbeat", at=state.next_checkpoint))
    return orders


def _bringup(state: JobState, plan: BringUp, policies: Policies) -> list[Order]:
    number = state.incarnation
    if plan.step == "placing":
        orders: list[Order] = [Place(incarnation=number, on=plan.on, exclude=plan.exclude, exact=plan.exact)]
        if plan.waiting_since:
            at = plan.waiting_since + policies.placement.patience_seconds
            orders.append(Alarm(incarnation=number, what="patience", at=at))
        return orders
    if plan.step == "loading":
        return [Load(incarnation=number, checkpoint=plan.checkpoint)]
    if plan.step == "releasing":
        return [Release(incarnation=number)]
    return []  # fencing


def _attempt(attempt: AttemptState) -> list[Order]:
    of = {"incarnation": attempt.incarnation, "attempt": attempt.number}
    orders: list[Order] = [_STEPS[attempt.step](**of)]
    if attempt.undecided:
        orders.append(Observe(**of))
    if attempt.step != "settling":
        orders.append(Alarm(incarnation=attempt.incarnation, what="attempt", at=attempt.deadline))
    return orders


def _ending(state: JobState, plan: Ending) -> list[Order]:
    if plan.step == "killing":
        return [Kill(incarnation=state.incarnation, grace_seconds=plan.grace_seconds)]
    if plan.step == "closing":
        return [Finish(incarnation=state.incarnation)]
    return []  # fencing
