"""A machine with a memory: the same pure functions, and a log that is printed whole when something illegal happens."""

from __future__ import annotations

from collections import deque

from moorage.coordinator.machine.events import Event
from moorage.coordinator.machine.instructions import Instruction, Order, Say
from moorage.coordinator.machine.machine import DEFAULT, handle, resume
from moorage.coordinator.machine.policies import Policies
from moorage.coordinator.machine.state import JobState
from moorage.coordinator.machine.turn import IllegalTransition


class IllegalEvent(Exception):
    """An event that cannot have happened, with the whole story up to it."""


class Machine:
    """One job's machine. `consider` computes and `accept` takes the result once it is written."""

    def __init__(self, state: JobState, policies: Policies = DEFAULT, *, keep: int = 400) -> None:
        self.state = state
        self.policies = policies
        self._log: deque[str] = deque(maxlen=keep)
        self._log.append(f"began with {describe(state)}")

    def consider(self, event: Event) -> tuple[JobState, list[Instruction]]:
        """What would follow from ``event``. Raises `IllegalEvent` with the story, and `Conflict`."""
        try:
            return handle(self.state, event, self.policies)
        except IllegalTransition as error:
            raise IllegalEvent(f"{error}\nafter {event!r}\nin {describe(self.state)}\n{self.story()}") from error

    def accept(self, event: Event, state: JobState, instructions: list[Instruction]) -> None:
        """Go on from ``state``."""
        self._log.append(f"stimulus {event!r}")
        for instruction in instructions:
            if isinstance(instruction, Say):
                arrow = f"  {instruction.start} → {instruction.finish}: " if instruction.start else "  "
                self._log.append(f"{arrow}{instruction.sentence}")
            elif isinstance(instruction, Order):
                self._log.append(f"  order {instruction!r}")
        self.state = state

    def resume(self) -> list[Order]:
        """The orders that the present state asks for."""
        return resume(self.state, self.policies)

    def story(self) -> str:
        """Stimuli, transitions and sentences, oldest first."""
        return "\n".join(self._log)


def describe(state: JobState) -> str:
    """The state in one line."""
    parts = [f"{state.phase} incarnation {state.incarnation} on {', '.join(state.nodes) or 'no node'}"]
    if state.bringup is not None:
        parts.append(f"bring-up {state.bringup.step}")
    if state.attempt is not None:
        parts.append(f"attempt {state.attempt.number} ({state.attempt.purpose}) {state.attempt.step}")
    if state.ending is not None:
        parts.append(f"ending {state.ending.step}")
    if state.fencing:
        parts.append(f"fencing {len(state.fencing)} pods")
    return f"job {state.job} " + ", ".join(parts)
