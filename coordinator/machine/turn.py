"""One turn of the machine: the state as it changes while one event is handled, and what is written and said with it."""

from __future__ import annotations

from typing import Any

import msgspec

from moorage.coordinator.machine.instructions import Raise, Record, Say
from moorage.coordinator.machine.policies import Policies
from moorage.coordinator.machine.state import (
    REMEMBERED_REQUESTS,
    AttemptState,
    AttemptStep,
    BringUp,
    BringUpStep,
    Ending,
    EndingStep,
    JobState,
    Phase,
    Request,
    Seat,
    Target,
)
from moorage.coordinator.machine.table import TABLE
from moorage.records import IncarnationRecord


class IllegalTransition(Exception):
    """The machine was about to make a change that its table does not have, or to break an invariant."""


class Turn:
    """Mutable; lives while one event is handled. ``now`` is the event's time."""

    def __init__(self, state: JobState, now: float, policies: Policies) -> None:
        self.before = state
        self.state = state
        self.now = now
        self.policies = policies
        self.records: list[Record] = []

    def set(self, **changes: Any) -> None:
        """Replace fields of the state."""
        self.state = msgspec.structs.replace(self.state, **changes)

    def record(self, record: Record) -> None:
        """Write ``record`` together with the state."""
        self.records.append(record)

    # What is said

    def say(self, kind: str, sentence: str, *, node: str = "", minor: bool = False, **data: str | int | float) -> None:
        """Tell something that is no transition."""
        self._say(kind, sentence, minor, "", "", node, data)

    def _say(
        self, kind: str, sentence: str, minor: bool, start: str, finish: str, node: str, data: dict[str, Any]
    ) -> None:
        attempt = self.state.attempt.number if self.state.attempt else 0
        self.record(
            Say(
                kind=kind,
                sentence=sentence[:1].upper() + sentence[1:] + ("" if sentence.endswith(".") else "."),
                minor=minor,
                start=start,
                finish=finish,
                incarnation=self.state.incarnation,
                attempt=data.pop("attempt", attempt),
                node=node,
                data=data,
            )
        )

    def _move(self, start: str, finish: str, why: str, data: dict[str, Any]) -> str:
        rule = TABLE.get((start, finish))
        if rule is None:
            raise IllegalTransition(f"no transition from {start} to {finish} ({why})")
        state = self.state
        fields = {
            "job": f"job {state.name}",
            "owner": state.owner,
            "nodes": " and ".join(state.nodes) or "no node",
            "incarnation": state.incarnation,
            "attempt": state.attempt.number if state.attempt else state.attempts,
            "checkpoint": (state.bringup.checkpoint if state.bringup else "") or state.latest,
            "why": why,
            "seconds": "",
            "since": "",
        }
        sentence = rule.sentence.format_map({**fields, **data})
        self._say(rule.kind, sentence, rule.minor, start, finish, "", dict(data))
        return sentence

    # Transitions

    def phase(self, finish: Phase, why: str = "", **data: str | int | float) -> None:
        """Move to another phase; the sentence becomes the state's reason."""
        start = self.state.phase
        self.set(phase=finish)
        self.set(reason=self._move(start, finish, why, data))

    def attempt_step(
        self, finish: AttemptStep, why: str = "", data: dict[str, str | int | float] | None = None, **changes: Any
    ) -> None:
        """Move the attempt to another step, with ``changes`` to it; ``data`` goes with the sentence."""
        attempt = self.state.attempt
        assert attempt is not None
        self.set(attempt=msgspec.structs.replace(attempt, step=finish, **changes))
        self._move(f"attempt.{attempt.step}", f"attempt.{finish}", why, dict(data or {}))

    def begin_attempt(self, attempt: AttemptState) -> None:
        """Take up an attempt, at its first step."""
        self.set(attempt=attempt)
        self._move("attempt.none", "attempt.preparing", "", {})

    def bringup_step(self, finish: BringUpStep, why: str = "", **changes: Any) -> None:
        """Move the bring-up to another step, with ``changes`` to it."""
        bringup = self.state.bringup
        assert bringup is not None
        self.set(bringup=msgspec.structs.replace(bringup, step=finish, **changes), broken={})
        self._move(f"bringup.{bringup.step}", f"bringup.{finish}", why, {})

    def begin_bringup(self, bringup: BringUp) -> None:
        """Take up a new bring-up, at its first step. Call it before the phase changes."""
        self.set(bringup=bringup)
        self._move("bringup.none", "bringup.placing", "", {})

    def ending_step(self, finish: EndingStep, why: str = "", **changes: Any) -> None:
        """Move the ending to another step."""
        ending = self.state.ending
        assert ending is not None
        self.set(ending=msgspec.structs.replace(ending, step=finish, **changes))
        self._move(f"ending.{ending.step}", f"ending.{finish}", why, {})

    def begin_ending(self, ending: Ending) -> None:
        """Take up an ending, at the step that it names."""
        self.set(ending=ending)
        self._move("ending.none", f"ending.{ending.step}", "", {})

    # Incarnations

    def raise_incarnation(
        self, seats: tuple[Seat, ...] = (), vni: int = 0, *, gone: frozenset[int] | None = None
    ) -> None:
        """Begin a new incarnation on ``seats`` (none: no pod may run). The pods of the present one are to be fenced.

        ``gone``: pods of the present incarnation that surely have no process left; None: none is known to be gone.
        """
        state = self.state
        old = {
            Target(pod, seat.node, seat.lease_seconds, seat.lease_kept)
            for pod, seat in enumerate(state.seats)
            if gone is None or pod not in gone
        }
        incarnation = state.incarnation + 1
        self.set(
            incarnation=incarnation,
            seats=seats,
            vni=vni,
            exits={},
            broken={},
            fencing=tuple(sorted(old | set(state.fencing))),
        )
        trace = state.bringup.trace if state.bringup else state.trace
        placement = [seat.node for seat in seats]
        self.record(Raise(IncarnationRecord(incarnation=incarnation, placement=placement, vni=vni, trace=trace)))

    # Requests

    def remember(self, request: str, verb: str, attempt: int = 0) -> None:
        """Keep a request's id, so that its repetition changes nothing."""
        if request:
            kept = (*self.state.requests, Request(request, verb, attempt))
            self.set(requests=kept[-REMEMBERED_REQUESTS:])
