"""The job state machine: ``handle(state, event) -> (state, instructions)``. No I/O, no clock."""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine import asked, attempt, bringup, ending, failure
from moorage.coordinator.machine.events import (
    AlarmRang,
    Answer,
    Asked,
    Closed,
    Done,
    Event,
    Failed,
    Hung,
    NodeLost,
    OutcomeStands,
    Persisted,
    Placed,
    PodExited,
    PodFailed,
    Unplaceable,
    Written,
)
from moorage.coordinator.machine.instructions import (
    AttemptOrder,
    Fence,
    Instruction,
    Load,
    Order,
    Release,
    Say,
)
from moorage.coordinator.machine.invariants import broken
from moorage.coordinator.machine.pending import pending
from moorage.coordinator.machine.policies import Policies
from moorage.coordinator.machine.state import BringUp, JobPolicy, JobState
from moorage.coordinator.machine.turn import IllegalTransition, Turn

DEFAULT = Policies()


def new_job(
    *,
    job: str,
    name: str,
    owner: str,
    pods: int,
    policy: JobPolicy,
    now: float,
    trace: str = "",
    request: str = "",
    policies: Policies = DEFAULT,
    on: tuple[str, ...] = (),
) -> tuple[JobState, list[Instruction]]:
    """The first state of a job, and what to write and to do with it. ``on``: the nodes that it is to start on."""
    state = JobState(
        serial=1,
        job=job,
        name=name,
        owner=owner,
        trace=trace,
        pods=pods,
        policy=policy,
        reason="waits for nodes",
        created=now,
        bringup=BringUp(cause="submit", ordered=now, on=on, trace=trace),
    )
    t = Turn(state, now, policies)
    t.remember(request, "submit")
    said = Say(
        kind="job.submitted",
        sentence=f"Job {name} was submitted with {pods} pod{'s' * (pods != 1)} by {owner or 'nobody'}.",
        start="none",
        finish="pending",
    )
    state = msgspec.structs.replace(t.state, said=1)
    return state, [said, *pending(state, policies)]


def handle(state: JobState, event: Event, policies: Policies = DEFAULT) -> tuple[JobState, list[Instruction]]:
    """What follows from ``event``: the next state, the records to write with it, and the orders that are new.

    An answer to an order that the state does not ask for any more changes nothing. Raises `Conflict` for a request
    that cannot be carried out now, and `IllegalTransition` for an event that cannot have happened.
    """
    before = pending(state, policies)
    t = Turn(state, event.time, policies)
    if isinstance(event, Asked):
        asked.handle(t, event)
    elif isinstance(event, Answer):
        of: Order = event.of  # type: ignore[attr-defined]
        if of in before:
            _answer(t, event)
        else:
            _must_be_past(state, of)
    else:
        _happened(t, event)
    if t.state == state:
        return state, []
    said = sum(isinstance(record, Say) and not record.minor for record in t.records)
    after = msgspec.structs.replace(t.state, serial=state.serial + 1, said=state.said + said)
    if found := list(broken(after)):
        raise IllegalTransition("; ".join(found))
    return after, [*t.records, *(order for order in pending(after, policies) if order not in before)]


def resume(state: JobState, policies: Policies = DEFAULT) -> list[Order]:
    """The orders to give again when a coordinator takes the job up from what etcd holds."""
    return pending(state, policies)


def _answer(t: Turn, event: Answer) -> None:
    match event:
        case Done(of=Fence()):
            _fenced(t)
        case Done(of=Load() | Release()):
            bringup.done(t, event)
        case Done():
            attempt.done(t, event)
        case Failed(of=Load() | Release()):
            bringup.failed(t, event)
        case Failed(of=AttemptOrder()):
            attempt.failed(t, event)
        case Placed():
            bringup.placed(t, event)
        case Unplaceable():
            bringup.unplaceable(t, event)
        case Persisted():
            attempt.persisted(t, event)
        case Written():
            attempt.written(t, event)
        case Closed():
            ending.closed(t, event)
        case AlarmRang(of=alarm):
            _alarm(t, alarm.what)
        case _:
            raise IllegalTransition(f"{event!r} answers nothing")


def _fenced(t: Turn) -> None:
    t.set(fencing=())
    if t.state.ending is not None:
        ending.over(t)
    elif t.state.phase == "parking":
        t.phase("parked", t.state.why_parked)
    else:
        bringup.fenced(t)


def _alarm(t: Turn, what: str) -> None:
    if what == "heartbeat":
        attempt.begin(t, "checkpoint", "the heartbeat is due", automatic=True)
    elif what == "patience":
        bringup.patience_over(t)
    else:
        attempt.deadline_passed(t)


def _happened(t: Turn, event: Event) -> None:
    if isinstance(event, PodExited | PodFailed | Hung):
        if event.incarnation > t.state.incarnation:
            raise IllegalTransition(f"{event!r}, but {t.state.incarnation} is the newest incarnation")
        if event.incarnation < t.state.incarnation:
            return
    if isinstance(event, PodExited | PodFailed) and not 0 <= event.pod < t.state.pods:
        raise IllegalTransition(f"{event!r}, but there are {t.state.pods} pods")
    match event:
        case PodExited():
            failure.pod_exited(t, event)
        case PodFailed():
            failure.pod_failed(t, event)
        case Hung():
            failure.hung(t, event)
        case NodeLost():
            failure.node_lost(t, event)
        case OutcomeStands():
            attempt.outcome_stands(t, event)
        case _:
            raise IllegalTransition(f"unknown event {event!r}")


def _must_be_past(state: JobState, of: Order) -> None:
    ahead = of.incarnation > state.incarnation or (isinstance(of, AttemptOrder) and of.attempt > state.attempts)
    if ahead:
        raise IllegalTransition(f"{of!r} was answered, but nothing like it was ever ordered")
