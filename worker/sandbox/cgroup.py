"""The cgroup of a pod: freeze and thaw it, kill what is in it, read its CPU time. Version 1 and version 2 hosts.

The guard writes the freezer itself: it takes under a millisecond, and works when runc cannot be started.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from pathlib import Path
from typing import Literal

from moorage.errors import EnvironmentLacking, MoorageError

FreezerState = Literal["absent", "thawed", "freezing", "frozen"]

_MOUNTS = Path("/proc/self/mountinfo")
_POLL_SECONDS = (0.0005, 0.02)


def parse_mounts(mountinfo: str) -> dict[str, Path]:
    """Mount points of the cgroup hierarchies by controller; ``""`` is the version 2 one. Pure.

    Where the same hierarchy is mounted several times, the first below ``/sys/fs/cgroup`` is taken.
    """
    found: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        if not point.is_relative_to("/sys/fs/cgroup"):
            continue
        if tail[0] == "cgroup2":
            found.setdefault("", point)
        elif tail[0] == "cgroup":
            for option in tail[2].split(","):
                found.setdefault(option, point)
    return found


@functools.cache
def _mounts() -> dict[str, Path]:
    return parse_mounts(_MOUNTS.read_text())


class PodCgroup:
    """The cgroup at ``path`` (absolute, as in ``linux.cgroupsPath``). It need not exist yet."""

    def __init__(self, path: str, *, mounts: dict[str, Path] | None = None) -> None:
        """Raises `EnvironmentLacking` when the host has no freezer."""
        mounts = _mounts() if mounts is None else mounts
        below = path.lstrip("/")
        # A hybrid host has both; runc then uses version 1, and so does the pod.
        self.unified = mounts.get("") == Path("/sys/fs/cgroup") or ("" in mounts and "freezer" not in mounts)
        if not self.unified and "freezer" not in mounts:
            raise EnvironmentLacking("no cgroup freezer is mounted below /sys/fs/cgroup", "mount cgroup2 there")
        self.root = mounts["" if self.unified else "freezer"]
        self.folder = self.root / below
        cpu = mounts.get("" if self.unified else "cpuacct")
        self._cpu_file = cpu / below / ("cpu.stat" if self.unified else "cpuacct.usage") if cpu else None
        self._switch = self.folder / ("cgroup.freeze" if self.unified else "freezer.state")

    def processes(self) -> list[int]:
        """Host pids of all processes in it; empty when it is gone."""
        try:
            return [int(pid) for pid in (self.folder / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def state(self) -> FreezerState:
        """Whether its processes stand. ``freezing``: ordered to, and not all stand yet."""
        try:
            if not self.unified:
                word = self._switch.read_text().strip()
                return "frozen" if word == "FROZEN" else "freezing" if word == "FREEZING" else "thawed"
            if self._switch.read_text().strip() != "1":
                return "thawed"
            events = (self.folder / "cgroup.events").read_text().split()
            return "frozen" if events[events.index("frozen") + 1] == "1" else "freezing"
        except (OSError, ValueError):
            return "absent"

    def order(self, *, frozen: bool) -> None:
        """Tell the kernel; does not wait. Raises `OSError` when the cgroup is gone."""
        words = ("1", "0") if self.unified else ("FROZEN", "THAWED")
        self._switch.write_text(words[0] if frozen else words[1])

    async def freeze(self, seconds: float = 10.0) -> None:
        """Freeze, and wait until every process stands. A cgroup that is gone counts as frozen.

        Raises `MoorageError` naming a process that does not stand after ``seconds``; it is left freezing.
        """
        await self._until(frozen=True, seconds=seconds)

    async def thaw(self, seconds: float = 10.0) -> None:
        """Thaw, and wait until it is."""
        await self._until(frozen=False, seconds=seconds)

    async def _until(self, *, frozen: bool, seconds: float) -> None:
        goal = "frozen" if frozen else "thawed"
        end = time.monotonic() + seconds
        pause = _POLL_SECONDS[0]
        while True:
            # Ordered again each time: a process forked while version 1 freezes can slip through.
            try:
                self.order(frozen=frozen)
            except OSError:
                return
            if self.state() in (goal, "absent"):
                return
            if time.monotonic() >= end:
                raise MoorageError(f"the pod cannot be {goal}: {self._stubborn()}", "see its state in /proc/PID/stack")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _POLL_SECONDS[1])

    def _stubborn(self) -> str:
        for pid in self.processes():
            with contextlib.suppress(OSError, IndexError):
                head, _, tail = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
                if tail.split()[0] == "D":
                    return f"process {head.partition('(')[2]} (pid {pid}) waits in the kernel"
        return f"{len(self.processes())} processes are in {self.folder}"

    def signal_all(self, number: int = signal.SIGKILL) -> int:
        """Signal every process in it, frozen or not; returns how many there were. Frozen ones act on it when thawed."""
        pids = self.processes()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(pids)

    async def kill(self, seconds: float) -> None:
        """SIGKILL to all, so that none runs another instruction of its own, and wait until the cgroup is empty.

        Raises `MoorageError` when some are left after ``seconds``.
        """
        with contextlib.suppress(MoorageError):
            await self.freeze(min(2.0, seconds))
        end = time.monotonic() + seconds
        pause = _POLL_SECONDS[0]
        while self.signal_all():
            with contextlib.suppress(OSError):
                self.order(frozen=False)
            if time.monotonic() >= end:
                raise MoorageError(f"the pod does not die: {self._stubborn()}", "its node may have to be restarted")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _POLL_SECONDS[1])

    def cpu_seconds(self) -> float:
        """CPU time of all processes so far; 0 when the host does not count it."""
        try:
            text = self._cpu_file.read_text() if self._cpu_file else "0"
            return int(text.split()[1]) / 1e6 if self.unified else int(text) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0
