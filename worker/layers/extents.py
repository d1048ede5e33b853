"""Copying the data of files, holes left out."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

_PIECE = 4 << 20
_NO_COPY_CALL = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM})


class CutShort(Exception):
    """The source ended before its size."""


def data_extents(fd: int, size: int, blocks: int) -> tuple[tuple[int, int], ...] | None:
    """(start, length) of the parts of a file that are not holes; None when it has none.

    ``blocks``: st_blocks. A file that occupies all of its size is taken for dense without asking.
    """
    if blocks * 512 >= size:
        return None
    extents: list[tuple[int, int]] = []
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole follows
                raise
            break
        if start >= size:
            break
        position = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        extents.append((start, position - start))
    return None if extents == [(0, size)] else tuple(extents)


def copy_range(source: int, target: int, start: int, length: int, to: int) -> None:
    """Copy ``length`` bytes from ``start`` of ``source`` to ``to`` of ``target``, in the kernel where it can.

    Raises `CutShort` when the source has fewer.
    """
    in_kernel = True
    while length:
        count = 0
        if in_kernel:
            try:
                count = os.copy_file_range(source, target, length, start, to)
            except OSError as error:
                if error.errno not in _NO_COPY_CALL:
                    raise
            # Some file systems answer 0 where reading finds data; reading also tells a file that was cut short.
            in_kernel = count > 0
        if not count:
            piece = os.pread(source, min(length, _PIECE), start)
            if not piece:
                raise CutShort
            count = os.pwrite(target, piece, to)
        start, to, length = start + count, to + count, length - count


def gather(source: int, target: int, extents: Sequence[tuple[int, int]]) -> None:
    """Write the extents of ``source`` one after another into ``target``."""
    to = 0
    for start, length in extents:
        copy_range(source, target, start, length, to)
        to += length


def scatter(source: int, target: int, offset: int, extents: Sequence[tuple[int, int]]) -> None:
    """The reverse of `gather`, from ``offset`` of ``source`` on; ``target`` has its size already."""
    for start, length in extents:
        copy_range(source, target, offset, length, start)
        offset += length


def read_exactly(fd: int, start: int, length: int) -> bytes:
    """``length`` bytes from ``start`` on. Raises `CutShort`."""
    pieces = []
    while length:
        piece = os.pread(fd, length, start)
        if not piece:
            raise CutShort
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
