"""Putting files into a folder of the host without harming what is there. Runs with the rights of the job's owner.

`HostFolder` decides for one name at a time whether it may be replaced; `writeback` says what is to stand there.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from moorage.worker.layers import syscalls
from moorage.worker.layers.extents import copy_range, data_extents
from moorage.worker.layers.walk import FOLDER_FLAGS, names_in

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COMPARED: Final = 1 << 20


class HostFolder:
    """One open folder ``fd``. What has a ctime after ``started_ns`` is the host's and stays.

    ``suffix``: what is put beside such a name gets it appended, as in ``NAME.<suffix>``.
    """

    def __init__(self, fd: int, *, started_ns: int, suffix: str) -> None:
        self.fd = fd
        self._started_ns = started_ns
        self._suffix = suffix

    def make(self, name: str, mode: int) -> str | None:
        """Make a folder, or give the one that is there this mode. Returns the name it got; None: nothing was to do."""
        there = self._status(name)
        if there is not None and not stat.S_ISDIR(there.st_mode):
            name = self._cleared(name, there)
            there = self._status(name)
        if there is None:
            os.mkdir(name, 0o700, dir_fd=self.fd)
        elif stat.S_IMODE(there.st_mode) & 0o777 == mode & 0o777:
            return None
        fd = os.open(name, FOLDER_FLAGS, dir_fd=self.fd)
        try:
            os.fchmod(fd, mode & 0o777)
        finally:
            os.close(fd)
        return name

    def put_file(self, name: str, source: int, status: os.stat_result) -> str | None:
        """Put a copy of the open file ``source`` there. Returns the name it got; None: an equal file was there."""
        there = self._status(name)
        if there is not None and self._equal(name, there, source, status):
            return None

        def write(temporary: str) -> None:
            target = os.open(temporary, _NEW, 0o600, dir_fd=self.fd)
            try:
                os.ftruncate(target, status.st_size)
                extents = data_extents(source, status.st_size, status.st_blocks)
                for start, length in ((0, status.st_size),) if extents is None else extents:
                    copy_range(source, target, start, length, start)
                os.fchmod(target, status.st_mode & 0o777)
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(target)

        return self._put(name, there, write)

    def put_link(self, name: str, text: str) -> str | None:
        """Put a symlink there. Returns the name it got; None: it was there."""
        there = self._status(name)
        if there is not None and stat.S_ISLNK(there.st_mode) and os.readlink(name, dir_fd=self.fd) == text:
            return None
        return self._put(name, there, lambda temporary: os.symlink(text, temporary, dir_fd=self.fd))

    def remove(self, name: str) -> bool | None:
        """Remove a name, a folder with all in it, but for what is the host's. Whether it is gone; None: it was not."""
        there = self._status(name)
        return None if there is None else self._removed(self.fd, name, there)

    def _status(self, name: str) -> os.stat_result | None:
        with suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return None

    def _untouched(self, status: os.stat_result) -> bool:
        return status.st_ctime_ns <= self._started_ns

    def _beside(self, name: str) -> str:
        return f"{name}.{self._suffix}"

    def _cleared(self, name: str, there: os.stat_result) -> str:
        """The name to use, free of what was there and may go."""
        return name if self._removed(self.fd, name, there) else self._beside(name)

    def _removed(self, at: int, name: str, there: os.stat_result) -> bool:
        if not stat.S_ISDIR(there.st_mode):
            if self._untouched(there):
                os.unlink(name, dir_fd=at)
            return self._untouched(there)
        try:
            fd = syscalls.open_beneath(name, FOLDER_FLAGS, at)  # EXDEV: a mount is not the pod's to empty
        except OSError:
            return False
        try:
            children = [
                self._removed(fd, child, os.stat(child, dir_fd=fd, follow_symlinks=False)) for child in names_in(fd)
            ]
        finally:
            os.close(fd)
        if all(children):
            os.rmdir(name, dir_fd=at)
        return all(children)

    def _equal(self, name: str, there: os.stat_result, source: int, status: os.stat_result) -> bool:
        same_kind = stat.S_ISREG(there.st_mode) and stat.S_IMODE(there.st_mode) == status.st_mode & 0o777
        if not same_kind or there.st_size != status.st_size:
            return False
        try:
            fd = os.open(name, _READ, dir_fd=self.fd)
        except OSError:
            return False
        try:
            position = 0
            while piece := os.pread(source, _COMPARED, position):
                if os.pread(fd, len(piece), position) != piece:
                    return False
                position += len(piece)
        finally:
            os.close(fd)
        return True

    def _put(self, name: str, there: os.stat_result | None, write: Callable[[str], None]) -> str:
        with self._temporary() as temporary:
            write(temporary)
            if there is not None and stat.S_ISDIR(there.st_mode):
                name = self._cleared(name, there)
                there = self._status(name)
            if there is None:
                try:
                    syscalls.rename_new(temporary, name, self.fd)
                    return name
                except FileExistsError:
                    name = self._beside(name)  # it appeared since
            elif self._status(name) != there or not self._untouched(there):
                name = self._beside(name)
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        return name

    @contextmanager
    def _temporary(self) -> Iterator[str]:
        # Always the same name, so that an earlier run that was cut short leaves nothing behind.
        name = f".{self._suffix}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)
        try:
            yield name
        finally:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.fd)
