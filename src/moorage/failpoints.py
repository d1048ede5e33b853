"""Named failpoints: places where a test makes this process die, fail or stall.

Off unless ``MOORAGE_FAILPOINTS_DIR`` names a folder when the process starts. A test arms one by writing a file with
the failpoint's name there; its content is the action. The first process that reaches the failpoint removes the
file (the removal is the claim: one file fires once, in one process) and acts:

``kill``            SIGKILL to this process
``error TEXT``      raise `MoorageError(TEXT)`; with ``Kind: TEXT`` the error of `moorage.errors` called so
``stall SECONDS``   stop this process's event loop for that long (asynchronous failpoints: only the task)
``kill@NODE``       any action may end in ``@ROLE``: only a process whose ``MOORAGE_FAILPOINT_ROLE`` is ROLE acts

Names are dotted: ``<component>.<operation>.<step>``, for a write ``….before`` and ``….after``. Every name is declared
with `declare` at import, so a test can list them all: `declared`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from moorage import errors
from moorage.errors import MoorageError

_DIR = os.environ.get("MOORAGE_FAILPOINTS_DIR", "")
_ROLE = os.environ.get("MOORAGE_FAILPOINT_ROLE", "")
_declared: set[str] = set()


def declare(*names: str) -> None:
    """Register names, so that tests can enumerate them."""
    _declared.update(names)


def declared() -> frozenset[str]:
    """All names that the modules imported so far have declared."""
    return frozenset(_declared)


def enabled() -> bool:
    """Whether this process was started with failpoints on."""
    return bool(_DIR)


def _claim(name: str) -> str | None:
    path = Path(_DIR, name)
    try:
        action = path.read_text().strip()
    except FileNotFoundError:
        return None
    action, _, role = action.partition("@")
    if role and role != _ROLE:
        return None
    try:
        path.unlink()
    except FileNotFoundError:
        return None  # another process claimed it between our read and here
    return action


def _act(name: str, action: str) -> float:
    verb, _, argument = action.partition(" ")
    if verb == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        # SIGKILL is delivered before the call returns to user space on Linux; this line guards against a change.
        time.sleep(60)
    if verb == "error":
        kind, colon, text = argument.partition(": ")
        if colon and kind.isidentifier():
            raise errors.by_name(kind)(text)
        raise MoorageError(argument or f"failpoint {name}")
    if verb == "stall":
        return float(argument)
    raise MoorageError(f"failpoint {name}: unknown action {action!r}")


def hit_sync(name: str) -> None:
    """Pass a failpoint from code that is not asynchronous."""
    if not _DIR:
        return
    assert name in _declared, f"undeclared failpoint {name}"
    if (action := _claim(name)) and (pause := _act(name, action)):
        time.sleep(pause)


async def hit(name: str) -> None:
    """Pass a failpoint from a coroutine. Costs one comparison when failpoints are off."""
    if not _DIR:
        return
    assert name in _declared, f"undeclared failpoint {name}"
    if (action := _claim(name)) and (pause := _act(name, action)):
        await asyncio.sleep(pause)
