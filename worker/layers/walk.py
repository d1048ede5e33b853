"""Walking a folder tree by descriptors: no symlink is followed, no path is too long, the order is always the same."""

from __future__ import annotations

import errno
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


class Trail:
    """A way down into a tree that keeps one descriptor open however deep it goes. ``fd`` is the folder it stands in.

    The way up is ``..``, checked: if the tree was changed meanwhile it raises OSError (ESTALE).
    """

    def __init__(self, top_fd: int, more_flags: int = 0) -> None:
        self._flags = FOLDER_FLAGS | more_flags
        self.fd = os.open(".", self._flags, dir_fd=top_fd)
        self._above: list[tuple[int, int]] = []

    def down(self, name: str) -> None:
        status = os.fstat(self.fd)
        child = os.open(name, self._flags, dir_fd=self.fd)
        os.close(self.fd)
        self.fd = child
        self._above.append((status.st_dev, status.st_ino))

    def up(self) -> None:
        parent = os.open("..", self._flags, dir_fd=self.fd)
        os.close(self.fd)
        self.fd = parent
        status = os.fstat(parent)
        if (status.st_dev, status.st_ino) != self._above.pop():
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def close(self) -> None:
        os.close(self.fd)


def walk(top_fd: int, more_flags: int = 0, *, skip_denied: bool = False) -> Iterator[Found]:
    """All entries below ``top_fd``, sorted by name, a folder directly before what is in it.

    An entry that vanishes while it is walked is left out. Folders are opened with ``more_flags`` as well.
    ``skip_denied``: not into folders that this thread may not read or pass through; else PermissionError.
    """
    trail = Trail(top_fd, more_flags)
    try:
        stack = [(b"", iter(names_in(trail.fd)))]
        while stack:
            prefix, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                if stack:
                    trail.up()
                continue
            try:
                status = os.stat(name, dir_fd=trail.fd, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except PermissionError:
                if skip_denied:
                    continue
                raise
            path = prefix + os.fsencode(name)
            yield Found(trail.fd, name, path, status)
            if stat.S_ISDIR(status.st_mode):
                try:
                    trail.down(name)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except PermissionError:
                    if skip_denied:
                        continue
                    raise
                stack.append((path + b"/", iter(names_in(trail.fd))))
    finally:
        trail.close()


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
    with folder(top.parent) as parent:
        trail = Trail(parent)
    try:
        trail.down(top.name)
        stack = [(top.name, iter(names_in(trail.fd)))]
        while stack:
            own, names = stack[-1]
            name = next(names, None)
            if name is None:
                stack.pop()
                trail.up()
                os.rmdir(own, dir_fd=trail.fd)
                continue
            try:
                os.unlink(name, dir_fd=trail.fd)
            except IsADirectoryError:
                trail.down(name)
                stack.append((name, iter(names_in(trail.fd))))
    finally:
        trail.close()
