"""Marks in a journal: at some offsets, what all frames before say. So a new writer need not read the whole file.

Kept beside the journal, one JSON line for each mark, appended; written anew when the journal's head is given back. It
can be lost or cut short without harm: what it does not tell is read from the frames.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moorage.worker.journal_frames import RankTable

SUFFIX = ".index"


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """What the frames before ``offset`` say. ``ranks``: rank, pid, exit code or None."""

    offset: int
    sequence: int
    lost: int
    output_bytes: int
    ranks: list[tuple[int, int, int | None]]

    def table(self) -> RankTable:
        """The ranks as a table."""
        table = RankTable()
        for rank, pid, code in self.ranks:
            table.pids[rank] = pid
            if code is not None:
                table.exits[rank] = code
        return table


def rows(table: RankTable) -> list[tuple[int, int, int | None]]:
    """The table as a mark holds it."""
    return [(rank, pid, table.exits.get(rank)) for rank, pid in sorted(table.pids.items())]


def encode(marks: Iterable[Mark]) -> bytes:
    """The index file's content."""
    return b"".join(msgspec.json.encode(mark) + b"\n" for mark in marks)


def decode(content: bytes, *, start: int, end: int) -> list[Mark]:
    """The marks that lie in ``[start, end]`` of the journal. Lines that are damaged are passed over."""
    marks: list[Mark] = []
    for line in content.split(b"\n"):
        try:
            mark = msgspec.json.decode(line, type=Mark)
        except msgspec.DecodeError:
            continue
        if start <= mark.offset <= end and (not marks or mark.offset > marks[-1].offset):
            marks.append(mark)
    return marks


def read(journal: Path, *, start: int, end: int) -> list[Mark]:
    """The marks beside ``journal``; none if there is no index."""
    try:
        return decode(journal.with_name(journal.name + SUFFIX).read_bytes(), start=start, end=end)
    except FileNotFoundError:
        return []


def lay(journal: Path, content: bytes) -> None:
    """Write the index beside ``journal``."""
    _write(journal.with_name(journal.name + SUFFIX), content, os.O_TRUNC)


def _write(path: Path, data: bytes, how: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


class Index:
    """The writer's marks."""

    def __init__(self, journal: Path, *, start: int, end: int) -> None:
        self._path = journal.with_name(journal.name + SUFFIX)
        self.marks = deque(read(journal, start=start, end=end))

    def add(self, mark: Mark) -> None:
        """Append one, on disk too."""
        self.marks.append(mark)
        _write(self._path, encode([mark]), os.O_APPEND)

    def forget_before(self, offset: int) -> None:
        """Drop the marks before ``offset``."""
        while self.marks and self.marks[0].offset < offset:
            self.marks.popleft()
        _write(self._path, encode(self.marks), os.O_TRUNC)
