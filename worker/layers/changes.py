"""What a pod changed below a folder, told from its upper layers.

For each folder there are up to three sides: ``upper`` (what the pod wrote), ``merged`` (what the pod sees) and ``base``
(what is in the lower layer at the same path: what was there before). Where upper says nothing about hidden or moved
contents, its names are all that changed. An opaque or redirected folder shows or hides more than upper holds; there
merged and base are compared in full.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from moorage.worker.layers import syscalls
from moorage.worker.layers.layer import Layer
from moorage.worker.layers.tree import OVERLAY_PREFIX
from moorage.worker.layers.walk import FOLDER_FLAGS, names_in, open_folder

_log = structlog.get_logger(__name__)
_DEEPEST: Final = 200
ChangeKind = Literal["created", "modified", "deleted"]


class Change(msgspec.Struct, frozen=True):
    """One change. ``path`` is relative to the folder that was asked for; ``mode`` is st_mode (0 when deleted)."""

    kind: ChangeKind
    path: bytes
    mode: int
    size: int


class Sides(NamedTuple):
    """Open folders of one path. ``upper`` is None where its names do not tell all, ``base`` where none was."""

    merged: int
    upper: int | None
    base: int | None


def tells_all(upper: int) -> bool:
    """Whether the names in this folder of an upper layer are all that the pod changed in it."""
    path = f"/proc/self/fd/{upper}"
    return _xattr(path, b"redirect") is None and _xattr(path, b"opaque") != b"y"


def _xattr(path: str, name: bytes) -> bytes | None:
    with suppress(OSError):
        return os.getxattr(path, OVERLAY_PREFIX + name)
    return None


def same(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether two files are the same as far as stamps can tell: a copy into the upper layer keeps them."""
    return (one.st_mode, one.st_size, one.st_mtime_ns) == (other.st_mode, other.st_size, other.st_mtime_ns)


def compare(sides: Sides, prefix: bytes = b"", skip: frozenset[bytes] = frozenset()) -> Iterator[Change]:
    """All changes in a folder, parents first, sorted by name. ``skip``: paths that are not looked at.

    Descriptors in ``sides`` stay open and are the caller's. What is nested deeper than any path that a call takes is
    left out, with a warning in the log.
    """
    if prefix.count(b"/") > _DEEPEST:
        _log.warning("results that are nested too deep are left out", path=prefix)
        return
    listed = [sides.upper] if sides.upper is not None else [fd for fd in (sides.merged, sides.base) if fd is not None]
    for name in sorted({name for fd in listed for name in names_in(fd)}):
        path = prefix + os.fsencode(name)
        if path not in skip:
            yield from _entry(sides, name, path, skip)


def _entry(sides: Sides, name: str, path: bytes, skip: frozenset[bytes]) -> Iterator[Change]:
    before = _status(sides.base, name)
    now = _status(sides.merged, name)
    if now is None:
        if before is not None:
            yield Change("deleted", path, 0, 0)
        return
    both_folders = before is not None and stat.S_ISDIR(now.st_mode) and stat.S_ISDIR(before.st_mode)
    if before is None:
        yield Change("created", path, now.st_mode, now.st_size)
    elif both_folders:
        if now.st_mode != before.st_mode:
            yield Change("modified", path, now.st_mode, now.st_size)
    elif sides.upper is None or not same(now, before):
        # Stamps are compared only where the upper layer's file may be a mere copy of base; what came from elsewhere
        # may have them by chance.
        yield Change("modified", path, now.st_mode, now.st_size)
    if stat.S_ISDIR(now.st_mode):
        with ExitStack() as stack:
            children = _children(sides, name, both_folders, stack)
            if children is not None:
                yield from compare(children, path + b"/", skip)


def _status(dir_fd: int | None, name: str) -> os.stat_result | None:
    if dir_fd is None:
        return None
    with suppress(FileNotFoundError):
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return None


def _children(sides: Sides, name: str, both_folders: bool, stack: ExitStack) -> Sides | None:
    def opened(fd: int) -> int:
        stack.callback(os.close, fd)
        return fd

    try:
        merged = opened(os.open(name, FOLDER_FLAGS, dir_fd=sides.merged))
    except (FileNotFoundError, NotADirectoryError):
        return None  # gone since: the pod may be running
    upper = base = None
    if sides.upper is not None:
        upper = opened(os.open(name, FOLDER_FLAGS, dir_fd=sides.upper))
        if not tells_all(upper):
            upper = None
    if both_folders and sides.base is not None:
        # A mount of the host that lies there is not part of the lower layer.
        with suppress(OSError):
            base = opened(syscalls.open_beneath(name, FOLDER_FLAGS, sides.base))
    return Sides(merged, upper, base)


def sides_at(layer: Layer, path: bytes, stack: ExitStack) -> Sides | None:
    """The sides of the folder ``path`` of a layer; None when the pod changed nothing there.

    The descriptors are closed with ``stack``. Raises FileNotFoundError, NotADirectoryError for a folder that the
    pod does not have.
    """

    def opened(fd: int) -> int:
        stack.callback(os.close, fd)
        return fd

    def root(folder: Path) -> int:
        return opened(os.open(folder, FOLDER_FLAGS))

    merged = opened(open_folder(root(layer.merged), path))
    base: int | None = root(layer.lower)
    if path and base is not None:
        try:
            base = opened(syscalls.open_beneath(path, FOLDER_FLAGS, base))
        except OSError:
            base = None
    upper: int | None = root(layer.upper)
    for part in path.split(b"/") if path else ():
        try:
            upper = opened(os.open(part, FOLDER_FLAGS, dir_fd=upper))
        except FileNotFoundError:
            return None
        if not tells_all(upper):
            return Sides(merged, None, base)
    return Sides(merged, upper, base)
