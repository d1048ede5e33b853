"""A process that outlives its caller: guard of a pod, or GPU broker of a node."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from moorage.errors import MoorageError


def detach(program: str, what: str, become: Callable[[Path, int], None]) -> int:
    """Parse ``--folder``, fork, and wait until the child, in ``become(folder, told)``, has told that it is ready.

    Returns the caller's exit code: 0, or 1 with the child's reason on stderr. The child never returns.
    """
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--folder", required=True, type=Path)
    folder: Path = parser.parse_args().folder
    heard, told = os.pipe()
    if os.fork():
        os.close(told)
        with os.fdopen(heard, "rb") as pipe:
            answer = pipe.read()
        if answer == b"ready":
            return 0
        print(answer.decode(errors="replace") or f"{what} died at its start", file=sys.stderr)
        return 1
    os.close(heard)
    os.setsid()
    try:
        become(folder, told)
    except BaseException as error:
        tell(told, str(error) if isinstance(error, MoorageError) else f"{type(error).__name__}: {error}")
        structlog.get_logger(__name__).exception(f"{what} ends")
        os._exit(1)
    os._exit(0)


def tell(told: int, words: str) -> None:
    """Say it to the process that started this one, once."""
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
