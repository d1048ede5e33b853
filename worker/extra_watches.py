"""Watches of inotify on files that have no name any more, which CRIU cannot save: it makes watches by name.

They are taken away while CRIU looks, and made again afterwards and after a restore, through the descriptor of whoever
has the file open, with the number that they had.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moorage.errors import MoorageError, Refused
from moorage.worker.borrow import borrowed, libc
from moorage.worker.extra_record import Watch
from moorage.worker.preflight_proc import watched

_SET_NEXT_NUMBER = 0x40044900  # INOTIFY_IOC_SETNEXTWD, which kernels that CRIU works with have
_IGNORED = 0x8000
_EVENT = struct.Struct("=iIII")
_LINE = re.compile(r"^inotify wd:(\w+) ino:\w+ sdev:\w+ mask:(\w+)", re.MULTILINE)

Identity = tuple[int, int]


def nameless(folder: Path, files: Iterable[tuple[str, Path, str]]) -> Iterator[tuple[Identity, str]]:
    """``(st_dev, st_ino)`` of what the process at ``/proc/…`` has open or mapped and what has no name, with the place
    below its folder that leads to it. ``files``: places, their paths and what they lead to."""
    for place, path, target in (*files, ("cwd", folder / "cwd", str((folder / "cwd").readlink()))):
        if target.endswith(" (deleted)") and target.startswith("/"):
            with contextlib.suppress(OSError):
                status = path.stat()
                # The kernel says so too of a name that is gone while the file has another. A folder has but one.
                if status.st_nlink == 0 or place == "cwd":
                    yield (status.st_dev, status.st_ino), place


def watches(fdinfo: str, inside: int, fd: int, holders: Mapping[Identity, tuple[int, str]]) -> Iterator[Watch]:
    """Those in the text of an inotify descriptor's fdinfo that are on one of ``holders``: process in the pod and place
    by what has no name. Pure."""
    for identity, (number, mask) in zip(watched(fdinfo), _LINE.findall(fdinfo), strict=True):
        if identity in holders:
            pid, place = holders[identity]
            yield Watch(inside, fd, int(number, 16), int(mask, 16), pid, place)


def take(found: Iterable[Watch], tasks: Mapping[int, int]) -> None:
    """Remove these watches from the frozen pod, without an event. ``tasks``: process in the pod → on the host.

    Raises `OSError`, `Refused` when an event comes at this moment.
    """
    for watch in found:
        with borrowed(tasks[watch.pid], watch.fd) as copy:
            if libc.inotify_rm_watch(copy, watch.number) < 0:
                if ctypes.get_errno() == errno.EINVAL:
                    continue  # another process has the same descriptor, and came before
                raise OSError(ctypes.get_errno(), f"inotify_rm_watch: {os.strerror(ctypes.get_errno())}")
            with contextlib.suppress(OSError):  # a longer event than the one that says that the watch is gone
                event = _EVENT.unpack(os.read(copy, _EVENT.size))
                if event[:2] == (watch.number, _IGNORED):
                    continue
        raise Refused(
            f"process {watch.pid}, descriptor {watch.fd} (inotify) got an event while it stood still", "try again"
        )


def give(found: Iterable[Watch], tasks: Mapping[int, int]) -> None:
    """Make these watches again. Raises `OSError`, `MoorageError`."""
    for watch in found:
        if (host := tasks.get(watch.pid)) is None or (holder := tasks.get(watch.holder)) is None:
            continue
        with borrowed(host, watch.fd) as copy:
            text = Path("/proc/self/fdinfo", str(copy)).read_text()
            fcntl.ioctl(copy, _SET_NEXT_NUMBER, watch.number)
            path = os.fsencode(f"/proc/{holder}/{watch.place}")
            number = libc.inotify_add_watch(copy, path, ctypes.c_uint32(watch.mask))
            if number < 0:
                raise OSError(ctypes.get_errno(), f"inotify_add_watch: {os.strerror(ctypes.get_errno())}")
            if number != watch.number:
                raise MoorageError(f"a watch of process {watch.pid} would be {number} instead of {watch.number}")
            highest = max([number, *(int(other, 16) for other, _ in _LINE.findall(text))])
            fcntl.ioctl(copy, _SET_NEXT_NUMBER, highest + 1)
