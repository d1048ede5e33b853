"""The store's pure decisions: what to forget, what to condemn, what to delete, whether to compress, how to patch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.records import CheckpointRecord
from moorage.store import forget, patch
from moorage.store.chunker import PAGE
from moorage.store.codec import Compressor, Rate, pays
from moorage.store.keys import StoreKey
from moorage.store.manifests import Chunk
from moorage.store.patch import Patch, Patcher
from moorage.store.plan import PackView, RecordView, deletable, plan_packs


def checkpoint(attempt: int, *, job: str = "j", pinned: bool = False) -> CheckpointRecord:
    return CheckpointRecord(
        checkpoint=f"{job}-{attempt}", job=job, owner="o", attempt=attempt, incarnation=1, manifest="m", created=0.0,
        bytes_total=0, bytes_new=0, pause_seconds=0.0, pinned=pinned,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attempts", "pinned", "keep", "forgotten"),
    [
        ([], [], 3, []),
        ([1, 2, 3], [], 3, []),
        ([3, 1, 5, 2, 4], [], 3, [1, 2]),
        ([1, 2, 3, 4, 5], [1], 3, [2]),  # a pinned one does not use up a place
        ([1, 2, 3, 4, 5], [5], 3, [1]),
        ([1, 2, 3], [], 0, [1, 2]),  # the newest is never forgotten
        ([1, 2, 3], [3], 0, [1]),
        ([1, 2], [1, 2], 1, []),
    ],
)
def test_all_but_the_newest_and_the_pinned_are_forgotten(
    attempts: list[int], pinned: list[int], keep: int, forgotten: list[int]
) -> None:
    found = forget([checkpoint(a, pinned=a in pinned) for a in attempts], keep)
    assert [c.attempt for c in found] == forgotten


def test_each_job_keeps_its_own() -> None:
    found = forget([checkpoint(a, job=job) for a in (1, 2, 3) for job in ("a", "b")], 2)
    assert [c.checkpoint for c in found] == ["a-1", "b-1"]


OWNER = "a" * 24


def pack(name: str, used: int, *, modified: float = 1.0, condemned: bool = False) -> PackView:
    return PackView(name.ljust(32, "0"), 100, modified, used, condemned)


def test_empty_packs_are_garbage_and_mostly_empty_ones_are_repacked() -> None:
    packs = [pack("b1", 0), pack("b2", 50), pack("b3", 70)]
    plan = plan_packs(packs, protect_after=5.0, owners=[])
    assert plan.garbage == packs[:1]
    assert plan.repack == packs[1:2]


def test_young_condemned_and_unfinished_packs_are_left_alone() -> None:
    packs = [pack("b1", 0, modified=9.0), pack("b2", 0, condemned=True), pack(OWNER, 0)]
    assert plan_packs(packs, protect_after=5.0, owners=[OWNER]) == ([], [])


@given(
    generation=st.integers(1, 3),
    leases=st.none() | st.frozensets(st.sampled_from("xy")),
    age=st.sampled_from([0.0, 60.0]),
    needed=st.booleans(),
)
def test_nothing_is_deleted_before_all_conditions_hold(
    generation: int, leases: frozenset[str] | None, age: float, needed: bool
) -> None:
    record = RecordView("r", generation, frozenset({"packs/p"}), leases, age)
    found = deletable([record], generation=3, active={"x"}, settle=30.0, needed={"packs/p"} if needed else set())
    assert bool(found) == (generation < 3 and leases is not None and "x" not in leases and age >= 30 and not needed)


@pytest.mark.parametrize(
    ("ratio", "store", "codec", "expected"),
    [
        (0.3, 100e6, 500e6, True),  # a slow store: nearly everything pays
        (0.9, 100e6, 500e6, False),
        (0.3, 2000e6, 500e6, False),  # the store is faster than the codec
        (1.0, 1e6, 500e6, False),
    ],
)
def test_compression_pays_where_the_store_is_slower(ratio: float, store: float, codec: float, expected: bool) -> None:
    assert pays(ratio, store, codec) is expected


def test_noise_is_left_plain_and_text_after_it_is_not() -> None:
    compressor = Compressor(Rate(50e6), Rate(500e6), 1)
    noise = memoryview(random.Random(1).randbytes(1 << 16))
    assert [compressor.compress(noise) for _ in range(20)] == [None] * 20
    text = memoryview(b"all work and no play " * 5000)
    packed = compressor.compress(text)
    assert packed is not None and len(packed) < len(text) / 10


def filled(*pages: int) -> bytes:
    return b"".join(random.Random(page).randbytes(PAGE) for page in pages)


@given(
    base=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    new=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    at_end=st.booleans(),
)
def test_a_patch_puts_the_chunk_together_again(base: list[int], new: list[int], at_end: bool) -> None:
    old, data = filled(*base), filled(*new)
    shift = len(data) - len(old) if at_end else 0
    changed = patch.differences(memoryview(data), bytearray(old), shift)
    assert sorted(changed) == changed and all(start < stop for start, stop in changed)
    fresh = b"".join(data[start:stop] for start, stop in changed)
    contents = {b"o": old, b"n": fresh}
    recipe = (Chunk(b"o", len(old)),)
    parts = patch.assemble(len(data), Patch(recipe, shift, changed), Chunk(b"n", len(fresh)) if fresh else None)
    assert all(part.whole == len(contents[part.name]) for part in parts)
    assert b"".join(contents[p.name][p.offset : p.offset + p.length] for p in parts) == data
    # And a patch on top of that.
    upper = filled(9, *new[1:])
    changed = patch.differences(memoryview(upper), bytearray(data), 0)
    parts = patch.assemble(len(upper), Patch(tuple(parts), 0, changed), Chunk(b"u", PAGE))
    contents[b"u"] = filled(9)
    assert b"".join(contents[p.name][p.offset : p.offset + p.length] for p in parts) == upper


def test_a_chunk_is_compared_with_what_begins_or_ends_like_it() -> None:
    patcher = Patcher(StoreKey(bytes(32)))
    base = filled(*range(20))
    patcher.learn(b"base", patcher.ends(memoryview(base)), (Chunk(b"base", len(base)),))

    def match(data: bytes, usable: bool = True) -> Patch | None:
        view = memoryview(data)
        return patcher.match(view, patcher.ends(view), lambda _: usable, lambda _: bytearray(base))

    same_start = match(filled(*range(10), 77, *range(11, 18), 78))
    assert same_start is not None and same_start.changed == [(10 * PAGE, 11 * PAGE), (18 * PAGE, 19 * PAGE)]
    same_end = match(filled(99, 98, *range(1, 20)))
    assert same_end is not None and same_end.changed == [(0, 2 * PAGE)] and same_end.shift == PAGE
    assert match(filled(*range(5), *range(50, 65))) is None  # too little in common
    assert match(filled(*range(30, 50))) is None
    assert match(base, usable=False) is None


def test_a_recipe_of_many_chunks_is_not_patched_further() -> None:
    parts = tuple(Chunk(bytes([i]), PAGE, 0, 2 * PAGE) for i in range(patch.MOST_PARTS))
    assert patch.compact(parts[:3])
    assert not patch.compact(parts)
    assert not patch.compact((Chunk(b"x", PAGE, 0, 100 * PAGE),))
