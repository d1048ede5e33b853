"""Small files of the pod's folder, for guard and worker."""

from __future__ import annotations

import fcntl
import itertools
import os
from pathlib import Path

from moorage.errors import Conflict
from moorage.worker.guard.messages import LOCK_FILE

_numbers = itertools.count()


def write_private(path: Path, data: bytes) -> None:
    """Replace a file with one that only its owner can read, so that a reader never sees half of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{next(_numbers)}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)


def guard_alive(folder: Path) -> bool:
    """Whether a guard serves the pod of this folder: it holds the folder's lock for as long as it lives."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two lookers do not take each other for a guard.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def take_lock(folder: Path) -> int:
    """Become the folder's guard; the descriptor must stay open. Raises `Conflict` when it has one."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise Conflict(f"another guard serves {folder}") from None
    return descriptor
