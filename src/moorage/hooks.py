"""What a job is told of its checkpoints and restores, from inside. Needs nothing but Python itself; costs nothing until
the first callback is registered.

::

    from moorage import hooks

    @hooks.after_restore
    def reconnect(event):
        client.close()                       # the node, and perhaps its address, is another one
        log.info("incarnation %d", hooks.incarnation())

Four kinds of events; each event has a number of its own, and comes exactly once to each process that lives through it
(docs/outside-effects.md says what that means):

``before-checkpoint``   the checkpoint waits (up to 5 s) until the callbacks have returned; id: the attempt's number
``after-checkpoint``    the process runs on; ``outcome`` is ``resume`` or ``abort``; id: the same number
``before-restore``      the process was restored; first thing that it hears; id: the incarnation's number
``after-restore``       comes next: the pod is about to run on; id: the same number

A process that was saved hears ``before-checkpoint``, and then either ``after-checkpoint`` (it is the one that ran on)
or the two of the restore (it is the copy). Callbacks run in a thread of their own, one after the other, in the order
of the events; with `poll` they run in the caller's thread instead.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final

EVENTS_FILE: Final = "MOORAGE_EVENTS_FILE"
ENVIRONMENT_FILE: Final = "MOORAGE_ENVIRONMENT_FILE"
DEFAULT_EVENTS: Final = "/run/moorage/events"
DEFAULT_ENVIRONMENT: Final = "/run/moorage/environment"
KINDS: Final = ("before-checkpoint", "after-checkpoint", "before-restore", "after-restore")

_LOOK_SECONDS: Final = 0.05


@dataclasses.dataclass(frozen=True)
class Event:
    """One event. ``number`` counts all events of the pod, ``id`` is the attempt or the incarnation."""

    number: int
    kind: str
    id: int
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


Callback = Callable[[Event], object]


def parse(line: str) -> Event | None:
    """One line of the file of events: ``NUMBER KIND ID {JSON}``; None for anything else."""
    parts = line.split(" ", 3)
    try:
        return Event(int(parts[0]), parts[1], int(parts[2]), json.loads(parts[3]) if len(parts) > 3 else {})
    except (ValueError, IndexError):
        return None


def events() -> list[Event]:
    """All events that the file holds (the newest few hundred), oldest first; empty outside of a pod."""
    try:
        with open(os.environ.get(EVENTS_FILE, DEFAULT_EVENTS)) as file:  # noqa: PTH123 - light to import
            lines = file.read().split("\n")[:-1]
    except OSError:
        return []
    return [event for line in lines if (event := parse(line)) is not None]


def environment() -> dict[str, str]:
    """What is true of this incarnation: ``MOORAGE_INCARNATION``, ``MOORAGE_NODE``, ``MOORAGE_CHECKPOINT``, …

    Read from the pod's environment file: the variables of a process are those that it was started with, for ever.
    """
    try:
        with open(os.environ.get(ENVIRONMENT_FILE, DEFAULT_ENVIRONMENT)) as file:  # noqa: PTH123
            pairs = [line.rstrip("\n").partition("=") for line in file]
    except OSError:
        return {}
    return {name: value for name, _, value in pairs if name}


def incarnation() -> int:
    """The number of this running instance of the job; 0 outside of a pod."""
    return int(environment().get("MOORAGE_INCARNATION", "0"))


class _Listener:
    """This process's callbacks, and how far it has listened. Saved and restored with the process."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {kind: [] for kind in KINDS}
        self.heard = 0
        self.thread: threading.Thread | None = None
        self.own_thread = True
        self.lock = threading.RLock()

    def add(self, kind: str, callback: Callback, thread: bool) -> None:
        with self.lock:
            begun = any(self.callbacks.values())
            self.callbacks[kind].append(callback)
            if not begun:
                self.heard = max((event.number for event in events()), default=0)
                self.acknowledge()
            self.own_thread = self.own_thread and thread
            if self.own_thread and self.thread is None:
                self.thread = threading.Thread(target=self.listen, name="moorage-hooks", daemon=True)
                self.thread.start()

    def listen(self) -> None:
        while self.own_thread:
            self.take()
            time.sleep(_LOOK_SECONDS)

    def take(self) -> int:
        done = 0
        with self.lock:
            for event in events():
                if event.number <= self.heard:
                    continue
                # Before the callbacks: one that fails or never returns must not be called again.
                self.heard = event.number
                for callback in self.callbacks.get(event.kind, ()):
                    try:
                        callback(event)
                    except Exception:
                        sys.stderr.write(f"moorage: the callback for {event.kind} {event.id} failed\n")
                        traceback.print_exc()
                self.acknowledge()
                done += 1
        return done

    def acknowledge(self) -> None:
        """Say how far this process has listened: a checkpoint waits for that."""
        folder = os.path.join(os.path.dirname(os.environ.get(EVENTS_FILE, DEFAULT_EVENTS)), "listeners")  # noqa: PTH118, PTH120
        path = os.path.join(folder, str(os.getpid()))  # noqa: PTH118
        try:
            with open(f"{path}.new", "w") as file:  # noqa: PTH123
                file.write(f"{self.heard}\n")
            os.replace(f"{path}.new", path)  # noqa: PTH105
        except OSError:
            pass  # not in a pod, or its disk is full: nobody waits then


_listener = _Listener()


def _after_fork() -> None:
    # The child has no thread, and the callbacks are its parent's.
    global _listener
    _listener = _Listener()


os.register_at_fork(after_in_child=_after_fork)


def on(kind: str, callback: Callback, *, thread: bool = True) -> Callback:
    """Call ``callback(event)`` at every event of ``kind`` from now on. Returns it, so that it serves as a decorator.

    ``thread=False``: only from within `poll`. Raises ValueError for a kind that does not exist.
    """
    if kind not in KINDS:
        raise ValueError(f"no event is called {kind!r}: {', '.join(KINDS)}")
    _listener.add(kind, callback, thread)
    return callback


def before_checkpoint(callback: Callback) -> Callback:
    """Decorator: `on` ``before-checkpoint``."""
    return on("before-checkpoint", callback)


def after_checkpoint(callback: Callback) -> Callback:
    """Decorator: `on` ``after-checkpoint``."""
    return on("after-checkpoint", callback)


def before_restore(callback: Callback) -> Callback:
    """Decorator: `on` ``before-restore``."""
    return on("before-restore", callback)


def after_restore(callback: Callback) -> Callback:
    """Decorator: `on` ``after-restore``."""
    return on("after-restore", callback)


def poll() -> int:
    """Call the callbacks of all new events in this thread; returns how many events there were."""
    return _listener.take()
