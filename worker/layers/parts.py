"""Files of a pod in pieces, for ``moorage pull``. Works beside a running pod; see `view` for why that is safe."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

import msgspec

from moorage.errors import Forbidden, NotFound, UsageError
from moorage.worker.layers.changes import Change
from moorage.worker.layers.hostmounts import below
from moorage.worker.layers.view import PodView, reopen
from moorage.worker.layers.walk import walk
from moorage.worker.layers.writeback import readable

PIECE: Final = 1 << 20


class FilePiece(msgspec.Struct, frozen=True):
    """As the FilePart message: metadata in a file's first piece, data of at most 1 MiB, ``last`` ends it."""

    path: str  # relative to what was asked for; bytes that are no UTF-8 are escaped
    mode: int = 0  # st_mode
    modified: float = 0.0  # seconds since the epoch
    link_target: str = ""
    data: bytes = b""
    last: bool = False


def pieces_of_changes(view: PodView, top: str, changes: Iterable[Change]) -> Iterator[FilePiece]:
    """What was created or modified below ``top``."""
    for change in changes:
        if change.kind != "deleted":
            with suppress(NotFound, Forbidden):  # gone since (the pod may be running), or not the owner's to read
                fd = view.open(f"{top.rstrip('/')}/{os.fsdecode(change.path)}", follow=False)
                yield from _pieces(fd, change.path)


def pieces_at(view: PodView, path: str, mountpoints: Iterable[str]) -> Iterator[FilePiece]:
    """A file, or a folder and all that is in it. Raises `NotFound`; `UsageError` for a socket, fifo or device."""
    place, fd = view.locate(path)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            os.close(fd)
            raise UsageError(f"{path} in the pod is no file and no folder")
        try:
            os.close(reopen(fd, os.O_RDONLY | os.O_NONBLOCK))
        except PermissionError:
            os.close(fd)
            raise Forbidden(f"{path} in the pod: the job's user may not read it") from None
        yield from _pieces(fd, os.fsencode(place.rpartition("/")[2]))
        return
    os.close(fd)
    tops = [place, *(point for point in mountpoints if point not in {place, "/"} and below(point, place))]
    for top in tops:
        yield from _pieces_below(view, top, os.fsencode(top[len(place.rstrip("/")) :].strip("/")))


def _pieces_below(view: PodView, top: str, prefix: bytes) -> Iterator[FilePiece]:
    reference = view.open(top)
    try:
        root = reopen(reference, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        raise Forbidden(f"{top} in the pod: the job's user may not look into it") from None
    finally:
        os.close(reference)
    try:
        for found in walk(root, skip_denied=True):
            path = prefix + b"/" + found.path if prefix else found.path
            with suppress(FileNotFoundError, PermissionError):
                fd = os.open(found.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=found.dir_fd)
                yield from _pieces(fd, path)
    finally:
        os.close(root)


def _pieces(fd: int, path: bytes) -> Iterator[FilePiece]:
    """The pieces of what the O_PATH descriptor ``fd`` points to; closes it. Nothing for sockets, fifos and devices."""
    try:
        status = os.fstat(fd)
        name, modified = readable(path), status.st_mtime_ns / 1e9
        if stat.S_ISLNK(status.st_mode):
            target = readable(os.fsencode(os.readlink("", dir_fd=fd)))
            yield FilePiece(name, status.st_mode, modified, target, last=True)
        elif stat.S_ISDIR(status.st_mode):
            yield FilePiece(name, status.st_mode, modified, last=True)
        elif stat.S_ISREG(status.st_mode):
            yield from _data(fd, FilePiece(name, status.st_mode, modified))
    finally:
        os.close(fd)


def _data(fd: int, head: FilePiece) -> Iterator[FilePiece]:
    try:
        opened = reopen(fd, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:
        return  # not the owner's to read
    with os.fdopen(opened, "rb", buffering=0) as file:
        data = file.read(PIECE)
        while True:
            following = file.read(PIECE) if len(data) == PIECE else b""
            yield msgspec.structs.replace(head, data=data, last=not following)
            if not following:
                return
            head, data = FilePiece(head.path), following
