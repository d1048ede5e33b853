"""The nodes of the GPU driver in a pod's ``/dev``: those of the GPUs that it has on this host, and no others."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

_DRIVER = re.compile(r"nvidia(\d+|ctl|-uvm|-uvm-tools)")


def lay(folder: Path, wanted: Mapping[str, int]) -> None:
    """Make the driver's nodes in ``folder`` be ``wanted``: names, and device numbers as in ``st_rdev``.

    ``folder`` is the pod's, seen from outside: nothing in it is followed. What is mounted over is left. Raises OSError.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(place) as entries:
            there = {entry.name: _number(entry.name, place) for entry in entries if _DRIVER.fullmatch(entry.name)}
        for name, number in there.items():
            if wanted.get(name) != number:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=place)
        for name, number in wanted.items():
            if there.get(name) != number:
                os.mknod(name, stat.S_IFCHR | 0o666, number, dir_fd=place)
                os.chmod(name, 0o666, dir_fd=place)  # the umask took some of it
    finally:
        os.close(place)


def _number(name: str, place: int) -> int:
    status = os.stat(name, dir_fd=place, follow_symlinks=False)
    return status.st_rdev if stat.S_ISCHR(status.st_mode) else -1
