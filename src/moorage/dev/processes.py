"""Processes of an embedded cluster: named by pid and start time, found by what they belong to, ended for certain."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from moorage.errors import MoorageError


class Identity(msgspec.Struct, frozen=True):
    """A process for certain: a pid may be given again, but not with the same start time (clock ticks since boot)."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has ``pid`` now; None if none has, or it is a zombie."""
        fields = _stat(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return Identity.of(self.pid) == self

    def open(self) -> int | None:
        """A pidfd of this very process; None if it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.alive():  # looked at after the pidfd was opened, so it is the same process
            return descriptor
        os.close(descriptor)
        return None

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False if the process is gone."""
        descriptor = self.open()
        if descriptor is None:
            return False
        try:
            signal.pidfd_send_signal(descriptor, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def everyone() -> Iterator[int]:
    """The pids of all processes of the machine."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty if it is gone or a kernel thread."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def in_namespace(path: Path) -> set[int]:
    """The processes whose network namespace is the one at ``path``."""
    try:
        wanted = path.stat()
    except OSError:
        return set()
    found = set()
    for pid in everyone():
        try:
            status = os.stat(f"/proc/{pid}/ns/net")  # noqa: PTH116 - a magic link; Path would do the same slower
        except OSError:
            continue
        if (status.st_ino, status.st_dev) == (wanted.st_ino, wanted.st_dev):
            found.add(pid)
    return found


def unescape(text: str) -> str:
    """A path as /proc/PID/mountinfo writes it (octal escapes for blanks)."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def naming(folder: Path) -> set[int]:
    """Moorage's own processes and etcd with a path in ``folder`` on their command line (not a ``tail`` of a log)."""
    prefix = f"{folder}/"
    found = set()
    for pid in everyone():
        words = arguments(pid)
        ours = any(word.startswith("moorage.") for word in words) or (words and Path(words[0]).name == "etcd")
        if ours and any(prefix in word for word in words):
            found.add(pid)
    return found


def descendants(pids: Collection[int]) -> set[int]:
    """``pids`` and all their children, and so on."""
    children: dict[int, list[int]] = {}
    for pid in everyone():
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def identities(pids: Iterable[int]) -> set[Identity]:
    """Those of ``pids`` that live, as identities."""
    return {identity for pid in pids if (identity := Identity.of(pid))}


def wait_gone(processes: Iterable[Identity], seconds: float) -> set[Identity]:
    """Wait until all are gone, at most so long; returns those that are not."""
    deadline = time.monotonic() + seconds
    left = set()
    for process in processes:
        descriptor = process.open()
        if descriptor is None:
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        finally:
            os.close(descriptor)
        if process.alive():
            left.add(process)
    return left


def _thaw(pid: int) -> None:
    """Let a process whose cgroup (version 1) is frozen take its SIGKILL; it dies before it runs another instruction."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if "freezer" in controllers.split(","):
                state = Path(f"/sys/fs/cgroup/freezer{path}/freezer.state")
                if path != "/" and state.read_text().strip() != "THAWED":
                    state.write_text("THAWED")
    except OSError:
        return  # the process is gone, or the machine has version 2, where a frozen process can be killed


def end(processes: Iterable[Identity], *, grace: float = 0.0) -> None:
    """End processes: SIGTERM and ``grace`` seconds first if that is not 0, then SIGKILL. Raises `MoorageError` naming a
    process that does not go (one that hangs in the kernel)."""
    processes = set(processes)
    if grace > 0:
        for process in processes:
            process.send(signal.SIGTERM)
            process.send(signal.SIGCONT)
        processes = wait_gone(processes, grace)
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        _thaw(process.pid)
    if left := wait_gone(processes, 30.0):
        names = ", ".join(f"{p.pid} ({' '.join(arguments(p.pid))[:80]})" for p in left)
        raise MoorageError(f"processes do not end although they were killed: {names}", "they hang in the kernel")


def end_all(find: Callable[[], set[int]]) -> None:
    """Kill what ``find`` names until it names nobody: a process may start another while the list is read."""
    own = {os.getpid(), os.getppid()}
    for _ in range(50):
        found = identities(find() - own)
        if not found:
            return
        end(found)
    raise MoorageError("processes come back as fast as they are killed", "something outside restarts them")
