"""Cutting files into chunks: bounds, independence of position, zero runs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moorage.store import chunker
from moorage.store.chunker import MAX_PAGES, MIN_PAGES, PAGE, ZERO_PAGES, Marker

MARKER = Marker(b"seed" * 8)


def pages(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count * PAGE)


def cut(data: bytes) -> list[bytes]:
    """The chunks of ``data``, zero runs included."""
    found, at = [], 0
    for span in MARKER.split(bytearray(data), len(data), last=True):
        found.append(data[at : at + span.pages * PAGE])
        at += span.pages * PAGE
    return found


def test_chunks_cover_the_data_and_keep_their_bounds() -> None:
    data = pages(3000, 1) + b"tail"
    chunks = cut(data)
    assert b"".join(chunks) == data
    assert all(MIN_PAGES * PAGE <= len(chunk) <= MAX_PAGES * PAGE for chunk in chunks[:-1])
    assert 3000 / 160 < len(chunks) < 3000 / 40  # the average is not far from what it should be


@pytest.mark.parametrize("inserted", [1, 7, 300])
def test_pages_inserted_in_front_change_only_the_first_chunks(inserted: int) -> None:
    data = pages(4000, 2)
    before, after = set(cut(data)), set(cut(pages(inserted, 3) + data))
    assert len(before - after) <= 2


def test_one_changed_page_changes_at_most_two_chunks() -> None:
    data = bytearray(pages(2000, 4))
    before = set(cut(bytes(data)))
    data[1000 * PAGE : 1001 * PAGE] = pages(1, 5)
    assert len(before - set(cut(bytes(data)))) <= 2


def test_zero_runs_stand_alone_and_short_ones_do_not() -> None:
    short, long = bytes((ZERO_PAGES - 1) * PAGE), bytes((ZERO_PAGES + 5) * PAGE)
    data = pages(40, 6) + short + pages(40, 7) + long + pages(40, 8)
    spans = MARKER.split(bytearray(data), len(data), last=True)
    assert [span.pages for span in spans if span.zero] == [ZERO_PAGES + 5]


def test_pages_that_only_look_like_zero_are_kept() -> None:
    page = bytearray(PAGE)
    for at in range(PAGE):  # a byte that no sample looks at
        page[at] = 1
        if MARKER.marks(memoryview(page)) == MARKER.zero:
            break
        page[at] = 0
    data = bytes(page) * (ZERO_PAGES * 2)
    assert not any(span.zero for span in MARKER.split(bytearray(data), len(data), last=True))


def test_equal_seeds_cut_equally_and_others_do_not() -> None:
    data = bytearray(pages(2000, 9))
    mine = MARKER.split(data, len(data), last=True)
    assert Marker(b"seed" * 8).split(data, len(data), last=True) == mine
    assert Marker(b"tree" * 8).split(data, len(data), last=True) != mine


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(st.sampled_from(["random", "zero", "same"]), st.integers(1, 400)), max_size=6),
    tail=st.integers(0, PAGE - 1),
    first=st.integers(0, 600),
)
def test_a_prefix_is_cut_as_the_whole_would_be(runs: list[tuple[str, int]], tail: int, first: int) -> None:
    kinds = {"random": pages(400, 10), "zero": bytes(400 * PAGE), "same": pages(1, 11) * 400}
    data = b"".join(kinds[kind][: count * PAGE] for kind, count in runs) + b"x" * tail
    first = min(first * PAGE, len(data) // PAGE * PAGE)
    spans = MARKER.split(bytearray(data), first, last=False)
    taken = sum(span.pages for span in spans) * PAGE
    rest = data[taken:]
    spans += MARKER.split(bytearray(rest), len(rest), last=True)
    assert sum(span.pages for span in spans) == (len(data) + PAGE - 1) // PAGE
    at = 0
    for span in spans:
        if span.zero:
            assert not any(data[at : at + span.pages * PAGE])
        else:
            assert span.pages <= chunker.MAX_PAGES
        at += span.pages * PAGE
    # No chunk may wait for more than the largest chunk's length.
    assert first - taken <= MAX_PAGES * PAGE
