"""Host memory that was touched, held in a tmpfs until the moment that something is measured.

A virtual machine gets its memory from its host as it is touched, and gives it back soon after it is freed: whoever is
measured first then pays for all others. Files hold touched memory; each measurement frees, right before it begins, as
much as it will take.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_FILE = 64 << 20
_GIB = 16  # files


class Warm:
    """``folder`` lies in the tmpfs. Nothing is held at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "touched"
        self._folder.mkdir(mode=0o700)
        self._files: list[Path] = []
        self._made = 0

    def hold(self, spare_gib: float, *, least_gib: float | None = None) -> None:
        """Have all memory in hand but so much: the kernel may otherwise give memory that nobody ever touched.

        ``least_gib``: touch all but this first, so that what is left is no colder than the rest.
        """
        missing = round((free() - (spare_gib if least_gib is None else least_gib)) * _GIB)
        began = time.monotonic()
        noise = memoryview(os.urandom(_FILE))

        def one(number: int) -> Path | None:
            path = self._folder / str(number)
            try:
                with path.open("wb", buffering=0) as file:
                    file.write(noise)
            except OSError:
                path.unlink(missing_ok=True)
                return None
            return path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(one, range(self._made, self._made + missing)))
        self._made += max(0, missing)
        self._files += [path for path in made if path is not None]
        print(f"touched {len(made) / _GIB:.0f} GiB in {time.monotonic() - began:.1f} s; {memory()}", flush=True)
        if least_gib is not None:
            self.free(spare_gib - free())

    def free(self, gib: float) -> None:
        """Give so much back to the kernel; call it right before what is measured."""
        for path in [self._files.pop() for _ in range(max(0, min(len(self._files), round(gib * _GIB))))]:
            path.unlink()
        print(memory(), flush=True)


def free() -> float:
    """GiB that nobody has."""
    return _said("MemAvailable")


def memory() -> str:
    """What the kernel says of its memory, in one line."""
    return ", ".join(f"{name} {_said(name):.0f} GiB" for name in ("MemTotal", "MemFree", "Shmem"))


def _said(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines[name].split()[0]) / 2**20
