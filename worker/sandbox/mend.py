"""What CRIU writes into its images that would come back wrong, put right before a restore. Pure but for `mend`.

* A periodic timerfd that has ticked unread shows no time to its next tick (the kernel starts it again at the next
  read), and CRIU would restore it stopped: it gets one nanosecond.
* A POSIX timer that signals one thread names none: CRIU writes down what happened to be in its memory.
* An open file that lost its name while it has another is opened by the other one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moorage.worker.extra_record import Extras
from moorage.worker.sandbox import images


def mend(folder: Path, extras: Extras) -> None:
    """Edit the images in ``folder``. Raises `CorruptData`."""
    images.edit(folder / "files.img", "file", wind_timers)
    if extras.links:
        _relink(folder, extras.links)
    for process, timers in extras.timers.items():
        images.edit(folder / f"core-{process}.img", "core", functools.partial(name_threads, threads=timers))


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
