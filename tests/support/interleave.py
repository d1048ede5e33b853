"""Runs coroutines that meet only in a model, in every order of their steps, or in seeded random orders.

A coroutine's step ends at `pause`. Nothing else suspends it, so there is no event loop and thousands of schedules take
a second. A process that dies is one that is never let go on: an invariant that is checked after every step of every
schedule holds however many processes die, and wherever.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, Generic, TypeVar

W = TypeVar("W")
Processes = Mapping[str, Coroutine[Any, Any, Any]]


@types.coroutine
def pause() -> Generator[None, None, None]:
    """End this step."""
    yield


async def gate(label: str) -> None:
    """A gate for `ModelClient`: one step for each operation."""
    if not label.endswith(".after"):
        await pause()


class Run(Generic[W]):
    """One run of a world: ``results`` of the processes that have ended, ``trace`` of who made each step."""

    def __init__(self, make: Callable[[], tuple[W, Processes]], check: Callable[[W], None]) -> None:
        self.world, self._processes = make()
        self._check = check
        self.results: dict[str, Any] = {}
        self.trace: list[str] = []
        self.runnable = list(self._processes)
        for name in list(self.runnable):
            self._advance(name)  # up to its first pause: touches nothing

    def _advance(self, name: str) -> None:
        try:
            self._processes[name].send(None)
        except StopIteration as stop:
            self.results[name] = stop.value
            self.runnable.remove(name)

    def step(self, name: str) -> None:
        """Let one process make one step, then check the world."""
        self.trace.append(name)
        try:
            self._advance(name)
            self._check(self.world)
        except BaseException as error:
            error.add_note(f"schedule: {' '.join(self.trace)}")
            raise

    def kill(self, name: str) -> None:
        self.trace.append(f"{name}†")
        self._processes[name].close()
        self.runnable.remove(name)

    def close(self) -> None:
        for coroutine in self._processes.values():
            coroutine.close()


def explore(make: Callable[[], tuple[W, Processes]], check: Callable[[W], None], end: Callable[[Run[W]], None]) -> int:
    """Run every order of steps; returns how many there are. ``end`` judges each complete run."""
    count = 0
    prefix: list[int] = []
    while True:
        run = Run(make, check)
        choices: list[tuple[int, int]] = []  # (taken, how many there were)
        while run.runnable:
            taken = prefix[len(choices)] if len(choices) < len(prefix) else 0
            choices.append((taken, len(run.runnable)))
            run.step(run.runnable[taken])
        end(run)
        count += 1
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return count
        prefix = [taken for taken, _ in choices]
        prefix[-1] += 1


def sample(
    make: Callable[[], tuple[W, Processes]],
    check: Callable[[W], None],
    end: Callable[[Run[W]], None],
    *,
    seed: int,
    kills: float = 0.0,
    killable: Callable[[str], bool] = lambda name: True,
) -> None:
    """One random order of steps, in which before each step a process dies with probability ``kills``."""
    rng = random.Random(seed)
    run = Run(make, check)
    while run.runnable:
        name = rng.choice(run.runnable)
        if killable(name) and rng.random() < kills:
            run.kill(name)
        else:
            run.step(name)
    end(run)
    run.close()
