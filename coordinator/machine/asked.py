"""What users ask for. What cannot be done now is a `Conflict` that says what the job is doing and what to do."""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine import attempt, bringup, ending
from moorage.coordinator.machine.events import (
    Asked,
    CheckpointAsked,
    MoveAsked,
    ParkAsked,
    RestoreAsked,
    StopAsked,
)
from moorage.coordinator.machine.failure import running
from moorage.coordinator.machine.state import BringUp, JobState, Purpose, Queued
from moorage.coordinator.machine.turn import Turn
from moorage.errors import Conflict

VERBS = {
    CheckpointAsked: "checkpoint",
    ParkAsked: "park",
    MoveAsked: "move",
    StopAsked: "stop",
    RestoreAsked: "restore",
}
_HINTS = {
    "pending": "wait until it runs",
    "starting": "wait until it runs",
    "restoring": "wait until it runs",
    "parked": "bring it back with moorage restore",
    "parking": "wait until it is parked",
    "stopping": "it is about to end",
    "finishing": "it is about to end",
    "finished": "it is over",
    "failed": "bring it back with moorage restore, if it has a checkpoint",
    "stopped": "bring it back with moorage restore, if it has a checkpoint",
}


def repeated(state: JobState, event: Asked) -> bool:
    """Whether the request was carried out before."""
    return bool(event.request) and any(request.id == event.request for request in state.requests)


def handle(t: Turn, event: Asked) -> None:
    """Take up a request. Raises `Conflict`."""
    if repeated(t.state, event):
        return
    match event:
        case CheckpointAsked():
            _attempt(t, event, "checkpoint")
        case ParkAsked(keep=keep):
            _attempt(t, event, "park", keep=keep)
        case MoveAsked(nodes=nodes, exact=exact):
            _attempt(t, event, "move", nodes, exact)
        case StopAsked(checkpoint=True) if not (t.state.over or t.state.phase == "parked"):
            _attempt(t, event, "stop")
        case StopAsked():
            _stop(t, event)
        case RestoreAsked():
            _restore(t, event)
        case _:
            raise TypeError(f"no request: {event!r}")


def _attempt(
    t: Turn, event: Asked, purpose: Purpose, nodes: tuple[str, ...] = (), exact: bool = False, keep: str = ""
) -> None:
    state = t.state
    if not running(t):
        raise _conflict(state, VERBS[type(event)])
    if state.attempt is None and state.trouble is None:
        attempt.begin(t, purpose, "asked for", nodes=nodes, exact=exact, keep=keep, trace=event.trace)
        t.remember(event.request, VERBS[type(event)], t.state.attempts)
        return
    waits = state.queued
    if waits is None or waits.purpose == "checkpoint":
        # A checkpoint that somebody waits for is also had from an attempt that then removes the pods.
        t.set(queued=Queued(purpose=purpose, nodes=nodes, exact=exact, keep=keep, trace=event.trace))
    elif purpose != "checkpoint" and (waits.purpose, waits.nodes) != (purpose, nodes):
        raise Conflict(
            f"job {state.name} is to {waits.purpose} as soon as attempt {state.attempts} has ended",
            f"wait for that, then ask for {purpose}",
        )
    t.remember(event.request, VERBS[type(event)], state.attempts + 1)


def _stop(t: Turn, event: StopAsked) -> None:
    state = t.state
    t.remember(event.request, "stop")
    if state.over or state.phase == "finishing":
        return
    if state.ending is not None:
        if state.ending.step == "killing" and event.grace_seconds < state.ending.grace_seconds:
            t.set(ending=msgspec.structs.replace(state.ending, grace_seconds=event.grace_seconds))
        return
    ending.stop(t, event.grace_seconds, "asked to")


def _restore(t: Turn, event: RestoreAsked) -> None:
    state = t.state
    checkpoint = event.checkpoint or state.base or state.latest
    if not (state.over or state.phase == "parked" or running(t)):
        raise _conflict(state, "restore")
    if not checkpoint:
        raise Conflict(f"job {state.name} has no checkpoint", "take one with moorage checkpoint while it runs")
    plan = BringUp(
        cause="user",
        checkpoint=checkpoint,
        ordered=t.now,
        on=event.nodes,
        cold_start=event.cold_start,
        trace=event.trace or state.trace,
    )
    if running(t):
        attempt.leave(t, "the job is being restored")
    before = state.restarts_before + state.restarts + (state.phase == "failed")
    t.set(base=checkpoint, ended=0.0, exit_code=None, restarts_before=before, restarts=0)
    t.set(failures_in_row=0, failed_attempts=0)
    t.remember(event.request, "restore")
    bringup.begin(t, plan, "asked for")


def _conflict(state: JobState, verb: str) -> Conflict:
    return Conflict(f"job {state.name} is {state.phase}: cannot {verb}", _HINTS.get(state.phase, ""))
