"""The journal of a pod: everything its ranks wrote, in the order in which the pod's init saw it, in one file.

The file is only ever appended to. Its head is given back to the file system as holes when more than ``cap`` bytes are
kept, so an offset in the file means the same frame for the journal's whole life, through checkpoint and restore.
Readers need no coordination with the writer: they see whole frames up to the end, and zeros where the head was.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ctypes.util
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, NamedTuple

from moorage.errors import CorruptData
from moorage.worker import journal_index
from moorage.worker.journal_frames import FLAG_GUARD, Frame, Kind, RankTable, encode, scan
from moorage.worker.journal_index import Mark

DEFAULT_CAP: Final = 64 << 20
_BLOCK: Final = 1 << 20
_MARK_EVERY: Final = 256 << 10
_EXPORT_HEADER: Final = struct.Struct("<8sQQQ")  # magic, start and end offset, length of the index that follows
_EXPORT_MAGIC: Final = b"MOGJRNL1"

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def _punch(descriptor: int, start: int, length: int) -> None:
    result = _libc.fallocate(
        descriptor,
        _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE,
        ctypes.c_longlong(start),
        ctypes.c_longlong(length),
    )
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _first_data(descriptor: int) -> int:
    """Offset of the first byte that is not zero; the size when there is none."""
    size = os.fstat(descriptor).st_size
    try:
        at = os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:
        return size
    while at < size:
        block = os.pread(descriptor, _BLOCK, at)
        if stripped := block.lstrip(b"\0"):
            return at + len(block) - len(stripped)
        at += len(block)
    return size


class Entry(NamedTuple):
    """A frame with its offset and the offset behind it."""

    frame: Frame
    offset: int
    next_offset: int


class Batch(NamedTuple):
    """What one read found. Go on at ``next_offset``. ``truncated``: frames at the asked offset are no longer kept."""

    entries: list[Entry]
    next_offset: int
    truncated: bool


class JournalReader:
    """Reads a journal that may grow meanwhile. Cheap to make; holds one descriptor."""

    def __init__(self, path: Path) -> None:
        """Raises `FileNotFoundError`."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def start(self) -> int:
        """Offset of the oldest frame that is kept."""
        return _first_data(self._descriptor)

    @property
    def end(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int = 0, *, rank: int | None = None, limit: int = _BLOCK, end: int | None = None) -> Batch:
        """The frames from ``offset`` on, at most about ``limit`` bytes of the file and none behind ``end``.

        With ``rank`` only that rank's frames (and those that concern the whole pod) are returned; ``next_offset``
        passes over the others. An empty batch whose ``next_offset`` equals ``offset`` means: nothing new.
        """
        size = self.end if end is None else min(end, self.end)
        if offset >= size:
            return Batch([], offset, False)
        data = os.pread(self._descriptor, min(max(limit, 8192), size - offset), offset)
        truncated = data[:1] == b"\0"
        if truncated:
            offset = max(offset, self.start)
            data = os.pread(self._descriptor, min(max(limit, 8192), max(0, size - offset)), offset)
        entries = []
        after = offset
        for found in scan(data):
            after = offset + found.end
            if rank is None or found.frame.rank == rank or found.frame.kind in (Kind.ENDED, Kind.LOST):
                entries.append(Entry(found.frame, offset + found.start, after))
        return Batch(entries, after, truncated)

    async def follow(self, offset: int = 0, *, rank: int | None = None) -> AsyncIterator[Batch]:
        """Batches from ``offset`` on, and new ones as they are written. Never ends by itself."""
        with _Changes(self.path) as changes:
            while True:
                changes.clear()
                batch = self.read(offset, rank=rank)
                if batch.entries or batch.truncated:
                    yield batch
                if batch.next_offset == offset:
                    await changes.wait()
                offset = batch.next_offset


class _Changes:
    """Wakes a coroutine when the file is written to (inotify)."""

    _IN_MODIFY = 2

    def __init__(self, path: Path) -> None:
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0 or _libc.inotify_add_watch(self._descriptor, os.fsencode(path), self._IN_MODIFY) < 0:
            code = ctypes.get_errno()
            if self._descriptor >= 0:
                os.close(self._descriptor)
            raise OSError(code, f"inotify: {os.strerror(code)}", str(path))
        self._event = asyncio.Event()

    def __enter__(self) -> _Changes:
        asyncio.get_running_loop().add_reader(self._descriptor, self._changed)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _changed(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 65536)
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self) -> None:
        await self._event.wait()


class Journal:
    """The writer: the guard's alone. Knows the ranks, the last sequence number and the range that is kept."""

    def __init__(self, path: Path, *, cap: int = DEFAULT_CAP) -> None:
        """Open or create (0600); a frame that a dead writer left unfinished at the end is cut off."""
        self.path = path
        self.cap = cap
        self.ranks = RankTable()
        self.sequence = 0
        self.lost = 0
        self.output_bytes = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.start = self.end = _first_data(self._descriptor)
        size = os.fstat(self._descriptor).st_size
        self._index = journal_index.Index(path, start=self.start, end=size)
        self._load(size)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def append(self, data: bytes) -> list[Frame]:
        """Write the whole frames in ``data`` that are not in the journal yet; returns them.

        Frames at or below the last sequence number were written by a guard that died before it could take them off
        the pipe, and are passed over. A gap in the numbers is written down as a LOST frame.
        """
        mark = self._due_mark()
        fresh: list[Frame] = []
        out = bytearray()
        for found in scan(data):
            frame = found.frame
            if frame.sequence <= self.sequence:
                continue
            if missing := frame.sequence - self.sequence - 1:
                note = Frame(Kind.LOST, 0, self.sequence, frame.time_ns, struct.pack("<Q", missing), FLAG_GUARD)
                out += encode(note)
                fresh.append(note)
                self._see(note)
            out += data[found.start : found.end]
            fresh.append(frame)
            self._see(frame)
        if out:
            if mark is not None:
                self._index.add(mark)
            self._write(bytes(out))
        return fresh

    def _see(self, frame: Frame) -> None:
        self.ranks.see(frame)
        if frame.kind in (Kind.STDOUT, Kind.STDERR):
            self.output_bytes += len(frame.payload)
        elif frame.kind == Kind.LOST:
            self.lost += int.from_bytes(frame.payload, "little")
        if not frame.flags & FLAG_GUARD:
            self.sequence = frame.sequence

    def _write(self, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], self.end + written)
        self.end += len(data)
        if self.end - self.start > self.cap + self.cap // 8:
            self._truncate_head()

    def _due_mark(self) -> Mark | None:
        marks = self._index.marks
        if marks and self.end - marks[-1].offset < _MARK_EVERY:
            return None
        return Mark(self.end, self.sequence, self.lost, self.output_bytes, journal_index.rows(self.ranks))

    def _truncate_head(self) -> None:
        """Give back the oldest frames, up to a mark: it holds what they said."""
        keep = self.start
        for mark in self._index.marks:
            keep = mark.offset
            if self.end - keep <= self.cap:
                break
        # A file system that cannot punch holes keeps everything: more than was asked for, but nothing is wrong.
        with contextlib.suppress(OSError):
            _punch(self._descriptor, 0, keep)
            self._index.forget_before(keep)
            self.start = keep

    def _load(self, size: int) -> None:
        at = self.start
        if self._index.marks:
            mark = self._index.marks[-1]
            self.sequence, self.lost, self.output_bytes = mark.sequence, mark.lost, mark.output_bytes
            self.ranks = mark.table()
            at = mark.offset
        while at < size:
            after = 0
            for found in scan(os.pread(self._descriptor, _BLOCK, at)):
                self._see(found.frame)
                after = found.end
            if not after:
                break
            at += after
        self.end = at
        if self.end < size:
            os.ftruncate(self._descriptor, self.end)


def export(path: Path, target: Path, *, end: int | None = None) -> int:
    """Copy what is kept of the journal at ``path``, up to offset ``end``, into the file ``target``; returns its size.

    May run while the pod writes on: what lies before ``end`` does not change.
    """
    with JournalReader(path) as reader:
        stop = reader.end if end is None else min(end, reader.end)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out, path.open("rb") as source:
            start = min(reader.start, stop)
            marks = journal_index.encode(journal_index.read(path, start=start, end=stop))
            out.write(_EXPORT_HEADER.pack(_EXPORT_MAGIC, start, stop, len(marks)) + marks)
            source.seek(start)
            left = stop - start
            while left and (block := source.read(min(_BLOCK, left))):
                out.write(block)
                left -= len(block)
        return target.stat().st_size


def restore(source: Path, path: Path) -> None:
    """Lay the journal that `export` wrote to ``source`` at ``path``, with the offsets it had.

    Raises `CorruptData` when ``source`` is something else or cut short.
    """
    with source.open("rb") as file:
        header = file.read(_EXPORT_HEADER.size)
        if len(header) < _EXPORT_HEADER.size or not header.startswith(_EXPORT_MAGIC):
            raise CorruptData(f"{source} is not a pod's journal")
        _, start, end, length = _EXPORT_HEADER.unpack(header)
        journal_index.lay(path, file.read(length))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.seek(start)
            while block := file.read(_BLOCK):
                out.write(block)
            if out.tell() != end:
                raise CorruptData(f"{source} ends at offset {out.tell()} of {end}")
            out.truncate(end)
