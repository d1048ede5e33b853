"""Open files and dead processes that CRIU 4.2 would bring back otherwise than they were: found in the frozen pod."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import termios
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moorage.worker.borrow import borrowed, libc, readable_bytes
from moorage.worker.extra_record import Extras, PacketPipe, Terminal
from moorage.worker.sandbox.process import inner_pid

_F_SETPIPE_SZ, _F_GETPIPE_SZ = 1031, 1032
_SPLICE_F_NONBLOCK = 2
_EFD_SEMAPHORE = 1
_LARGEST_COUNT = (1 << 32) - 1
_PACKET_BYTES = 1 << 16


def eventfd(folder: Path, inside: int, fd: int, extras: Extras) -> None:
    """Note an eventfd with EFD_SEMAPHORE, or one whose counter CRIU would cut."""
    text = (folder / "fdinfo" / str(fd)).read_text()
    count = re.search(r"^eventfd-count:\s+([0-9a-f]+)", text, re.MULTILINE)
    semaphore = re.search(r"^eventfd-semaphore:\s+1", text, re.MULTILINE)
    if semaphore or (count and int(count[1], 16) > _LARGEST_COUNT):
        extras.eventfds.setdefault(str(inside), {})[fd] = _EFD_SEMAPHORE if semaphore else 0


def packets(folder: Path, inside: int, fd: int, extras: Extras, seen: set[int]) -> None:
    """Note this end of a pipe of packets, if it is one, and once what waits in the pipe. It stays as it is."""
    flags = re.search(r"^flags:\s+(\d+)", (folder / "fdinfo" / str(fd)).read_text(), re.MULTILINE)
    if not flags or not int(flags[1], 8) & os.O_DIRECT:
        return
    path = folder / "fd" / str(fd)
    inode = path.stat().st_ino
    found = _copied(path) if inode not in seen else []
    seen.add(inode)
    extras.packets.append(PacketPipe(inside, fd, found))


def _copied(path: Path) -> list[bytes]:
    with contextlib.ExitStack() as stack:
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        stack.callback(os.close, source)
        ends = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        for end in ends:
            stack.callback(os.close, end)
        size = fcntl.fcntl(source, _F_GETPIPE_SZ)
        fcntl.fcntl(ends[1], _F_SETPIPE_SZ, size)
        if libc.tee(source, ends[1], ctypes.c_size_t(size), _SPLICE_F_NONBLOCK) < 0:
            number = ctypes.get_errno()
            if number == errno.EAGAIN:
                return []
            raise OSError(number, f"tee: {os.strerror(number)}")
        return list(_packets(ends[0]))


def _packets(end: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while packet := os.read(end, _PACKET_BYTES):
            yield packet


def set_packets(pipes: Iterable[PacketPipe], tasks: Mapping[int, int], *, on: bool) -> None:
    """Let these be pipes of packets, or plain ones while CRIU looks, which refuses the others. ``tasks``: process in
    the pod → on the host. What is in them stays as it is. Raises `OSError`."""
    for pipe in pipes:
        if (host := tasks.get(pipe.pid)) is not None:
            with borrowed(host, pipe.fd) as copy:
                flags = fcntl.fcntl(copy, fcntl.F_GETFL)
                fcntl.fcntl(copy, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def give_back(pipes: Iterable[PacketPipe], tasks: Mapping[int, int]) -> None:
    """Make restored pipes what they were. Raises `OSError`."""
    pipes = list(pipes)
    set_packets(pipes, tasks, on=True)
    for pipe in pipes:
        if pipe.packets and (host := tasks.get(pipe.pid)) is not None:
            _fill(Path("/proc", str(host), "fd", str(pipe.fd)), pipe.packets)


def _fill(path: Path, wanted: list[bytes]) -> None:
    """Put packets in place of what CRIU has put into the pipe as one stream."""
    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in _packets(source):
            pass
        target = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.fcntl(target, fcntl.F_SETFL, os.O_NONBLOCK | os.O_DIRECT)  # which open(2) refuses for a pipe
            for packet in wanted:
                os.write(target, packet)
        finally:
            os.close(target)
    finally:
        os.close(source)


def terminal(pid: int, inside: int, fd: int, extras: Extras) -> None:
    """Note a pseudo-terminal in which text waits that has gone through output processing (``\\n`` became ``\\r\\n``):
    CRIU reads it out and writes it in again, at a dump as at a restore, and it would be processed once more."""
    with contextlib.suppress(OSError, termios.error), borrowed(pid, fd) as copy:
        if readable_bytes(copy) and termios.tcgetattr(copy)[1] & termios.OPOST:
            extras.terminals.append(Terminal(inside, fd))


def set_terminals(terminals: Iterable[Terminal], tasks: Mapping[int, int], *, on: bool) -> None:
    """Switch their output processing. Raises `OSError`."""
    for one in terminals:
        if (host := tasks.get(one.pid)) is not None:
            with borrowed(host, one.fd) as copy:
                settings = termios.tcgetattr(copy)
                settings[1] = settings[1] | termios.OPOST if on else settings[1] & ~termios.OPOST
                termios.tcsetattr(copy, termios.TCSANOW, settings)


def zombies(host_pids: Iterable[int], extras: Extras) -> None:
    """Note the dead children with an exit code above 127; they are in no list of a cgroup."""
    for pid in host_pids:
        with contextlib.suppress(OSError):
            for task in Path("/proc", str(pid), "task").iterdir():
                for child in (task / "children").read_text().split():
                    _zombie(Path("/proc", child), extras)


def _zombie(folder: Path, extras: Extras) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        status = int(fields[-1])
        if fields[0] == "Z" and not status & 0x7F and status >> 8 > 127:
            extras.zombies[str(inner_pid(folder))] = status >> 8
