"""``python -P -m moorage.worker.guard --folder F``: become the guard of the pod in F, then return to the caller.

The caller's process ends with 0 when the guard, a process of its own that outlives the caller, answers on its socket;
with 1, and the reason on stderr, when it cannot.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec

from moorage.errors import MoorageError
from moorage.worker.guard import kernel
from moorage.worker.guard.detach import detach, log_to, tell
from moorage.worker.guard.files import take_lock
from moorage.worker.guard.messages import CONFIG_FILE, LOG_FILE, GuardConfig


def main() -> int:
    """Parse arguments, fork the guard, wait until it is ready."""
    return detach("moorage.worker.guard", "the guard", _guard)


def _guard(folder: Path, told: int) -> None:
    os.umask(0o077)
    log_to(folder / LOG_FILE)
    lock = take_lock(folder)
    try:
        config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=GuardConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise MoorageError(f"{folder / CONFIG_FILE}: {error}") from error
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    kernel.become_subreaper()
    kernel.protect_from_memory_killer()
    # Loaded only now: an error above needs none of it.
    from moorage.worker.guard.server import Server

    async def serve() -> None:
        await Server(folder, config).run(lambda: tell(told, "ready"))

    asyncio.run(serve())
    os.close(lock)
