"""What ties a pod to the world outside, or cannot be read out of the kernel: facts, and what is said of them. Pure.

`preflight_outside` finds the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from moorage.worker.preflight import Objection


class Fact(NamedTuple):
    """Something about a process, or one of its descriptors.

    ``kind`` is a key of `SAYINGS`; ``who`` such as ``process 7 (python3)``, ``target`` what the descriptor leads to,
    ``detail`` what the reason names (a process outside, a number).
    """

    kind: str
    who: str
    fd: int = -1
    target: str = ""
    detail: str = ""


class Saying(NamedTuple):
    """Reason and way out. ``{detail}`` stands for the fact's own."""

    why: str
    cure: str


SAYINGS: Final = {
    "shared file": Saying(
        "the process {detail} outside the pod has its other end",
        "let both ends be inside the pod, or close it before the checkpoint",
    ),
    "lock": Saying(
        "the process {detail} outside the pod holds or waits for a lock of the same file",
        "release the lock before the checkpoint, or let one side use another file",
    ),
    "unix peer": Saying(
        "the other end of this unix socket is outside the pod",
        "close the connection to the program outside before the checkpoint",
    ),
    "foreign socket": Saying(
        "it was opened outside the pod, in another network namespace",
        "open the socket inside the pod",
    ),
    "user timeout": Saying(
        "TCP_USER_TIMEOUT of {detail} ms is shorter than a checkpoint may take, which would end the connection",
        "set TCP_USER_TIMEOUT to 0 or to a longer time",
    ),
    "aio": Saying(
        "it has an AIO context (io_setup), of which this kind of machine does not tell whether requests are in flight",
        "call io_destroy before the checkpoint, or use threads (POSIX aio) instead of io_submit",
    ),
    "stopped": Saying(
        "it is stopped (SIGSTOP or SIGTSTP), and CRIU cannot take hold of it in a frozen cgroup of version 1",
        "let it go on (SIGCONT), or end it, before the checkpoint",
    ),
    "namespace": Saying(
        "it is in a {detail} namespace of its own, as a nested container is",
        "end the nested container (docker, bubblewrap, unshare) before the checkpoint",
    ),
    "stranger": Saying(
        "moorage did not start it: {detail}",
        "end it, or start it with `moorage run` or `moorage exec`",
    ),
}


def judge(facts: Sequence[Fact]) -> list[Objection]:
    """An objection for each fact, in their order, each only once."""
    return list(dict.fromkeys(_objections(facts)))


def _objections(facts: Sequence[Fact]) -> Iterator[Objection]:
    for fact in facts:
        saying = SAYINGS[fact.kind]
        what = fact.who if fact.fd < 0 else f"{fact.who}, descriptor {fact.fd} ({fact.target})"
        yield Objection(what, saying.why.format(detail=fact.detail), saying.cure)


def too_short(user_timeout_ms: int, checkpoint_seconds: float) -> bool:
    """Whether a TCP_USER_TIMEOUT (0: none) may end a connection while its pod stands still."""
    return 0 < user_timeout_ms < checkpoint_seconds * 1000


class Lock(NamedTuple):
    """A line of /proc/locks. ``pid`` -1: of an open file description. ``waits``: not granted yet."""

    kind: str
    pid: int
    device: tuple[int, int]
    inode: int
    waits: bool = False


def parse_locks(text: str) -> list[Lock]:
    """The lines of /proc/locks; leases and the like are left out."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        waits = fields[1:2] == ["->"]
        if waits:
            del fields[1]
        if len(fields) < 6 or fields[1] not in ("POSIX", "FLOCK", "OFDLCK"):
            continue
        major, minor, inode = fields[5].split(":")
        found.append(Lock(fields[1], int(fields[4]), (int(major, 16), int(minor, 16)), int(inode), waits))
    return found


def shared_locks(locks: Sequence[Lock], inside: frozenset[int]) -> list[tuple[Lock, int]]:
    """Locks of processes inside on files of which a process outside, whose id comes with it, holds or wants a lock."""
    outside: dict[tuple[tuple[int, int], int], int] = {}
    for lock in locks:
        if lock.pid > 0 and lock.pid not in inside:
            outside.setdefault((lock.device, lock.inode), lock.pid)
    return [
        (lock, outside[lock.device, lock.inode])
        for lock in locks
        if lock.pid in inside and (lock.device, lock.inode) in outside
    ]


def without_parent(parents: dict[int, int], root: int) -> list[int]:
    """Processes (host pid → parent's host pid) that do not descend from ``root``."""

    def descends(pid: int) -> bool:
        seen = set()
        while pid != root and pid in parents and pid not in seen:
            seen.add(pid)
            pid = parents[pid]
        return pid == root

    return [pid for pid in parents if not descends(pid)]
