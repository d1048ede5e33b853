"""Find processes that stand in the middle of a vfork.

Between ``vfork`` (or ``posix_spawn``) and the child's ``exec`` the child runs in its parent's memory, and the parent
waits in the kernel where no debugger can stop it. Frozen at that moment, such a pair can neither go on nor be saved:
CRIU waits ten seconds for the parent and gives up. The moment lasts well under a millisecond, so letting the pod run
on a little is all it takes; but programs that start others all the time hit it often.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

_KCMP: Final = {"x86_64": 312, "aarch64": 272}.get(platform.machine())
_KCMP_VM: Final = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Vfork(NamedTuple):
    """A child in its parent's memory, by host pids, and the parent's name."""

    child: int
    parent: int
    name: str


def pending(pids: Iterable[int]) -> list[Vfork]:
    """All that are under way among these processes. Empty where the kernel cannot tell (CRIU needs that call too)."""
    wanted = set(pids)
    found = []
    for child in wanted:
        parent = _parent(child)
        if parent in wanted and _same_memory(child, parent):
            found.append(Vfork(child, parent, _name(parent)))
    return found


def _same_memory(one: int, other: int) -> bool:
    return _KCMP is not None and _libc.syscall(_KCMP, one, other, _KCMP_VM, 0, 0) == 0


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"
