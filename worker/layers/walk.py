"""Walking a folder tree by descriptors: no symlink is followed, no path is too long, the order is always the same."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Found(NamedTuple):
    """One entry. ``name`` in the folder ``dir_fd``, open until the next entry is asked for; ``path`` from the root."""

    dir_fd: int
    name: str
    path: bytes
    status: os.stat_result


def names_in(dir_fd: int) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(os.listdir(dir_fd))


def walk(root_fd: int, more_flags: int = 0) -> Iterator[Found]:
    """All entries below ``root_fd``, sorted by name, a folder directly before what is in it.

    An entry that vanishes while it is walked is left out. Folders are opened with ``more_flags`` as well.
    """
    flags = FOLDER_FLAGS | more_flags
    stack = [(os.open(".", flags, dir_fd=root_fd), b"", iter(names_in(root_fd)))]
    try:
        while stack:
            dir_fd, prefix, names = stack[-1]
            name = next(names, None)
            if name is None:
                os.close(dir_fd)
                stack.pop()
                continue
            try:
                status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            path = prefix + os.fsencode(name)
            yield Found(dir_fd, name, path, status)
            if stat.S_ISDIR(status.st_mode):
                try:
                    child = os.open(name, flags, dir_fd=dir_fd)
                except FileNotFoundError:
                    continue
                stack.append((child, path + b"/", iter(names_in(child))))
    finally:
        for dir_fd, _, _ in stack:
            os.close(dir_fd)


@contextmanager
def folder(path: Path | str, *, dir_fd: int | None = None) -> Iterator[int]:
    """An open folder."""
    fd = os.open(path, FOLDER_FLAGS, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def open_folder(root_fd: int, path: bytes) -> int:
    """Open the folder ``path`` below ``root_fd``, part by part, through no symlink."""
    fd = os.open(".", FOLDER_FLAGS, dir_fd=root_fd)
    try:
        for part in path.split(b"/") if path else ():
            child = os.open(part, FOLDER_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = child
    except BaseException:
        os.close(fd)
        raise
    return fd


def through(dir_fd: int, name: str) -> str:
    """A path for the calls that take no folder descriptor."""
    return f"/proc/self/fd/{dir_fd}/{name}"


def read_xattrs(dir_fd: int, name: str) -> tuple[tuple[bytes, bytes], ...]:
    """All extended attributes of an entry, sorted."""
    path = through(dir_fd, name)
    names = os.listxattr(path, follow_symlinks=False)
    return tuple(sorted((os.fsencode(n), os.getxattr(path, n, follow_symlinks=False)) for n in names))


def remove_tree(top: Path) -> None:
    """Delete a folder and all in it, however deep; a symlink in it is deleted, not followed. Absent: nothing to do."""
    if not top.is_dir() or top.is_symlink():
        top.unlink(missing_ok=True)
        return
    parent = os.open(top.parent, FOLDER_FLAGS)
    first = os.open(top.name, FOLDER_FLAGS, dir_fd=parent)
    stack = [(parent, "", iter(())), (first, top.name, iter(names_in(first)))]
    try:
        while len(stack) > 1:
            dir_fd, own, names = stack[-1]
            name = next(names, None)
            if name is None:
                os.close(stack.pop()[0])
                os.rmdir(own, dir_fd=stack[-1][0])
                continue
            try:
                os.unlink(name, dir_fd=dir_fd)
            except IsADirectoryError:
                child = os.open(name, FOLDER_FLAGS, dir_fd=dir_fd)
                stack.append((child, name, iter(names_in(child))))
    finally:
        for dir_fd, _, _ in stack:
            os.close(dir_fd)
