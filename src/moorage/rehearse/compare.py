"""Comparing what two runs wrote: bit for bit or within a tolerance, per rank and across ranks. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from moorage.rehearse.spec import Output

#: The content of a file of a rank; None if there is none.
Read = Callable[[str, int], bytes | None]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two runs differ first: ``step`` counts what the file counts (-1: the file has no steps)."""

    output: str
    rank: int
    step: int
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        at = f"step {self.step}, " if self.step >= 0 else ""
        return f"rank {self.rank}, {at}{self.where}: expected {self.expected}, found {self.found}"


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One output of one rank (-1: of all ranks together). ``size``: lines, fields or bytes that were compared."""

    output: str
    rank: int
    equal: bool
    size: int
    first: Difference | None = None
    worst: float = 0.0  # largest distance of two numbers


def compare(outputs: Sequence[Output], ranks: int, reference: Read, rehearsed: Read) -> list[Compared]:
    """Every declared output of every rank, then across the ranks where that is declared."""
    found: list[Compared] = []
    for output in outputs:
        # A path without {rank} is one file of the job.
        own = range(ranks) if "{rank}" in output.path else range(1)
        if output.across != "joined":
            found += [_rank(output, rank, reference, rehearsed) for rank in own]
        if output.across == "joined":
            found.append(_joined(output, ranks, reference, rehearsed))
        elif output.across == "equal" and ranks > 1:
            found.append(_alike(output, ranks, rehearsed))
    return found


def first(found: Sequence[Compared]) -> Difference | None:
    """The earliest difference of all: by step, then by rank; what has no steps comes last."""
    differences = [one.first for one in found if one.first is not None]
    return min(differences, key=lambda d: (d.step < 0, d.step, d.rank), default=None)


def _rank(output: Output, rank: int, reference: Read, rehearsed: Read) -> Compared:
    wanted, got = reference(output.path, rank), rehearsed(output.path, rank)
    return _pair(output, rank, wanted, got)


def _pair(output: Output, rank: int, wanted: bytes | None, got: bytes | None) -> Compared:
    path = output.path.replace("{rank}", str(rank))
    if wanted is None or got is None:
        there = ["absent" if data is None else f"{len(data)} bytes" for data in (wanted, got)]
        equal = wanted is got
        missing = Difference(output=path, rank=rank, step=-1, where="the file", expected=there[0], found=there[1])
        return Compared(output=path, rank=rank, equal=equal, size=0, first=None if equal else missing)
    if output.kind == "bytes":
        return _bytes(path, rank, wanted, got)
    if output.kind == "json":
        return _json(output, path, rank, wanted, got)
    return _lines(output, path, rank, wanted, got)


def _bytes(path: str, rank: int, wanted: bytes, got: bytes) -> Compared:
    if wanted == got:
        return Compared(output=path, rank=rank, equal=True, size=len(wanted))
    at = next((n for n, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    told = [data[at : at + 8].hex() or "the end" for data in (wanted, got)]
    difference = Difference(output=path, rank=rank, step=-1, where=f"byte {at}", expected=told[0], found=told[1])
    return Compared(output=path, rank=rank, equal=False, size=len(wanted), first=difference)


def _lines(output: Output, path: str, rank: int, wanted: bytes, got: bytes) -> Compared:
    expected = wanted.decode(errors="replace").splitlines()
    found = got.decode(errors="replace").splitlines()
    worst, difference = 0.0, None
    for number, (want, have) in enumerate(zip(expected, found, strict=False), 1):
        same, distance, column = _line(output, want, have)
        worst = max(worst, distance)
        if not same and difference is None:
            where = f"line {number}" + (f", column {column}" if column else "")
            told = _columns(want, have, column)
            step = step_of(output, want, number)
            difference = Difference(output=path, rank=rank, step=step, where=where, expected=told[0], found=told[1])
    if difference is None and len(expected) != len(found):
        number = min(len(expected), len(found)) + 1
        longer = expected if len(expected) > len(found) else found
        difference = Difference(
            output=path,
            rank=rank,
            step=step_of(output, longer[number - 1], number),
            where=f"line {number}",
            expected=f"{len(expected)} lines",
            found=f"{len(found)} lines",
        )
    return Compared(output=path, rank=rank, equal=difference is None, size=len(expected), first=difference, worst=worst)


def step_of(output: Output, line: str, number: int) -> int:
    """The number of the step that a line tells of; the line's own number where it tells none."""
    fields = line.split()
    text = fields[output.step] if 0 <= output.step < len(fields) else ""
    return int(text) if text.lstrip("-").isdecimal() else number


def _columns(want: str, have: str, column: int) -> tuple[str, str]:
    if not column:
        return repr(want), repr(have)
    fields = want.split(), have.split()
    return fields[0][column - 1], fields[1][column - 1]


def _line(output: Output, want: str, have: str) -> tuple[bool, float, int]:
    """Equal, the largest distance of two numbers, and the column of the first difference (0: the line as a whole)."""
    if want == have:
        return True, 0.0, 0
    left, right = want.split(), have.split()
    if len(left) != len(right):
        return False, 0.0, 0
    worst, column = 0.0, 0
    for number, (a, b) in enumerate(zip(left, right, strict=True), 1):
        same, distance = _values(output, a, b)
        worst = max(worst, distance)
        if not same and not column:
            column = number
    exact = output.tolerance == 0 and output.relative == 0
    # Only the blanks differ: that is a difference too where bit for bit is asked for.
    return column == 0 and not exact, worst, column


def number_of(text: str) -> float | None:
    """A number in decimal or as `float.hex` writes it; None for anything else."""
    try:
        return float.fromhex(text) if "0x" in text.lower() else float(text)
    except ValueError:
        return None


def _values(output: Output, a: str, b: str) -> tuple[bool, float]:
    if a == b:
        return True, 0.0
    left, right = number_of(a), number_of(b)
    if left is None or right is None:
        return False, 0.0
    return _near(output, left, right)


def _near(output: Output, left: float, right: float) -> tuple[bool, float]:
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) and math.isnan(right) and bool(output.tolerance or output.relative), 0.0
    distance = abs(left - right) if left != right else 0.0
    if output.tolerance == 0 and output.relative == 0:
        return False, distance  # their texts differ
    return distance <= output.tolerance + output.relative * abs(left), distance


def _json(output: Output, path: str, rank: int, wanted: bytes, got: bytes) -> Compared:
    try:
        left, right = json.loads(wanted), json.loads(got)
    except ValueError:
        return _bytes(path, rank, wanted, got)
    worst, size, difference = 0.0, 0, None
    for where, a, b in _leaves(left, right, frozenset(output.ignore)):
        size += 1
        same, distance = a == b and type(a) is type(b), 0.0
        if not same and _number(a) and _number(b):
            same, distance = _near(output, float(a), float(b))
        worst = max(worst, distance)
        if not same and difference is None:
            told = ["absent" if value is _ABSENT else json.dumps(value) for value in (a, b)]
            difference = Difference(output=path, rank=rank, step=-1, where=where, expected=told[0], found=told[1])
    return Compared(output=path, rank=rank, equal=difference is None, size=size, first=difference, worst=worst)


_ABSENT: Any = object()


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _leaves(left: Any, right: Any, ignore: frozenset[str], where: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for name in dict.fromkeys((*left, *right)):
            if name not in ignore:
                inner = f"{where}.{name}" if where else str(name)
                yield from _leaves(left.get(name, _ABSENT), right.get(name, _ABSENT), ignore, inner)
    elif isinstance(left, list) and isinstance(right, list):
        for number in range(max(len(left), len(right))):
            pair = [side[number] if number < len(side) else _ABSENT for side in (left, right)]
            yield from _leaves(pair[0], pair[1], ignore, f"{where}[{number}]")
    else:
        yield where or "the value", left, right


def _alike(output: Output, ranks: int, rehearsed: Read) -> Compared:
    """All ranks of the rehearsed run against rank 0."""
    base = rehearsed(output.path, 0)
    size = 0
    for rank in range(1, ranks):
        one = _pair(output, rank, base, rehearsed(output.path, rank))
        size += one.size
        if one.first is not None:
            told = msgspec.structs.replace(one.first, where=f"{one.first.where} (rank 0 wrote what is expected)")
            return Compared(output=output.path, rank=-1, equal=False, size=size, first=told, worst=one.worst)
    return Compared(output=output.path, rank=-1, equal=True, size=size)


def _joined(output: Output, ranks: int, reference: Read, rehearsed: Read) -> Compared:
    """The ranks' files one behind the other; the difference is told by rank and place within its file."""
    whole = [[side(output.path, rank) or b"" for rank in range(ranks)] for side in (reference, rehearsed)]
    one = _pair(output, 0, b"".join(whole[0]), b"".join(whole[1]))
    if one.first is None:
        return Compared(output=output.path, rank=-1, equal=one.equal, size=one.size, worst=one.worst)
    unit, _, number = one.first.where.split(",")[0].partition(" ")
    place, rank = int(number) if number.isdecimal() else 0, 0
    for rank, data in enumerate(whole[0]):
        length = len(data) if unit == "byte" else len(data.decode(errors="replace").splitlines())
        if place < length + (unit != "byte") or rank == ranks - 1:
            break
        place -= length
    told = msgspec.structs.replace(one.first, output=output.path, rank=rank, where=f"{unit} {place} of its part")
    return Compared(output=output.path, rank=-1, equal=False, size=one.size, first=told, worst=one.worst)
