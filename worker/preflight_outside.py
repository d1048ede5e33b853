"""Finds what `preflight_ties` judges: looks at the pod's processes, and at those of the host beside them.

A process that ends meanwhile is left out. Nothing of the pod is changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from moorage.worker import unix_diag
from moorage.worker.borrow import borrowed_socket
from moorage.worker.preflight import Process
from moorage.worker.preflight_ties import Fact, parse_locks, shared_locks, too_short, without_parent
from moorage.worker.sandbox import inject

_SIOCGSKNS = 0x894C
_TCP_USER_TIMEOUT = 18
_OWN_NAMESPACES = ("pid", "user", "mnt", "net", "ipc", "uts", "time")


def look(
    processes: Iterable[Process],
    host_pids: Iterable[int],
    init: int,
    unix_peers: dict[int, int],
    seconds: float,
    *,
    with_broker: bool = False,
    own_ends: frozenset[int] = frozenset(),
    frozen_stays: bool = False,
) -> list[Fact]:
    """All facts about a pod. ``init``: host pid of its pid 1; ``unix_peers``: what `read_unix_peers` gave inside its
    network; ``seconds``: how long a checkpoint may keep it standing; ``with_broker``: its GPU
    processes speak to the node's broker over sockets of packets, which are no tie. ``own_ends``: inode numbers of
    the worker's ends of connections that are let go of before a capture. ``frozen_stays``: a stopped process in the
    frozen cgroup does not answer a tracer (version 1)."""
    processes, pids = list(processes), list(host_pids)
    facts = list(_strangers(pids, init))
    strangers = {int(fact.target) for fact in facts}
    own = [process for process in processes if process.host_pid not in strangers]
    facts += [fact for process in own for fact in _of_process(process, init, frozen_stays)]
    unix_peers = {inode: peer for inode, peer in unix_peers.items() if peer not in own_ends}
    shared, outside = _outside(own, frozenset(pids), init, unix_peers)
    facts += [
        fact
        for process in own
        for fact in _sockets(process, init, unix_peers, outside, seconds)
        if not (with_broker and fact.kind == "unix peer" and fact.detail == "packets")
    ]
    facts += shared
    facts += _locks(own, frozenset(pids), init)
    return facts


def _of_process(process: Process, init: int, frozen_stays: bool) -> Iterator[Fact]:
    folder = Path("/proc", str(process.host_pid))
    with contextlib.suppress(OSError):
        for kind in _OWN_NAMESPACES:
            own = _namespace(process.host_pid, kind)
            if own and own != _namespace(init, kind):  # one that has ended meanwhile is in none
                yield Fact("namespace", str(process), detail={"mnt": "mount", "net": "network"}.get(kind, kind))
                break
        if frozen_stays and "\nState:\tT" in (folder / "status").read_text():
            yield Fact("stopped", str(process))
        if not inject.possible() and " /[aio]" in (folder / "maps").read_text():
            yield Fact("aio", str(process))


def _namespace(pid: int, kind: str) -> str:
    """The namespace of a process, empty for one that has ended."""
    try:
        return str(Path("/proc", str(pid), "ns", kind).readlink())
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _name(pid: int) -> str:
    folder = Path("/proc", str(pid))
    inside, name = pid, "?"
    with contextlib.suppress(OSError):
        for line in (folder / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                inside = int(line.split()[-1])
            elif line.startswith("Name:"):
                name = line.split(None, 1)[1]
    return f"process {inside} ({name})"


def _strangers(pids: list[int], init: int) -> Iterator[Fact]:
    """Processes in the pod's cgroup that its init is no ancestor of, and those outside that are in its namespaces."""
    if not init:
        return
    parents = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            parents[pid] = int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
    for pid in without_parent(parents, init):
        yield Fact("stranger", _name(pid), target=str(pid), detail=f"host pid {pid} is no descendant of its init")
    inside, wanted = set(pids), _namespace(init, "pid")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in inside:
            with contextlib.suppress(OSError):
                if wanted and _namespace(int(entry.name), "pid") == wanted and not _is_of(int(entry.name), init):
                    detail = f"host pid {entry.name} is in its process namespace, but not in its cgroup"
                    yield Fact("stranger", _name(int(entry.name)), target=entry.name, detail=detail)


def _is_of(pid: int, init: int) -> bool:
    """Whether it descends from the pod's init (one that began after the others were listed), or is about to end."""
    while pid > 1:
        if pid == init:
            return True
        state, parent = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[:2]
        if state in "ZX":
            return True
        pid = int(parent)
    return False


def read_unix_peers() -> dict[int, int]:
    """Inode → inode of the other end (0: none) of all unix sockets of the current network namespace."""
    return {inode: found.peer for inode, found in unix_diag.read().items()}


def _sockets(
    process: Process, init: int, unix_peers: dict[int, int], outside: set[int], seconds: float
) -> Iterator[Fact]:
    for file in process.files:
        if not file.target.startswith("socket:["):
            continue
        inode = int(file.target[8:-1])
        with contextlib.suppress(OSError), borrowed_socket(process.host_pid, file.fd) as sock:
            if not _same_network(sock, init):
                yield Fact("foreign socket", str(process), file.fd, file.target)
            elif sock.family == socket.AF_UNIX:
                peer = unix_peers.get(inode, 0)
                # What a process outside has accepted belongs to the network of the one that connected.
                if peer and (peer not in unix_peers or peer in outside):
                    yield Fact("unix peer", str(process), file.fd, file.target, _type(sock))
            elif file.protocol.startswith("TCP"):
                timeout = sock.getsockopt(socket.SOL_TCP, _TCP_USER_TIMEOUT)
                if too_short(timeout, seconds):
                    yield Fact("user timeout", str(process), file.fd, file.target, str(timeout))


def _type(sock: socket.socket) -> str:
    return "packets" if sock.type == socket.SOCK_SEQPACKET else ""


def _same_network(sock: socket.socket, init: int) -> bool:
    try:
        descriptor = fcntl.ioctl(sock.fileno(), _SIOCGSKNS)
    except OSError:
        return True  # a kind of socket that does not tell
    try:
        return os.fstat(descriptor).st_ino == Path("/proc", str(init), "ns", "net").stat().st_ino
    finally:
        os.close(descriptor)


def _outside(
    processes: list[Process], inside: frozenset[int], init: int, unix_peers: dict[int, int]
) -> tuple[list[Fact], set[int]]:
    """Pipes and FIFOs that a process outside has open as well, and the unix sockets of the pod's network that only
    processes outside have open. The output of the pod's init leads to its guard."""
    ours: dict[tuple[int, int], tuple[Process, int, str]] = {}
    held: set[str] = set()
    for process in processes:
        for file in process.files:
            if file.target.startswith("socket:["):
                held.add(file.target)
            elif stat.S_ISFIFO(file.mode) and not (process.host_pid == init and file.fd in (0, 1, 2)):
                with contextlib.suppress(OSError):
                    status = Path("/proc", str(process.host_pid), "fd", str(file.fd)).stat()
                    ours.setdefault((status.st_dev, status.st_ino), (process, file.fd, file.target))
    peers = {f"socket:[{peer}]": peer for peer in unix_peers.values() if peer} if held else {}
    wanted = {target: peer for target, peer in peers.items() if target not in held}
    facts: list[Fact] = []
    outside: set[int] = set()
    within = _namespace(init, "pid")
    for entry in Path("/proc").iterdir() if ours or wanted else ():
        if entry.name.isdigit() and int(entry.name) not in inside:
            with contextlib.suppress(OSError):
                if _namespace(int(entry.name), "pid") == within:
                    continue  # began after the others were listed
                for link in (entry / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        _compare(entry, link, ours, wanted, facts, outside)
    return facts, outside


def _compare(
    entry: Path,
    link: Path,
    ours: dict[tuple[int, int], tuple[Process, int, str]],
    wanted: dict[str, int],
    facts: list[Fact],
    outside: set[int],
) -> None:
    target = str(link.readlink())
    if target in wanted:
        outside.add(wanted[target])
    elif not target.startswith(("socket:", "anon_inode:")):
        status = link.stat()
        if stat.S_ISFIFO(status.st_mode) and (shared := ours.get((status.st_dev, status.st_ino))):
            comm = (entry / "comm").read_text().strip()
            facts.append(Fact("shared file", str(shared[0]), shared[1], shared[2], f"{entry.name} ({comm})"))


def _locks(processes: list[Process], inside: frozenset[int], init: int) -> Iterator[Fact]:
    found = shared_locks(parse_locks(Path("/proc/locks").read_text()), inside)
    within = _namespace(init, "pid")
    for lock, outside in found:
        if _namespace(outside, "pid") in ("", within):
            continue  # it has ended, or began after the others were listed
        for process in processes:
            if process.host_pid != lock.pid:
                continue
            for file in process.files:
                with contextlib.suppress(OSError):
                    status = Path("/proc", str(process.host_pid), "fd", str(file.fd)).stat()
                    device = (os.major(status.st_dev), os.minor(status.st_dev))
                    if (device, status.st_ino) == (lock.device, lock.inode):
                        comm = Path("/proc", str(outside), "comm").read_text().strip()
                        yield Fact("lock", str(process), file.fd, file.target, f"{outside} ({comm})")
                        break
