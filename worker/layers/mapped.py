"""Files that a process can change through memory without any time stamp telling.

A shared mapping of a file that was opened for writing counts even while it is read-only: mprotect makes it writable,
and pages that were dirty before take writes with no fault, hence no stamp.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from moorage.worker.preflight_proc import lives


def mapped_shared_writable(pids: Iterable[int]) -> set[tuple[int, int]]:
    """``(st_dev, st_ino)`` of all files that these processes have mapped shared and could write through the mapping.

    As stat gives them for the path in the pod: for a file of an overlay these are the overlay's, not the upper layer's.
    Host pids. A process that has gone is skipped. Raises PermissionError without root.
    """
    found: set[tuple[int, int]] = set()
    for pid in pids:
        folder = Path("/proc", str(pid))
        try:
            lines = (folder / "maps").read_bytes().splitlines()
        except OSError:
            if lives(folder):
                raise
            continue
        for span in shared_spans(lines):
            mapping = folder / "map_files" / span
            try:
                # The link's own mode tells how the file was opened.
                if mapping.lstat().st_mode & stat.S_IWUSR:
                    status = mapping.stat()
                    found.add((status.st_dev, status.st_ino))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def shared_spans(lines: Iterable[bytes]) -> list[str]:
    """Names under ``map_files`` of the shared mappings of files among the lines of a ``maps`` file."""
    spans = []
    for line in lines:
        span, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        if permissions[3:4] == b"s" and inode != b"0":
            low, _, high = os.fsdecode(span).partition("-")
            spans.append(f"{int(low, 16):x}-{int(high, 16):x}")  # map_files pads no zeros
    return spans
