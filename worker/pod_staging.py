"""Where a capture stands until it is in the store: memory (tmpfs) if there is plenty, else the pod's folder on disk."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from moorage.errors import NoCapacity
from moorage.worker import inventory

SHARED_MEMORY = Path("/dev/shm")
#: This part of the machine's memory is never taken for staging: the jobs that run on need it.
_KEPT_FREE = 0.25


def in_memory(needed: int, *, total: int, available: int, shm_free: int) -> bool:
    """Whether ``needed`` bytes fit in memory with a quarter of it left over. Pure. All in bytes."""
    return needed <= shm_free and needed <= available - int(total * _KEPT_FREE)


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written where ``folder`` (or its nearest parent that exists) lies."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def memory_root(cluster: str, node: str) -> Path:
    """The node's folder in memory; the pods do not see it, they have a ``/dev/shm`` of their own."""
    return SHARED_MEMORY / f"moorage-{cluster}-{node}"


def choose(needed: int, *, on_disk: Path, in_shm: Path) -> Path:
    """The folder to use, ``in_shm`` or ``on_disk``; neither is made. Raises `NoCapacity` when both are too small."""
    if SHARED_MEMORY.is_dir() and in_memory(
        needed,
        total=inventory.memory_total(),
        available=inventory.memory_available(),
        shm_free=free_bytes(SHARED_MEMORY),
    ):
        return in_shm
    free = free_bytes(on_disk)
    if needed > free:
        raise NoCapacity(
            f"staging needs about {needed / 2**20:.0f} MiB; {on_disk} has {free / 2**20:.0f} MiB",
            "free space on the node's state folder",
        )
    return on_disk


def make(folder: Path) -> Path:
    """Create ``folder`` and the one that it stands in (0700) afresh; what an earlier attempt left there goes."""
    shutil.rmtree(folder, ignore_errors=True)
    while True:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the last capture beside it went, and their folder with it
            folder.mkdir(mode=0o700)
            return folder


def sweep(root: Path, known: Collection[str]) -> None:
    """Delete what stands in ``root`` under names that are not ``known``, and ``root`` itself if nothing is left.

    Captures of pods whose folders are gone (the node's state was lost) would fill the memory until the machine ends.
    """
    for folder in root.iterdir() if root.is_dir() else ():
        if folder.name not in known:
            shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # absent, or captures that are still wanted stand there
        root.rmdir()


def drop(folder: Path) -> None:
    """Delete ``folder`` with all in it. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)
