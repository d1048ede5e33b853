"""What holds in every state of a job."""

from __future__ import annotations

from collections.abc import Iterator

from moorage.coordinator.machine.state import (
    OVER,
    PHASES,
    REMEMBERED_ATTEMPTS,
    REMEMBERED_REQUESTS,
    JobState,
)
from moorage.coordinator.machine.turn import IllegalTransition


def broken(state: JobState) -> Iterator[str]:
    """One sentence for each invariant that does not hold."""
    yield from _shape(state)
    yield from _attempt(state)
    yield from _bringup(state)
    yield from _ending(state)


def validate(state: JobState) -> None:
    """Raise `IllegalTransition` unless all invariants hold."""
    if found := list(broken(state)):
        raise IllegalTransition("; ".join(found))


def _shape(s: JobState) -> Iterator[str]:
    if s.phase not in PHASES:
        yield f"{s.phase} is no phase"
    if s.seats and len(s.seats) != s.pods:
        yield f"{len(s.seats)} seats for {s.pods} pods"
    if s.seats and not s.incarnation:
        yield "pods have seats before there is an incarnation"
    if any(not 0 <= pod < s.pods for pod in s.exits):
        yield "a pod that does not exist has exited"
    if s.broken and (s.bringup is None or s.bringup.step != "loading"):
        yield "a pod that broke while it was brought up was forgotten"
    if len(s.requests) > REMEMBERED_REQUESTS or len(s.past) > REMEMBERED_ATTEMPTS:
        yield "it remembers more than it may"
    if s.phase in ("running", "checkpointing") and not s.seats:
        yield f"it is {s.phase} with no seats"
    if s.phase in OVER and (s.seats or s.fencing or not s.ended):
        yield f"it is {s.phase}, yet something of it may run"
    if s.phase not in OVER and s.ended:
        yield f"it has ended, yet it is {s.phase}"
    if s.phase == "parked" and (s.seats or s.fencing):
        yield "it is parked, yet something of it may run"
    if s.phase == "finished" and s.exit_code != 0:
        yield f"it has finished with exit code {s.exit_code}"
    if s.fencing and s.phase not in ("starting", "restoring", "parking", "stopping", "finishing"):
        yield f"older pods are fenced while it is {s.phase}"
    if s.latest and not s.attempts:
        yield "it has a checkpoint and never attempted one"


def _attempt(s: JobState) -> Iterator[str]:
    a = s.attempt
    if a is None:
        if s.phase == "checkpointing":
            yield "it is checkpointing with no attempt"
        if s.phase == "parking" and not s.fencing:
            yield "it is parking with nothing left to do"
        if s.queued is not None:
            yield "an attempt is queued behind none"
        if s.trouble is not None:
            yield "a failure waits for no attempt"
        return
    if a.number != s.attempts or a.incarnation != s.incarnation:
        yield f"attempt {a.number} of incarnation {a.incarnation} is not the newest"
    if a.step in ("committed", "aborted"):
        yield f"the attempt is {a.step}, yet under way"
    decided = not a.undecided
    expected = "running" if decided else ("checkpointing" if a.kind == "resume" else "parking")
    if s.phase != expected:
        yield f"its attempt ({a.kind}) is {a.step}, yet it is {s.phase}"
    if (a.kind == "resume") != (a.purpose == "checkpoint"):
        yield f"an attempt to {a.purpose} has kind {a.kind}"
    if s.trouble is not None and a.step not in ("persisting", "committing"):
        yield f"a failure waits while the attempt is {a.step}"
    if s.fencing:
        yield "older pods are fenced during an attempt"


def _bringup(s: JobState) -> Iterator[str]:
    b = s.bringup
    if (b is not None) != (s.phase in ("pending", "starting", "restoring")):
        yield f"it is {s.phase} {'with' if b else 'without'} a bring-up"
    if b is None:
        return
    if (s.phase == "restoring") != bool(b.checkpoint):
        yield f"it is {s.phase} from {b.checkpoint or 'nothing'}"
    if b.step != "placing" and not s.seats:
        yield f"it is {b.step} with no seats"
    if b.step in ("loading", "releasing") and s.fencing:
        yield f"it is {b.step} before older pods are fenced"
    if b.step == "fencing" and not s.fencing:
        yield "it is fencing nothing"
    if b.step == "releasing" and not b.checkpoint:
        yield "it releases what was not restored"


def _ending(s: JobState) -> Iterator[str]:
    e = s.ending
    if (e is not None) != (s.phase in ("finishing", "stopping")):
        yield f"it is {s.phase} {'with' if e else 'without'} an ending"
    if e is None:
        return
    if (e.verdict == "stopped") != (s.phase == "stopping"):
        yield f"it is {s.phase} towards {e.verdict}"
    if e.step == "fencing" and (not s.fencing or s.seats):
        yield "its ending fences nothing"
    if e.step != "fencing" and (s.fencing or not s.seats):
        yield f"its ending is {e.step} with nothing to do"
