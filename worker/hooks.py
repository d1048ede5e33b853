"""What a pod is told of its checkpoints and restores: a file of events, and one that says which incarnation this is.

Each event is one line ``NUMBER KIND ID {JSON}`` of ``/run/moorage/events`` in the pod. ``ID`` is the attempt or the
incarnation, and no two lines have the same kind and id: that makes writing one idempotent, so whoever carries an order
out again, after whatever died, adds nothing. The file lies in the pod's upper layer, so it goes back with the memory of
those who read it: pid 1, which sends the signals, and the processes that use `moorage.hooks`. Each keeps the number of
the last line that it acted on in its memory. File and memory are saved at the same instant: so each line is acted on
exactly once in each line of descent.

=====================  ==============================================================================================
``before-checkpoint``  written when the pod has agreed to an attempt, before it is frozen
``after-checkpoint``   written while it is still frozen, when the outcome is known, if there was a before
``before-restore``     written into the restored files, before the processes are made
``after-restore``      written while the restored pod is still frozen, before it is released
=====================  ==============================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Final

from moorage.barrier import clock
from moorage.errors import MoorageError
from moorage.hooks import DEFAULT_ENVIRONMENT, DEFAULT_EVENTS, Event, parse
from moorage.worker.pod import Pod

ENVIRONMENT: Final = DEFAULT_ENVIRONMENT
EVENTS: Final = DEFAULT_EVENTS
LISTENERS: Final = "/run/moorage/listeners"
#: How long a checkpoint waits for the callbacks of a pod, in seconds.
WAIT_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.02
#: Lines that the file keeps; their numbers go on.
_KEPT: Final = 500
_MOST_BYTES: Final = 4 << 20
_POKE: Final = signal.SIGURG


def environment(pod: Pod) -> bytes:
    """The environment file: what a process cannot know from the variables that it was started with."""
    record = pod.record
    values = {
        "MOORAGE_JOB": record.job,
        "MOORAGE_JOB_NAME": pod.spec.name,
        "MOORAGE_POD": str(record.pod),
        "MOORAGE_INCARNATION": str(record.incarnation),
        "MOORAGE_NODE": pod.node.name,
        "MOORAGE_CHECKPOINT": record.checkpoint,
    }
    return "".join(f"{name}={value}\n" for name, value in values.items()).encode()


def lay(pod: Pod) -> None:
    """Put the files into a pod that starts from nothing. The layers are mounted."""
    with _unless_hidden(pod):
        pod.layers.make_folder(LISTENERS, mode=0o1777)
        pod.layers.put(ENVIRONMENT, environment(pod))
        pod.layers.put(EVENTS, b"")


def lay_restored(pod: Pod) -> None:
    """Make the environment file of a restored pod say so; its processes are not there yet. The layers are mounted.

    The file of events stays as it is until they are: CRIU brings back a process that was just reading it only if it has
    the size that it had.
    """
    with _unless_hidden(pod):
        pod.layers.put(ENVIRONMENT, environment(pod))


def after_restore(pod: Pod) -> None:
    """Tell a restored pod that it is about to run; it is frozen."""
    with _unless_hidden(pod):
        add(pod, "before-restore", pod.record.incarnation)
        add(pod, "after-restore", pod.record.incarnation)
        poke(pod)


def after_checkpoint(pod: Pod, attempt: int, outcome: str) -> None:
    """Tell a pod how an attempt ended, if it knows of it; it is frozen, or was never frozen."""
    with _unless_hidden(pod):
        if any(event.kind == "before-checkpoint" and event.id == attempt for event in events(pod)):
            add(pod, "after-checkpoint", attempt, outcome=outcome)
            poke(pod)


async def before_checkpoint(pod: Pod, attempt: int, kind: str) -> None:
    """Tell a running pod that it is about to be saved, and wait until its callbacks have returned, but not for ever."""
    number = await asyncio.to_thread(_before, pod, attempt, kind)
    deadline = clock.now() + WAIT_SECONDS
    while number and clock.now() < deadline and not pod.gone:
        if await asyncio.to_thread(_heard, pod, number):
            return
        # A file that the pod writes: nothing wakes whoever waits for it from outside.
        await asyncio.sleep(_LOOK_SECONDS)
    if number:
        pod.log.info("callbacks not waited for any longer", attempt=attempt)


def _before(pod: Pod, attempt: int, kind: str) -> int:
    with _unless_hidden(pod):
        number = add(pod, "before-checkpoint", attempt, then="run on" if kind == "resume" else "stop")
        poke(pod)
        return number
    return 0


def events(pod: Pod) -> list[Event]:
    """What the pod's file holds. Raises `NotFound`, `OSError`."""
    text = pod.layers.view.read(EVENTS, _MOST_BYTES).decode(errors="replace")
    return [event for line in text.splitlines() if (event := parse(line)) is not None]


def add(pod: Pod, kind: str, id: int, **details: str) -> int:
    """Write an event unless the file has it; its number. Raises `OSError`, `NotFound`."""
    known = events(pod)
    for event in known:
        if (event.kind, event.id) == (kind, id):
            return event.number
    number = max((event.number for event in known), default=0) + 1
    told = {"time": round(time.time(), 3), "incarnation": pod.record.incarnation, **details}
    kept = [*known[1 - _KEPT :], Event(number, kind, id, told)]
    lines = (f"{event.number} {event.kind} {event.id} {json.dumps(event.details)}\n" for event in kept)
    pod.layers.put(EVENTS, "".join(lines).encode())
    return number


def poke(pod: Pod) -> None:
    """Have the pod's pid 1 look at the file. Once too often does no harm."""
    init = pod.guard_state.init_pid if pod.guard_state else 0
    if init:
        with contextlib.suppress(ProcessLookupError):
            os.kill(init, _POKE)


def _heard(pod: Pod, number: int) -> bool:
    """Whether every process that listens, and lives, has acted on the event."""
    with _unless_hidden(pod):
        view = pod.layers.view
        names = {name for name in view.names(LISTENERS) if name.isdecimal()}
        for pid in (names & {str(inner) for inner in pod.inner_pids()}) if names else ():
            with contextlib.suppress(ValueError):
                if int(view.read(f"{LISTENERS}/{pid}", 64)) < number:
                    return False
    return True


@contextlib.contextmanager
def _unless_hidden(pod: Pod) -> Iterator[None]:
    """A job that has put something else in the place of these files is not told, and is none the worse for it."""
    try:
        yield
    except (MoorageError, OSError) as error:
        pod.log.warning("the pod is not told of an event", reason=str(error))
