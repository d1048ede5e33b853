"""Chunks that changed in a few pages: stored as references into what is there already, and the changed pages.

A process touches pages here and there, and a child process that was forked shares all but a few pages with its parent.
Then nearly every chunk of a dump differs from one that is stored, but only by some pages. `Patcher` remembers, for each
chunk of earlier files, how it can be put together (its recipe) and what its first and last page look like. A chunk that
is not stored but begins or ends like a remembered one is compared with that, page by page, with the stored bytes
themselves: what is equal is referred to, the rest becomes one new chunk.

The memory is only a hint: it is lost when the process ends, and bounded. The caller says of each recipe whether its
chunks may still be used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moorage.store.chunker import PAGE
from moorage.store.keys import StoreKey
from moorage.store.manifests import Chunk

MOST_PARTS = 8  # distinct chunks in a recipe: more would make reading slow
MOST_READ = 2.5  # bytes of chunks for each byte that they are used for
LEAST_SHARED = 0.5  # of the pages, or it is not worth it
_MOST_RECIPES = 200_000  # in each of two generations; about 1 KiB each
_COARSE = 16  # pages that are compared at once

Recipe = tuple[Chunk, ...]
Ends = tuple[bytes, bytes]


class Patch(NamedTuple):
    """A new chunk as a changed base."""

    recipe: Recipe  # of the base
    shift: int  # where the base begins in the new chunk, in bytes
    changed: list[tuple[int, int]]  # in bytes, in order


class Patcher:
    """The memory of one store. Thread-safe: a lost entry only costs space."""

    def __init__(self, key: StoreKey) -> None:
        self._key = key
        self._recipes: dict[bytes, Recipe] = {}
        self._older: dict[bytes, Recipe] = {}
        self._anchors: dict[bytes, bytes] = {}
        self._older_anchors: dict[bytes, bytes] = {}

    def recipe(self, name: bytes) -> Recipe | None:
        """How the chunk ``name`` was put together, if it is remembered."""
        found = self._recipes.get(name)
        return self._older.get(name) if found is None else found

    def ends(self, data: memoryview) -> Ends:
        """What ``data``, whole pages, begins and ends like."""
        first, last = data[:PAGE], data[-PAGE:]
        return self._key.chunk_name(first)[:8] + b"<", self._key.chunk_name(last)[:8] + b">"

    def learn(self, name: bytes, ends: Ends, recipe: Recipe) -> None:
        """Remember the chunk ``name``."""
        if len(self._recipes) >= _MOST_RECIPES:
            self._older, self._recipes = self._recipes, {}
            self._older_anchors, self._anchors = self._anchors, {}
        self._recipes[name] = recipe
        for anchor in ends:
            self._anchors[anchor] = name

    def match(
        self,
        data: memoryview,
        ends: Ends,
        usable: Callable[[Recipe], bool],
        load: Callable[[Recipe], bytearray | None],
    ) -> Patch | None:
        """The best base for ``data``. ``load`` returns a recipe's bytes as they are stored, or None."""
        for at_end, anchor in enumerate(ends):
            name = self._anchors.get(anchor) or self._older_anchors.get(anchor)
            recipe = self.recipe(name) if name else None
            if recipe is None or not usable(recipe):
                continue
            base = load(recipe)
            if base is None:
                continue
            shift = len(data) - len(base) if at_end else 0
            changed = differences(data, base, shift)
            if sum(stop - start for start, stop in changed) <= (1 - LEAST_SHARED) * len(data):
                return Patch(recipe, shift, changed)
        return None


def compact(recipe: Recipe) -> bool:
    """Whether one more patch on top leaves ``recipe`` cheap to read: few chunks, not much besides what is used."""
    sizes = {chunk.name: chunk.whole for chunk in recipe}
    return len(sizes) < MOST_PARTS and sum(sizes.values()) <= MOST_READ * sum(chunk.length for chunk in recipe)


def differences(data: memoryview, base: bytearray, shift: int) -> list[tuple[int, int]]:
    """Ranges of ``data`` (page by page) that differ from ``base`` laid at ``shift`` (whole pages, may be negative)."""
    changed: list[tuple[int, int]] = []
    low, high = max(0, shift), min(len(data), shift + len(base))
    if low >= high:
        return [(0, len(data))]
    if low:
        changed.append((0, low))
    step = _COARSE * PAGE
    for start in range(low, high, step):
        stop = min(start + step, high)
        if not base.startswith(data[start:stop], start - shift):
            for page in range(start, stop, PAGE):
                end = min(page + PAGE, stop)
                if not base.startswith(data[page:end], page - shift):
                    _extend(changed, page, end)
    if high < len(data):
        _extend(changed, high, len(data))
    return changed


def _extend(ranges: list[tuple[int, int]], start: int, stop: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = (ranges[-1][0], stop)
    else:
        ranges.append((start, stop))


def assemble(size: int, patch: Patch, new: Chunk | None) -> list[Chunk]:
    """The parts of a chunk of ``size`` bytes: from the patch's base, and from ``new``, the changed ranges in a row."""
    parts: list[Chunk] = []
    at = taken = 0
    for start, stop in [*patch.changed, (size, size)]:
        if at < start:
            parts += cut(patch.recipe, at - patch.shift, start - patch.shift)
        if start < stop:
            assert new is not None
            length = stop - start
            whole = 0 if length == new.length else new.length
            parts.append(Chunk(new.name, length, taken, whole))
            taken += length
        at = stop
    return parts


def cut(recipe: Recipe, start: int, stop: int) -> list[Chunk]:
    """Bytes ``start`` to ``stop`` of what ``recipe`` makes."""
    parts = []
    at = 0
    for chunk in recipe:
        low, high = max(start, at), min(stop, at + chunk.length)
        if low < high:
            offset = chunk.offset + low - at
            size = 0 if high - low == chunk.whole else chunk.whole
            parts.append(Chunk(chunk.name, high - low, offset, size))
        at += chunk.length
    return parts
