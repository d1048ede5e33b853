"""What CRIU writes into its images that would come back wrong, put right before a restore. Pure but for `mend`.

* A periodic timerfd that has ticked unread shows no time to its next tick (the kernel starts it again at the next
  read), and CRIU would restore it stopped: it gets one nanosecond.
* A POSIX timer that signals one thread names none: CRIU writes down what happened to be in its memory.
* Of an eventfd with EFD_SEMAPHORE or a counter of more than 32 bits, and of an exit code above 127, a preloaded library
  is told (native/criu_limits/mends.cpp).
* CRIU leaves out the POSIX locks that a process took on a descriptor which it shares with its parent.
* What waits in a stream before a message with descriptors is written as one message with it.
* An open file that lost its name while it has another is opened by the other one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from moorage.worker.extra_record import Extras, PosixLock
from moorage.worker.sandbox import images

T = TypeVar("T")

#: Counters from here on stand for eventfds that the library makes.
_FIRST_MARK = 0xE0000000
_POSIX = 1  # FL_POSIX


def mend(folder: Path, extras: Extras) -> str:
    """Edit the images in ``folder``; what `criu.MENDS_FILE` has to say. Raises `CorruptData`."""
    images.edit(folder / "files.img", "file", wind_timers)
    if extras.links:
        _relink(folder, extras.links)
    for process, timers in extras.timers.items():
        images.edit(folder / f"core-{process}.img", "core", functools.partial(name_threads, threads=timers))
    if extras.locks:
        adding = functools.partial(add_locks, locks=extras.locks)
        images.edit(folder / "filelocks.img", "lock", adding, absent=images.LOCKS_MAGIC)
    if extras.pieces:
        starts: dict[int, list[int]] = {}
        for one in extras.pieces:
            starts |= dict(_files(folder, str(one.pid), {one.fd: one.starts}))
        images.edit_packets(folder / "sk-queues.img", functools.partial(split, starts=starts))
    said = [f"z {process} {code};" for process, code in extras.zombies.items()]
    if extras.eventfds:
        flags = dict(pair for process, fds in extras.eventfds.items() for pair in _files(folder, process, fds))
        images.edit(folder / "files.img", "file", functools.partial(mark_eventfds, flags=flags, said=said))
    return "".join(said)


def _files(folder: Path, process: str, fds: Mapping[int, T]) -> Iterator[tuple[int, T]]:
    """Ids of the open files behind descriptors of a process, with what ``fds`` holds for each."""
    table = images.read(folder / f"ids-{process}.img", "ids")[1][0].files_id
    for one in images.read(folder / f"fdinfo-{table}.img", "descriptor")[1]:
        if one.fd in fds:
            yield one.id, fds[one.fd]


def mark_eventfds(files: list[Any], flags: Mapping[int, int], said: list[str]) -> list[Any]:
    """Give the eventfds with these ids counters that no other one has; ``said`` gets what they stand for."""
    counters = {file.eventfd.counter & 0xFFFFFFFF for file in files if file.type == images.TYPE_EVENTFD}
    marks = (mark for mark in range(_FIRST_MARK, 1 << 32) if mark not in counters)
    for file in files:
        if file.type == images.TYPE_EVENTFD and file.id in flags:
            mark = next(marks)
            said.append(f"e {mark} {file.eventfd.counter} {flags[file.id]};")
            file.eventfd.counter = mark
    return files


def add_locks(found: list[Any], locks: Sequence[PosixLock]) -> list[Any] | None:
    """Append the locks that are not among ``found``; None if all are."""
    known = {(each.pid, each.fd, each.start, each.length) for each in found if each.flag & _POSIX}
    entry = images.message("lock")
    lacking = [
        entry(flag=_POSIX, type=int(lock.write), pid=lock.pid, fd=lock.fd, start=lock.start, length=lock.length)
        for lock in locks
        if (lock.pid, lock.fd, lock.start, lock.length) not in known
    ]
    return [*found, *lacking] if lacking else None


def split(found: list[tuple[Any, bytes]], starts: Mapping[int, Sequence[int]]) -> list[tuple[Any, bytes]] | None:
    """Cut what came before a message with descriptors off it. ``starts``: id of a socket → where, in all that waits in
    it, such messages begin. None if there is nothing to cut."""
    cut: list[tuple[Any, bytes]] = []
    read: dict[int, int] = {}
    for entry, data in found:
        begins = read.get(entry.id_for, 0)
        read[entry.id_for] = begins + len(data)
        for start in starts.get(entry.id_for, ()):
            if begins < start < begins + len(data) and entry.scm:
                plain = type(entry)()
                plain.CopyFrom(entry)
                plain.ClearField("scm")
                plain.length = start - begins
                entry.length -= plain.length
                cut.append((plain, data[: plain.length]))
                data = data[plain.length :]
        cut.append((entry, data))
    return cut if len(cut) > len(found) else None


def wind_timers(files: list[Any]) -> list[Any] | None:
    """Let each periodic timerfd without a time to its next tick have one."""
    changed = False
    for file in files:
        if file.type != images.TYPE_TIMERFD:
            continue
        timer = file.timerfd
        periodic = timer.interval_seconds or timer.interval_nanoseconds
        if periodic and not timer.value_seconds and not timer.value_nanoseconds:
            timer.value_nanoseconds = 1
            changed = True
    return files if changed else None


def name_threads(cores: list[Any], threads: Mapping[int, int]) -> list[Any] | None:
    """Give each POSIX timer in ``threads`` (timer → thread) the thread that it signals."""
    changed = False
    for core in cores:
        for timer in core.task.timers.posix if core.HasField("task") else ():
            if timer.it_id in threads:
                timer.notify_thread_id = threads[timer.it_id]
                changed = True
    return cores if changed else None


def _relink(folder: Path, links: Mapping[str, str]) -> None:
    found: set[int] = set()

    def drop(remaps: list[Any]) -> list[Any] | None:
        linked = [remap for remap in remaps if remap.remap_type == images.REMAP_LINKED and remap.orig_id in named]
        found.update(remap.orig_id for remap in linked)
        return [remap for remap in remaps if remap not in linked] if linked else None

    def rename(files: list[Any]) -> list[Any] | None:
        for file in files:
            if file.type == images.TYPE_REGULAR and file.id in found:
                file.regular.name = named[file.id]
        return files

    named = linked_names(folder / "files.img", links)
    images.edit(folder / "remap-fpath.img", "remap", drop)
    if found:
        images.edit(folder / "files.img", "file", rename)


def linked_names(path: Path, links: Mapping[str, str]) -> dict[int, bytes]:
    """Id → name that is left, of the open files whose name was removed. Raises `CorruptData`."""
    names = {}
    for file in images.read(path, "file")[1]:
        if file.type == images.TYPE_REGULAR:
            left = links.get("/" + file.regular.name.decode(errors="surrogateescape").lstrip("/"))
            if left is not None:
                names[file.id] = left.encode(errors="surrogateescape")
    return names
