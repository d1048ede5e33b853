"""Checkpoints: from the first question to the pods until a checkpoint is committed or the attempt is given up.

With kind ``resume`` the outcome is created in the transaction that leaves ``capturing``: from then on the job runs, and
what was captured goes to the store beside it. With kind ``stop`` the outcome is created in the commit itself. Deciding
is thus no step of its own: there is no moment at which an outcome exists and the state does not know it.
"""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine import bringup, ending, failure
from moorage.coordinator.machine.events import Done, Failed, OutcomeStands, Persisted, Written
from moorage.coordinator.machine.instructions import (
    Capture,
    Commit,
    Conclude,
    CreateStart,
    Freeze,
    Prepare,
    Seal,
    Settle,
)
from moorage.coordinator.machine.state import (
    REMEMBERED_ATTEMPTS,
    AttemptState,
    BringUp,
    Ending,
    Finding,
    Purpose,
    checkpoint_id,
)
from moorage.coordinator.machine.turn import IllegalTransition, Turn
from moorage.records import AttemptStart, CheckpointRecord, Outcome, StopReason


def begin(
    t: Turn,
    purpose: Purpose,
    why: str,
    *,
    nodes: tuple[str, ...] = (),
    exact: bool = False,
    keep: str = "",
    automatic: bool = False,
    trace: str = "",
) -> None:
    """Start the next attempt of a running job."""
    state = t.state
    kind: StopReason = "resume" if purpose == "checkpoint" else "stop"
    seconds = state.policy.attempt_deadline_seconds
    attempt = AttemptState(
        number=state.attempts + 1,
        incarnation=state.incarnation,
        kind=kind,
        purpose=purpose,
        started=t.now,
        deadline=t.now + seconds,
        automatic=automatic,
        nodes=nodes,
        exact=exact,
        keep=keep,
        trace=trace or state.trace,
    )
    t.set(attempts=attempt.number, queued=None, next_checkpoint=0.0)
    t.begin_attempt(attempt)
    t.phase("checkpointing" if kind == "resume" else "parking", why)
    t.record(
        CreateStart(
            AttemptStart(
                attempt=attempt.number,
                incarnation=attempt.incarnation,
                pods=state.pods,
                kind=kind,
                deadline_seconds=seconds,
                trace=attempt.trace,
            )
        )
    )


def done(t: Turn, event: Done) -> None:
    """All pods have answered the step's order."""
    match event.of:
        case Prepare():
            t.attempt_step("freezing")
        case Freeze():
            t.attempt_step("sealing")
        case Seal():
            t.attempt_step("capturing")
        case Capture():
            captured(t)
        case Settle():
            _close(t, "aborted")
            after(t)
        case other:
            raise IllegalTransition(f"{type(other).__name__} is not an attempt's order")


def captured(t: Turn, *, stands: bool = False) -> None:
    """Every pod is captured. ``stands``: the outcome ``resume`` was found written already."""
    attempt = _current(t)
    if attempt.kind == "stop":
        t.attempt_step("persisting", "all stay frozen until the checkpoint is committed")
        return
    deadline = t.now + t.state.policy.attempt_deadline_seconds * t.policies.persist_factor
    t.attempt_step("persisting", "all run on", deadline=deadline)
    if not stands:
        t.record(Conclude(_outcome(attempt, "resume", "every pod is captured")))
    t.phase(
        "running",
        "every pod is captured, and what was captured goes to the store",
    )


def persisted(t: Turn, event: Persisted) -> None:
    """Every pod's manifest is in the store."""
    t.attempt_step(
        "committing",
        bytes_total=event.bytes_total,
        bytes_new=event.bytes_new,
        pause_seconds=event.pause_seconds,
    )


def written(t: Turn, event: Written) -> None:
    """The global manifest is in the store: commit, and do what the attempt was for."""
    attempt = _current(t)
    state = t.state
    name = checkpoint_id(state.job, attempt.number)
    record = CheckpointRecord(
        checkpoint=name,
        job=state.job,
        owner=state.owner,
        attempt=attempt.number,
        incarnation=attempt.incarnation,
        manifest=event.manifest,
        created=t.now,
        bytes_total=attempt.bytes_total,
        bytes_new=attempt.bytes_new,
        pause_seconds=attempt.pause_seconds,
        trace=attempt.trace,
    )
    if event.waiting is not None:
        waiting = event.waiting
        record = msgspec.structs.replace(
            record, pods=[*waiting.pods], nodes=[*waiting.nodes], spec=waiting.spec, started=waiting.started
        )
    t.record(Commit(record, event.generation))
    if attempt.kind == "stop":
        t.record(Conclude(_outcome(attempt, "stop", "committed")))
    pause = (
        f"the job stood still for {attempt.pause_seconds:.2f} s, "
        if attempt.pause_seconds and attempt.kind == "resume"
        else ""
    )
    t.attempt_step(
        "committed",
        f"{pause}{_size(attempt.bytes_new)} of {_size(attempt.bytes_total)} were new",
        {
            "checkpoint": name,
            "pause_seconds": attempt.pause_seconds,
            "bytes_new": attempt.bytes_new,
            "bytes_total": attempt.bytes_total,
        },
        checkpoint=name,
    )
    t.set(latest=name, base=name, failures_in_row=0)
    _close(t, "committed")
    _follow(t, attempt, name)


def _follow(t: Turn, attempt: AttemptState, checkpoint: str) -> None:
    if attempt.purpose == "checkpoint":
        t.set(reason=f"job {t.state.name} runs; {checkpoint} is its newest checkpoint")
        after(t)
        return
    t.set(trouble=None)
    drop_queue(t, "the job was taken down by the attempt before")
    if attempt.purpose == "park":
        t.set(why_parked=f"asked for, with checkpoint {checkpoint}")
        t.raise_incarnation()
    elif attempt.purpose == "move":
        where = ", ".join(dict.fromkeys(attempt.nodes))
        plan = BringUp(
            cause="move",
            checkpoint=checkpoint,
            ordered=t.now,
            on=attempt.nodes,
            exact=attempt.exact,
            trace=attempt.trace,
        )
        bringup.begin(t, plan, f"it moves to {where}")
    else:
        t.raise_incarnation()
        t.begin_ending(Ending(verdict="stopped", step="fencing", reason="asked to, with a checkpoint"))
        t.phase("stopping", f"{checkpoint} is committed")


def failed(t: Turn, event: Failed) -> None:
    """An order of the attempt failed."""
    if isinstance(event.of, Settle):
        where = f"pod {event.pod} on {event.node}" if event.node else "a pod"
        failure.trouble(t, "pod", f"{where} did not come back after the aborted checkpoint: {event.message}")
        return
    where = f"pod {event.pod} on {event.node}: " if event.node else ""
    abort(t, f"{where}{event.message}", event.error_kind, hint=event.hint, refusals=event.refusals)


def outcome_stands(t: Turn, event: OutcomeStands) -> None:
    """Somebody else has created the outcome: a worker after the deadline, or this coordinator before it died."""
    outcome, attempt = event.outcome, t.state.attempt
    if attempt is None or outcome.attempt != attempt.number or not attempt.undecided:
        return
    if outcome.kind == "abort":
        abort(t, f"{outcome.by or 'a worker'} aborted it: {outcome.reason}", "DeadlineExceeded", stands=True)
    elif outcome.kind == "resume" and attempt.kind == "resume" and attempt.step == "capturing":
        captured(t, stands=True)
    else:
        raise IllegalTransition(f"outcome {outcome.kind} stands while attempt {attempt.number} is {attempt.step}")


def deadline_passed(t: Turn) -> None:
    """The attempt is not done in time."""
    attempt = _current(t)
    abort(t, f"it was still {attempt.step} after its deadline", "DeadlineExceeded")


def abort(
    t: Turn,
    reason: str,
    error_kind: str = "AttemptAborted",
    *,
    hint: str = "",
    refusals: tuple[Finding, ...] = (),
    stands: bool = False,
    settle: bool = True,
) -> None:
    """Give the attempt up. ``settle``: the job is to run on, so its pods must come back first."""
    attempt = _current(t)
    told = {"reason": reason, "error_kind": error_kind, "hint": hint, "refusals": refusals}
    if attempt.undecided and not stands:
        t.record(Conclude(_outcome(attempt, "abort", reason)))
    settle = settle and t.state.trouble is None
    t.attempt_step("settling" if settle else "aborted", reason, {"error_kind": error_kind}, **told)
    if settle:
        if t.state.phase != "running":
            t.phase("running", f"attempt {attempt.number} was aborted")
        return
    _close(t, "aborted")
    if t.state.trouble is not None:
        after(t)


def after(t: Turn) -> None:
    """The attempt has ended and the job runs: take up what waited for that."""
    state = t.state
    if state.trouble is not None:
        failure.recover(t, state.trouble)
    elif len(state.exits) == state.pods:
        ending.all_exited(t)
    elif state.queued is not None:
        queued = state.queued
        begin(
            t,
            queued.purpose,
            "asked for",
            nodes=queued.nodes,
            exact=queued.exact,
            keep=queued.keep,
            trace=queued.trace,
        )


def leave(t: Turn, reason: str) -> None:
    """The job stops to run: end its attempt and what is queued behind it."""
    t.set(trouble=None)
    attempt = t.state.attempt
    if attempt is not None and attempt.step == "settling":
        _close(t, "aborted")
    elif attempt is not None:
        abort(t, reason, settle=False)
    drop_queue(t, reason)
    t.set(next_checkpoint=0.0)


def drop_queue(t: Turn, reason: str) -> None:
    """End an attempt that never began, so that who waits for it is told."""
    state = t.state
    if state.queued is None:
        return
    kind: StopReason = "resume" if state.queued.purpose == "checkpoint" else "stop"
    attempt = AttemptState(
        number=state.attempts + 1,
        incarnation=state.incarnation,
        kind=kind,
        purpose=state.queued.purpose,
        step="aborted",
        started=t.now,
        ended=t.now,
        reason=reason,
        error_kind="AttemptAborted",
        trace=state.queued.trace,
    )
    t.set(queued=None, attempts=attempt.number, past=(*state.past, attempt)[-REMEMBERED_ATTEMPTS:])


def _close(t: Turn, result: str) -> None:
    attempt = _current(t)
    if attempt.step == "settling":
        t.attempt_step("aborted")
        attempt = _current(t)
    ended = msgspec.structs.replace(attempt, ended=t.now)
    fails = 0 if result == "committed" else t.state.failed_attempts + 1
    t.set(
        attempt=None,
        past=(*t.state.past, ended)[-REMEMBERED_ATTEMPTS:],
        failed_attempts=fails,
        next_checkpoint=t.policies.heartbeat.next_due(t.state.policy, end=t.now, failed_attempts=fails),
    )


def _current(t: Turn) -> AttemptState:
    attempt = t.state.attempt
    if attempt is None:
        raise IllegalTransition("no attempt is under way")
    return attempt


def _outcome(attempt: AttemptState, kind: str, reason: str) -> Outcome:
    return msgspec.convert(
        {
            "kind": kind,
            "incarnation": attempt.incarnation,
            "attempt": attempt.number,
            "reason": reason,
            "by": "coordinator",
        },
        Outcome,
    )


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
