"""How a rank tells what it reports: lines of its output, which are part of every checkpoint, as the rank itself is.

A line is ``MARK`` and a JSON object: ``n`` counts the reports of the rank, so a report that a restored rank makes again
takes the place of its first telling. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

MARK = b"moorage-ray-report "


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One call of ``ray.train.report``. ``checkpoint``: the folder below the run's own where its files are."""

    n: int
    metrics: dict[str, Any]
    checkpoint: str = ""


def line(report: Report) -> str:
    """Without its line end. Raises `TypeError` for metrics that are no numbers, texts, lists or mappings of them."""
    return (MARK + msgspec.json.encode(report, enc_hook=_plain)).decode()


def _plain(value: Any) -> Any:
    # Numbers of numpy and torch say what they are.
    item = getattr(value, "item", None)
    if callable(item):
        return item()
    raise TypeError(f"a metric of {type(value)} cannot be reported: give a number, a text, or lists of them")


class Reports:
    """What all ranks have reported so far, from pieces of their output."""

    def __init__(self) -> None:
        self._rest: dict[tuple[int, bool], bytes] = {}
        self.of: dict[int, dict[int, Report]] = {}

    def begin(self) -> None:
        """The output comes again from its beginning."""
        self._rest.clear()

    def feed(self, rank: int, stderr: bool, data: bytes) -> None:
        """Take up a piece, which need not be whole lines."""
        *lines, self._rest[rank, stderr] = (self._rest.get((rank, stderr), b"") + data).split(b"\n")
        for text in lines:
            if text.startswith(MARK):
                self._take(rank, text[len(MARK) :])

    def _take(self, rank: int, text: bytes) -> None:
        try:
            report = msgspec.json.decode(text, type=Report)
        except msgspec.DecodeError:
            return  # a line that only looks like one
        self.of.setdefault(rank, {})[report.n] = report

    def newest(self, rank: int = 0) -> Report | None:
        """The last report of a rank."""
        own = self.of.get(rank)
        return own[max(own)] if own else None

    def in_order(self, rank: int) -> list[Report]:
        """All reports of a rank."""
        return [report for _, report in sorted(self.of.get(rank, {}).items())]

    def count(self, ranks: Iterable[int] = (0,)) -> int:
        """How many reports these ranks have made."""
        return sum(len(self.of.get(rank, {})) for rank in ranks)
