"""Where a file is cut into chunks: content-defined boundaries at page ends, found without looking at every byte.

CRIU's page images are pages of 4096 bytes in a row. Between two dumps most pages are equal, but they stand at other
offsets. So a cut may only fall between two pages, and whether it falls behind a page depends on that page alone: equal
runs of pages are then cut alike wherever they stand. Each page gets a one-byte mark: the exclusive or of `SAMPLES` of
its bytes, each sent through a random table of its own (tabulation hashing, with tables from the store's key). A page is
a boundary when its mark is one of ``256 // AVERAGE_PAGES`` fixed values. Only strided slices, `bytes.translate` and
exclusive ors of large integers are needed, so that marking is far faster than hashing.

Runs of zero pages are told apart and stored nowhere. Everything here is pure.
"""

from __future__ import annotations

from typing import NamedTuple

from blake3 import blake3

PAGE = 4096
MIN_PAGES = 16  # 64 KiB
AVERAGE_PAGES = 64  # 256 KiB
MAX_PAGES = 256  # 1 MiB
ZERO_PAGES = 16  # shorter runs of zero pages are stored as any other pages
SAMPLES = 16

_ZEROS = memoryview(bytes(MAX_PAGES * PAGE))


class Span(NamedTuple):
    """``pages`` pages of a block that make one chunk (the last of a file may be partial), or one run of zeros."""

    pages: int
    zero: bool


class Marker:
    """The tables that one store marks pages with. ``seed`` is 32 bytes; equal seeds cut equally."""

    def __init__(self, seed: bytes) -> None:
        stream = blake3(seed).digest(length=SAMPLES * 4 + SAMPLES * 256 * 4 + 256 * 4)
        words = memoryview(stream).cast("I")
        # One sample in each of equal parts of the page, so that no part goes unseen.
        part = PAGE // SAMPLES
        self._offsets = [i * part + words[i] % part for i in range(SAMPLES)]
        self._tables = [_permutation(words[SAMPLES + i * 256 : SAMPLES + (i + 1) * 256]) for i in range(SAMPLES)]
        order = _permutation(words[SAMPLES + SAMPLES * 256 :])
        self.cut = bytes(1 if rank < 256 // AVERAGE_PAGES else 0 for rank in order)
        zero = 0
        for table in self._tables:
            zero ^= table[0]
        self.zero = bytes([zero])

    def marks(self, block: memoryview) -> bytes:
        """One byte for each whole page of ``block``."""
        pages = len(block) // PAGE
        whole = block[: pages * PAGE]
        mixed = 0
        for offset, table in zip(self._offsets, self._tables, strict=True):
            mixed ^= int.from_bytes(whole[offset::PAGE].tobytes().translate(table), "little")
        return mixed.to_bytes(pages, "little")

    def split(self, block: bytearray, size: int, *, last: bool) -> list[Span]:
        """Cut the first ``size`` bytes of ``block``.

        ``last``: the file ends there, and the spans cover all of it, a partial page as well. Otherwise the spans cover
        a prefix; the rest has to be offered again, in front of what follows it.
        """
        marks = self.marks(memoryview(block)[:size])
        cuts = marks.translate(self.cut)
        spans: list[Span] = []
        at, end = 0, len(marks)
        zero_from, zero_to = self._zero_run(block, marks, 0)
        while at < end:
            if at == zero_from:
                spans.append(Span(zero_to - at, True))
                at = zero_to
                zero_from, zero_to = self._zero_run(block, marks, at)
                continue
            stop = min(zero_from, at + MAX_PAGES)
            found = cuts.find(1, at + MIN_PAGES - 1, stop) + 1
            if not found:
                if stop == end and stop - at < MAX_PAGES:
                    break  # no boundary yet: what follows decides
                found = stop
            spans.append(Span(found - at, False))
            at = found
        if last and size > at * PAGE:
            spans.append(Span((size + PAGE - 1) // PAGE - at, False))
        return spans

    def _zero_run(self, block: bytearray, marks: bytes, at: int) -> tuple[int, int]:
        """The first run of at least `ZERO_PAGES` zero pages from ``at`` on, as ``(first, behind)``; else the end."""
        pattern = self.zero * ZERO_PAGES
        end = len(marks)
        while (at := marks.find(pattern, at)) >= 0:
            stop = at
            while stop < end and marks[stop] == self.zero[0] and block.startswith(_ZEROS[:PAGE], stop * PAGE):
                stop += 1
            if stop - at >= ZERO_PAGES:
                return at, stop
            at = stop + 1
        return end, end


def _permutation(words: memoryview) -> bytes:
    return bytes(sorted(range(256), key=lambda i: (words[i], i)))
