"""Files that a process can change through memory without any time stamp telling."""

from __future__ import annotations

from collections.abc import Iterable


def mapped_shared_writable(pids: Iterable[int]) -> set[tuple[int, int]]:
    """``(st_dev, st_ino)`` of all files that these processes have mapped shared and could write through the mapping.

    Host pids. A process that has gone is skipped. Needs root.
    """
    raise NotImplementedError
