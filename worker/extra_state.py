"""Kinds of state that CRIU 4.2 does not save, read from the frozen pod, and given back to the restored one.

* options of TCP and UDP sockets (``TCP_USER_TIMEOUT`` and others);
* eventfds with EFD_SEMAPHORE, pipes of packets, exit codes above 127: see `extra_files`;
* datagrams that wait in UDP sockets;
* processor affinity and timer slack of threads;
* the threads that POSIX timers signal, and the names that are left of files whose opened name was removed: `mend`
  needs them for the images.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import structlog

from moorage.errors import Refused
from moorage.worker import extra_files, extra_watches, under_way
from moorage.worker.borrow import borrowed, borrowed_socket, libc
from moorage.worker.extra_record import Extras, Pieces, PosixLock, SocketOptions, Thread
from moorage.worker.layers import PodLayers
from moorage.worker.network import corked, datagrams
from moorage.worker.network.datagrams import Datagram
from moorage.worker.preflight_proc import watched
from moorage.worker.sandbox.process import inner_pid
from moorage.worker.transient import waiting_bytes

log = structlog.get_logger(__name__)

_LOCK = re.compile(r"^lock:\t\d+: POSIX +\w+ +(READ|WRITE) +(\d+) \S+ (\d+) (\d+|EOF)$", re.MULTILINE)
_DEFAULT_SLACK = 50_000
_NOTIFIED = re.compile(r"^ID: (\d+)\n.*\nnotify: \w+/tid\.(\d+)$", re.MULTILINE)
_SOL_UDP, _SOL_IPV6, _IPV6_TCLASS, _IPV6_HOPS = 17, 41, 67, 16
_TCP_USER_TIMEOUT, _TCP_NOTSENT_LOWAT, _TCP_LINGER2, _TCP_SYNCNT, _TCP_DEFER, _TCP_CONGESTION = 18, 25, 8, 7, 9, 13
#: ``TCP_CONGESTION`` is a name, all others are numbers.
_OPTIONS = (
    (socket.SOL_IP, socket.IP_TOS), (socket.SOL_IP, socket.IP_TTL),
    (_SOL_IPV6, _IPV6_TCLASS), (_SOL_IPV6, _IPV6_HOPS),
    (socket.SOL_TCP, _TCP_USER_TIMEOUT), (socket.SOL_TCP, _TCP_NOTSENT_LOWAT), (socket.SOL_TCP, _TCP_LINGER2),
    (socket.SOL_TCP, _TCP_SYNCNT), (socket.SOL_TCP, _TCP_DEFER), (socket.SOL_TCP, _TCP_CONGESTION),
    # What a program is told beside the data, and how datagrams are cut and where multicast goes. The kernel's numbers:
    # Python has not all of the names.
    *((socket.SOL_SOCKET, number) for number in (29, 35, 40, 46)),
    *((socket.SOL_IP, number) for number in (8, 10, 11, 12, 13, 32, 33, 34)),
    *((_SOL_IPV6, number) for number in (17, 18, 19, 23, 25, 49, 51, 66)),
    (_SOL_UDP, 103), (_SOL_UDP, 104), (socket.SOL_TCP, 23),
    # After the type of service, which changes it.
    (socket.SOL_SOCKET, socket.SO_PRIORITY),
)  # fmt: skip


class Collected(NamedTuple):
    """What goes beside the images, what CRIU must be told before it dumps (the paths of inotify watches), and
    datagrams that were read and have to be delivered again."""

    extras: Extras
    watched: list[tuple[int, int, str]]
    again: list[Datagram]


def collect(host_pids: Iterable[int], layers: PodLayers) -> Collected:
    """What CRIU leaves out of the frozen processes with these ids of the host.

    Raises `Refused` when an open file has lost its name and no other name of it is found. Takes about 20 µs for each
    thread and 5 µs for each descriptor.
    """
    extras = Extras()
    nameless: dict[str, tuple[int, int, str]] = {}
    watching: list[Path] = []
    holders: dict[tuple[int, int], tuple[int, str]] = {}
    near: list[str] = []
    again: list[Datagram] = []
    seen: set[int] = set()
    everywhere = os.sched_getaffinity(0)
    host_pids = list(host_pids)
    for pid in host_pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            folder = Path("/proc", str(pid))
            inside = inner_pid(folder)
            _threads(folder, inside, everywhere, extras)
            for fd, target in _descriptors(folder):
                if target == "anon_inode:[timerfd]":
                    _count_ticks(pid, fd)
                elif target == "anon_inode:[eventfd]":
                    extra_files.eventfd(folder, inside, fd, extras)
                elif target.endswith("/ptmx"):
                    extra_files.terminal(pid, inside, fd, extras)
                elif target.startswith("pipe:"):
                    extra_files.packets(folder, inside, fd, extras, seen)
                elif target.startswith("anon_inode:inotify"):
                    watching.append(folder / "fdinfo" / str(fd))
                elif target.startswith("socket:"):
                    _socket(pid, inside, fd, extras, seen, again)
                elif target.startswith("/"):
                    extras.locks += posix_locks((folder / "fdinfo" / str(fd)).read_text(), pid, inside, fd)
                if target.endswith(" (deleted)"):
                    _nameless(folder / "fd" / str(fd), target, f"process {inside}, descriptor {fd}", nameless)
            for path, target in _mapped(folder):
                _nameless(path, target, f"process {inside}, a mapping", nameless)
            for identity, place in extra_watches.nameless(folder, _places(folder)):
                holders.setdefault(identity, (inside, place))
            near.append(str((folder / "cwd").readlink()))
    extra_files.zombies(host_pids, extras)
    extras.links = _names_left(nameless, layers)
    watches: dict[tuple[int, int], str] = {}
    for fdinfo in watching:
        _watches(fdinfo, extras, holders, watches)
    return Collected(extras, _watched(watches, layers, near), again)


def _count_ticks(pid: int, fd: int) -> None:
    """Let the kernel add up the ticks of a timer that nobody has read, as it does when asked for the time left."""
    with contextlib.suppress(OSError), borrowed(pid, fd) as copy:
        libc.timerfd_gettime(copy, ctypes.create_string_buffer(32))


def _watches(
    fdinfo: Path,
    extras: Extras,
    holders: Mapping[tuple[int, int], tuple[int, str]],
    watches: dict[tuple[int, int], str],
) -> None:
    inside, fd = inner_pid(fdinfo.parents[1]), int(fdinfo.name)
    holder = f"process {inside}, descriptor {fd} (inotify)"
    if waiting_bytes(int(fdinfo.parents[1].name), fd):
        raise Refused(
            f"{holder} holds events that nobody has read",
            "try again; if it stays, the program must read them or close it",
        )
    text = fdinfo.read_text()
    extras.watches += extra_watches.watches(text, inside, fd, holders)
    watches |= {identity: holder for identity in watched(text) if identity not in holders}


def _watched(watches: dict[tuple[int, int], str], layers: PodLayers, near: list[str]) -> list[tuple[int, int, str]]:
    """Device as CRIU writes it, inode number and path of all that inotify watches on the pod's own files."""
    if not watches:
        return []
    found = layers.names_of(watches.keys(), near, deep=True)
    return [((os.major(dev) << 20) | os.minor(dev), inode, path) for (dev, inode), path in found.items()]


def posix_locks(fdinfo: str, host_pid: int, pid: int, fd: int) -> list[PosixLock]:
    """The POSIX locks of process ``host_pid`` (``pid`` in the pod) in the text of its descriptor's fdinfo. Pure."""
    return [
        PosixLock(pid, fd, kind == "WRITE", int(start), 0 if end == "EOF" else int(end) + 1 - int(start))
        for kind, owner, start, end in _LOCK.findall(fdinfo)
        if int(owner) == host_pid
    ]


def _threads(folder: Path, inside: int, everywhere: set[int], extras: Extras) -> None:
    with contextlib.suppress(OSError):
        for timer, host in _NOTIFIED.findall((folder / "timers").read_text()):
            extras.timers.setdefault(str(inside), {})[int(timer)] = inner_pid(folder / "task" / host)
    for task in [entry.name for entry in (folder / "task").iterdir()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            cpus = os.sched_getaffinity(int(task))
            slack = _slack(task)
            if cpus != everywhere or slack:
                narrow = sorted(cpus) if cpus != everywhere else []
                extras.scheduling.append(Thread(inner_pid(folder / "task" / task), narrow, slack))


def _slack(task: str) -> int:
    """Nanoseconds, 0 for the usual ones."""
    try:
        slack = int(Path("/proc", task, "timerslack_ns").read_text())
    except OSError:
        return 0  # of a thread with real-time priority, or root may not
    return 0 if slack == _DEFAULT_SLACK else slack


def _descriptors(folder: Path) -> Iterator[tuple[int, str]]:
    for link in (folder / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield int(link.name), str(link.readlink())


def _places(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """What is open and mapped: the place below the process's folder, its path, what it leads to."""
    for fd, target in _descriptors(folder):
        yield f"fd/{fd}", folder / "fd" / str(fd), target
    for path, target in _mapped(folder):
        yield f"map_files/{path.name}", path, target


def _mapped(folder: Path) -> Iterator[tuple[Path, str]]:
    for line in (folder / "maps").read_text(errors="surrogateescape").splitlines():
        if line.endswith(" (deleted)") and " /" in line:
            low, _, high = line.partition(" ")[0].partition("-")
            path = folder / "map_files" / f"{int(low, 16):x}-{int(high, 16):x}"
            with contextlib.suppress(OSError):
                yield path, str(path.readlink())


def _socket(pid: int, inside: int, fd: int, extras: Extras, seen: set[int], again: list[Datagram]) -> None:
    with contextlib.suppress(OSError), borrowed_socket(pid, fd) as sock:
        inode = os.fstat(sock.fileno()).st_ino
        if inode in seen:
            return
        seen.add(inode)
        if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM and (starts := under_way.starts(sock)):
            extras.pieces.append(Pieces(inside, fd, starts))
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return
        options = []
        for level, name in _OPTIONS:
            with contextlib.suppress(OSError):
                options.append((level, name, sock.getsockopt(level, name, _length(level, name))))
        extras.sockets.append(SocketOptions(inside, fd, options))
        if sock.type == socket.SOCK_DGRAM and sock.proto in (0, socket.IPPROTO_UDP):
            if (held_back := corked.look(sock, inside, fd)) is not None:
                extras.corked.append(held_back)
            found = datagrams.peek(sock)
            extras.datagrams += found
            if datagrams.spent(sock, found):
                again.extend(found)


def _length(level: int, name: int) -> int:
    return 16 if (level, name) == (socket.SOL_TCP, _TCP_CONGESTION) else 4


def _nameless(path: Path, target: str, holder: str, nameless: dict[str, tuple[int, int, str]]) -> None:
    name = target.removesuffix(" (deleted)")
    if not name.startswith("/") or name.startswith(("/memfd:", "/SYSV", "/dev/", "/[aio]")):
        return  # memory, or on a file system whose content CRIU itself saves
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        if status.st_nlink == 0 or stat.S_ISDIR(status.st_mode):
            return
        found = (status.st_dev, status.st_ino)
        if nameless.setdefault(name, (*found, holder))[:2] != found:
            raise Refused(
                f"{holder} ({name}): two open files have lost this same name, and have others",
                "close one of them before the checkpoint",
            )


def _names_left(nameless: dict[str, tuple[int, int, str]], layers: PodLayers) -> dict[str, str]:
    if not nameless:
        return {}
    wanted = {(device, inode) for device, inode, _ in nameless.values()}
    found = layers.names_of(wanted, near=[os.path.dirname(name) for name in nameless])  # noqa: PTH120
    links = {}
    for name, (device, inode, holder) in nameless.items():
        left = found.get((device, inode))
        if left is None:
            raise Refused(
                f"{holder} ({name}): the file has lost this name, and the one that is left was not found",
                "close it, or open it by the name that is left",
            )
        links[name] = left
    return links


def give_back(host_pids: Iterable[int], extras: Extras) -> None:
    """Give the restored, still frozen processes what `collect` had found. What this node does not allow is logged."""
    tasks = dict(tasks_of(host_pids))
    here = os.sched_getaffinity(0)
    for thread in extras.scheduling:
        host = tasks.get(thread.tid)
        cpus = here.intersection(thread.cpus)
        try:
            if host is not None and cpus:
                os.sched_setaffinity(host, cpus)
            if host is not None and thread.slack:
                Path("/proc", str(host), "timerslack_ns").write_text(str(thread.slack))
        except OSError as error:
            log.warning("a thread's scheduling was not restored", thread=thread.tid, error=str(error))
    for saved in extras.sockets:
        host = tasks.get(saved.pid)
        if host is not None:
            _set_options(host, saved)

    extra_files.give_back(extras.packets, tasks)
    extra_files.set_terminals(extras.terminals, tasks, on=True)
    extra_watches.give(extras.watches, tasks)


def tasks_of(host_pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Pairs of a thread's number in the pod and on the host."""
    for pid in host_pids:
        folder = Path("/proc", str(pid), "task")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in folder.iterdir():
                yield inner_pid(task), int(task.name)


def _set_options(host: int, saved: SocketOptions) -> None:
    try:
        with borrowed_socket(host, saved.fd) as sock:
            for level, name, value in saved.options:
                with contextlib.suppress(OSError):
                    if sock.getsockopt(level, name, _length(level, name)) != value:
                        sock.setsockopt(level, name, value)
    except OSError as error:
        log.warning("a socket's options were not restored", process=saved.pid, descriptor=saved.fd, error=str(error))
