"""Writing the pod's results to the host.

Rules, in the order of what they protect:

1. Nothing is touched that the owner could not touch: every access to the host's folder has the owner's rights.
2. Nothing outside the target is touched: folders are opened part by part, never through a symlink or onto a mount.
3. What the host changed since the job started (its ctime tells) stays. The pod's version goes beside it, as
   ``NAME.moorage-<job>-<pod>``; what the pod deleted stays.
4. A file appears whole or not at all: it is written under another name and renamed.
5. What is read does not depend on what was written: everything is in the upper layers before the first write.

Doing it again after it was cut short is safe: what is there already and equal is left alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from moorage import failpoints
from moorage.errors import MoorageError, NoCapacity, NotFound
from moorage.worker.layers import syscalls
from moorage.worker.layers.changes import Change
from moorage.worker.layers.extents import CutShort
from moorage.worker.layers.hostfolder import HostFolder
from moorage.worker.layers.owner import Owner, acting_as
from moorage.worker.layers.view import PodView, reopen
from moorage.worker.layers.walk import FOLDER_FLAGS

failpoints.declare("layers.writeback.before", "layers.writeback.file", "layers.writeback.after")

_SENTENCES: Final = {
    errno.EXDEV: "a mount of the host lies there",
    errno.ELOOP: "a symlink of the host lies there",
    errno.ENOTDIR: "its folder is none on the host",
    errno.ENOENT: "its folder is not on the host",
}


class WriteBack(msgspec.Struct):
    """What became of the results. Paths relative to the working directory; bytes that are no UTF-8 are escaped."""

    written: list[str] = []
    deleted: list[str] = []
    conflicts: dict[str, str] = {}  # path: where the pod's version was written instead ("": nowhere, it was deleted)
    failed: dict[str, str] = {}  # path: one sentence
    skipped: list[str] = []  # sockets, fifos and devices


def readable(path: bytes) -> str:
    """A path as valid text."""
    return path.decode(errors="backslashreplace")


def write_back(
    changes: Iterable[Change], view: PodView, top: str, target: Path, owner: Owner, *, started_ns: int, suffix: str
) -> WriteBack:
    """Apply ``changes`` of the pod's folder ``top`` to the host's folder ``target``. See the rules above.

    Raises `NotFound` if there is no ``target``, `MoorageError` if the owner may not enter it.
    """

    def work() -> WriteBack:
        failpoints.hit_sync("layers.writeback.before")
        with _target(target, owner) as fd:
            writer = _Writer(view, top, fd, owner, started_ns, suffix)
            for change in changes:
                writer.apply(change)
            # The pod's folder is deleted next, and with it the only other copy.
            syscalls.sync_filesystem(fd)
        failpoints.hit_sync("layers.writeback.after")
        return writer.report

    # A thread of its own: if taking back the owner's rights ever failed, nothing else would run with them.
    with ThreadPoolExecutor(1, thread_name_prefix="layers-writeback") as pool:
        return pool.submit(work).result()


def bring_up(changes: Iterable[Change], merged: PodView, uppers: PodView, top: str) -> None:
    """Make the overlay copy into its upper layers what changed but still lies below: the contents of renamed folders.

    Raises `NoCapacity`.
    """
    for change in changes:
        path = f"{top.rstrip('/')}/{os.fsdecode(change.path)}"
        if change.kind == "deleted" or _is_there(uppers, path):
            continue
        parent, _, name = path.rpartition("/")
        fd = merged.open(parent or "/")
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            # Setting anything copies the file, and this sets what is there.
            os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=fd, follow_symlinks=False)
        except OSError as error:
            if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
                raise
            raise NoCapacity(
                f"no space for the files of the folders that the pod renamed below {top}",
                "free space on the file system of the worker's state folder, then finish the job again",
            ) from None
        finally:
            os.close(fd)


def _is_there(view: PodView, path: str) -> bool:
    try:
        os.close(view.open(path, follow=False))
    except NotFound:
        return False
    return True


@contextmanager
def _target(target: Path, owner: Owner) -> Iterator[int]:
    try:
        with acting_as(owner):
            fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"there is no folder {target} on this host to write the results to") from None
    except OSError as error:
        raise MoorageError(f"the results cannot be written to {target} as user {owner.uid}: {error.strerror}") from None
    try:
        yield fd
    finally:
        os.close(fd)


class _Writer:
    def __init__(self, view: PodView, top: str, target: int, owner: Owner, started_ns: int, suffix: str) -> None:
        self.report = WriteBack()
        self._view = view
        self._top = top.rstrip("/")
        self._target = target
        self._owner = owner
        self._started_ns = started_ns
        self._suffix = suffix
        self._moved: dict[bytes, bytes] = {}  # folders that had to go beside something, and where

    def apply(self, change: Change) -> None:
        failpoints.hit_sync("layers.writeback.file")
        label = readable(change.path)
        try:
            self._apply(change, label)
        except CutShort:
            self.report.failed[label] = "it was cut short while it was copied"
        except OSError as error:
            self.report.failed[label] = _SENTENCES.get(error.errno or 0, error.strerror or str(error))
        except NotFound as error:
            self.report.failed[label] = error.message

    def _apply(self, change: Change, label: str) -> None:
        parent, _, last = self._on_host(change.path).rpartition(b"/")
        name = os.fsdecode(last)
        with ExitStack() as stack:
            if change.kind == "deleted":
                folder = self._folder(parent, stack)
                gone = folder.remove(name)
                if gone:
                    self.report.deleted.append(label)
                elif gone is False:
                    self.report.conflicts[label] = ""
                return
            source, status = self._source(change.path, stack)
            folder = self._folder(parent, stack)
            match stat.S_IFMT(status.st_mode):
                case stat.S_IFDIR:
                    got = folder.make(name, status.st_mode)
                    if got is not None and got != name:
                        self._moved[change.path] = b"/".join(part for part in (parent, os.fsencode(got)) if part)
                case stat.S_IFREG:
                    got = folder.put_file(name, source, status)
                case stat.S_IFLNK:
                    got = folder.put_link(name, os.readlink("", dir_fd=source))
                case _:
                    self.report.skipped.append(label)
                    return
        if got == name:
            self.report.written.append(label)
        elif got is not None:
            self.report.conflicts[label] = readable(b"/".join(part for part in (parent, os.fsencode(got)) if part))

    def _on_host(self, path: bytes) -> bytes:
        for before, after in self._moved.items():
            if path.startswith(before + b"/"):
                return after + path[len(before) :]
        return path

    def _source(self, path: bytes, stack: ExitStack) -> tuple[int, os.stat_result]:
        """The pod's file: open for reading if it is a regular one, else just a reference."""
        fd = self._view.open(f"{self._top}/{os.fsdecode(path)}", follow=False)
        stack.callback(os.close, fd)
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            if status.st_uid != self._owner.uid:
                # A file of root that the job could link but not read must not come to its owner this way.
                with acting_as(self._owner):
                    os.close(reopen(fd, os.O_RDONLY | os.O_NONBLOCK))
            fd = reopen(fd, os.O_RDONLY | os.O_NONBLOCK)
            stack.callback(os.close, fd)
        return fd, status

    def _folder(self, path: bytes, stack: ExitStack) -> HostFolder:
        """A folder of the host; from here on until ``stack`` ends this thread has the owner's rights."""
        stack.enter_context(acting_as(self._owner))
        fd = syscalls.open_beneath(path or b".", FOLDER_FLAGS, self._target)
        stack.callback(os.close, fd)
        return HostFolder(fd, started_ns=self._started_ns, suffix=self._suffix)
