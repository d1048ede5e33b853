"""``python -P -m moorage.worker.guard --folder F``: become the guard of the pod in F, then return to the caller.

The caller's process ends with 0 when the guard, a process of its own that outlives the caller, answers on its socket;
with 1, and the reason on stderr, when it cannot.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import structlog

from moorage.errors import MoorageError
from moorage.worker.guard import kernel
from moorage.worker.guard.files import take_lock
from moorage.worker.guard.messages import CONFIG_FILE, LOG_FILE, GuardConfig


def main() -> int:
    """Parse arguments, fork the guard, wait until it is ready."""
    parser = argparse.ArgumentParser(prog="moorage.worker.guard")
    parser.add_argument("--folder", required=True, type=Path)
    folder: Path = parser.parse_args().folder
    heard, told = os.pipe()
    if os.fork():
        os.close(told)
        with os.fdopen(heard, "rb") as pipe:
            answer = pipe.read()
        if answer == b"ready":
            return 0
        print(answer.decode(errors="replace") or "the guard died at its start", file=sys.stderr)
        return 1
    os.close(heard)
    os.setsid()
    try:
        _guard(folder, told)
    except BaseException as error:
        _tell(told, str(error) if isinstance(error, MoorageError) else f"{type(error).__name__}: {error}")
        structlog.get_logger(__name__).exception("the guard ends")
        os._exit(1)
    os._exit(0)


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
        await Server(folder, config).run(lambda: _tell(told, "ready"))

    asyncio.run(serve())
    os.close(lock)


def _tell(told: int, words: str) -> None:
    try:
        os.write(told, words.encode())
        os.close(told)
    except OSError:
        pass  # told before, or the caller has not waited


def log_to(path: Path) -> None:
    """All output of this process goes to the file at ``path`` (0600), structured."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    null = os.open(os.devnull, os.O_RDWR)
    for standard, target in ((0, null), (1, descriptor), (2, descriptor)):
        os.dup2(target, standard)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.WriteLoggerFactory(file=os.fdopen(descriptor, "a", buffering=1)),
    )
