"""The transition table: every change of phase or step that a job can make, and the sentence that tells of it.

Keys are ``(start, finish)``. Phases stand bare; the steps of an attempt, of a bring-up and of an ending carry the
prefix ``attempt.``, ``bringup.`` or ``ending.``; ``none`` is before the first. What is not here does not happen.
Sentences are templates over the fields that `turn.Turn` gives; ``{why}`` is a clause given by the handler.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage import failpoints


class Rule(msgspec.Struct, frozen=True):
    """``kind`` of the event, and its sentence. ``minor`` ones go to the log and not into `moorage events`."""

    kind: str
    sentence: str
    minor: bool = False


def _rules() -> dict[tuple[str, str], Rule]:
    table: dict[tuple[str, str], Rule] = {}

    def row(starts: str, finish: str, kind: str, sentence: str, *, minor: bool = False) -> None:
        for start in starts.split():
            table[start, finish] = Rule(kind, sentence, minor)

    live = "running checkpointing parking"
    # The way up.
    row("none", "pending", "job.submitted", "{job} was submitted by {owner}")
    row("pending", "starting", "job.starting", "{job} starts on {nodes} as incarnation {incarnation}")
    row("starting", "running", "job.running", "{job} runs on {nodes}")
    row(
        "restoring",
        "running",
        "restore.done",
        "{job} runs from {checkpoint} on {nodes}, {seconds} s after {since}",
    )
    row(live, "restoring", "restore.started", "{why}; {job} is restored from {checkpoint}")
    row("parked finished failed stopped", "restoring", "restore.started", "{why}; {job} is restored from {checkpoint}")
    row(f"{live} restoring", "starting", "job.restarted", "{why}; {job} starts again from nothing")
    # Attempts.
    row("running", "checkpointing", "checkpoint.started", "checkpoint {attempt} of {job} begins ({why})")
    row("running", "parking", "checkpoint.started", "checkpoint {attempt} of {job} begins ({why})")
    row("checkpointing", "running", "checkpoint.decided", "{job} runs on; {why}")
    row("parking", "running", "checkpoint.decided", "{job} runs on; {why}")
    row("parking restoring", "parked", "job.parked", "{job} is parked; {why}")
    row("restoring", "parking", "restore.failed", "{why}; {job} will be parked")
    # The way down.
    row(f"pending starting restoring {live} parked", "stopping", "job.stopping", "{job} is being stopped: {why}")
    row("stopping", "stopped", "job.stopped", "{job} is stopped: {why}")
    row(f"{live} starting", "finishing", "job.finishing", "{why}; logs and results are collected")
    row("finishing", "finished", "job.finished", "{job} has finished: {why}")
    row("finishing", "failed", "job.failed", "{job} has failed: {why}")
    # Steps of an attempt.
    a = "attempt."
    row("attempt.none", a + "preparing", "checkpoint.preparing", "every pod is asked what cannot be saved", minor=True)
    row(a + "preparing", a + "freezing", "checkpoint.prepared", "nothing stands in the way; freezing", minor=True)
    row(a + "freezing", a + "sealing", "checkpoint.frozen", "every pod is frozen; sealing", minor=True)
    row(a + "sealing", a + "capturing", "checkpoint.sealed", "every pod is sealed; capturing", minor=True)
    row(a + "capturing", a + "persisting", "checkpoint.captured", "every pod is captured; {why}", minor=True)
    row(a + "persisting", a + "committing", "checkpoint.persisted", "every pod is in the store", minor=True)
    row(a + "committing", a + "committed", "checkpoint.committed", "checkpoint {checkpoint} is committed: {why}")
    undecided = [a + step for step in ("preparing", "freezing", "sealing", "capturing", "persisting", "committing")]
    row(" ".join(undecided), a + "settling", "checkpoint.aborted", "checkpoint {attempt} of {job} was aborted: {why}")
    row(" ".join(undecided), a + "aborted", "checkpoint.aborted", "checkpoint {attempt} of {job} was aborted: {why}")
    row(a + "settling", a + "aborted", "checkpoint.settled", "every pod runs as if nothing had been asked", minor=True)
    # Steps of a bring-up.
    b = "bringup."
    row("bringup.none", b + "placing", "placement.wanted", "nodes are chosen", minor=True)
    row(b + "placing", b + "fencing", "restore.placed", "incarnation {incarnation} goes to {nodes}; {why}")
    row(b + "placing", b + "loading", "restore.placed", "incarnation {incarnation} goes to {nodes}; {why}", minor=True)
    row(b + "fencing", b + "loading", "restore.fenced", "no older pod can run any more; {why}")
    row(b + "loading", b + "releasing", "restore.loaded", "every pod stands restored; releasing", minor=True)
    row(f"{b}fencing {b}loading {b}releasing", b + "placing", "restore.retry", "{why}; other nodes are chosen")
    # Steps of an ending.
    e = "ending."
    row("ending.none", e + "killing", "ending.killing", "the pods are ended", minor=True)
    row("ending.none", e + "closing", "ending.closing", "logs and results are collected", minor=True)
    row("ending.none", e + "fencing", "ending.fencing", "what is left is ended", minor=True)
    row(
        e + "killing",
        e + "closing",
        "ending.closing",
        "no pod runs; logs and results are collected",
        minor=True,
    )
    row(e + "closing", e + "fencing", "ending.fencing", "{why}", minor=True)
    return table


TABLE: Final = _rules()
#: A write that changes neither phase nor step.
NOTE: Final = "job.note"


def failpoint(start: str, finish: str) -> str:
    """The stem of a transition's failpoints; ``.before`` and ``.after`` its write are hit."""
    scope, dot, step = finish.partition(".")
    return f"job.{scope}.{start.rpartition('.')[2]}-{step}" if dot else f"job.{start}-{finish}"


failpoints.declare(*(f"{failpoint(*key)}.{side}" for key in TABLE for side in ("before", "after")))
failpoints.declare(f"{NOTE}.before", f"{NOTE}.after")
