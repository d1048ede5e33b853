"""How a job of a drain stands, and what to ask of it next. Pure."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from moorage.coordinator.drain.model import MoveState
from moorage.coordinator.drain.record import MoveRecord
from moorage.coordinator.machine.state import JobState

#: How often a move is tried that was aborted.
TRIES = 3
#: Errors that the next try meets as well.
_FINAL = frozenset({"Refused", "Forbidden", "UsageError"})


class Verdict(msgspec.Struct, frozen=True):
    """``state`` is settled; or ``ask``: order the move now; or neither: wait for the job to change."""

    state: MoveState | None = None
    reason: str = ""
    choices: tuple[str, ...] = ()
    ask: bool = False
    unplaced: bool = False  # it is parked because no node took it


def request_id(drain: str, move: MoveRecord) -> str:
    """The id of the try's request: the same try again is the same request."""
    return f"drain:{drain}:{move.job}:{move.tries}"


def judge(drain: str, move: MoveRecord, state: JobState | None, leaving: Collection[str]) -> Verdict:
    """``leaving``: the nodes of the drain. ``state`` None: the job is not there any more."""
    if state is None or state.over:
        return Verdict("ended", state.reason if state else "it is gone")
    if state.phase == "parked":
        return Verdict("parked", state.why_parked, (f"moorage restore {state.name}",), unplaced=bool(state.error_kind))
    works = state.phase in ("running", "checkpointing") and state.trouble is None
    if works and not any(seat.node in leaving for seat in state.seats):
        return Verdict("moved")
    if not works or (state.attempt is not None and state.attempt.kind == "stop") or state.queued is not None:
        return Verdict()  # it is on its way, or will be told what to do when it runs
    number = next((done.attempt for done in state.requests if done.id == request_id(drain, move)), 0)
    if not number:
        return Verdict(ask=True)
    attempt = state.find_attempt(number)
    if attempt is None or attempt.step != "aborted":
        return Verdict()
    if attempt.error_kind in _FINAL or move.tries + 1 >= TRIES:
        cures = [f"{found.what}: {found.cure}" for found in attempt.refusals if found.cure]
        # The hint of an attempt that was refused is the cure of the first refusal.
        known = any(attempt.hint == found.cure for found in attempt.refusals)
        more = [attempt.hint] if attempt.hint and not known else []
        return Verdict("failed", attempt.reason, tuple(dict.fromkeys((*cures, *more, f"moorage stop {state.name}"))))
    return Verdict(ask=True)
