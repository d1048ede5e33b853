"""When a file may be taken to be unchanged, and when a pack is worth writing anew."""

from __future__ import annotations

import pytest

from moorage.errors import CorruptData
from moorage.store.manifests import Content
from moorage.worker.layers.index import CaptureIndex, Known, LayerIndex, Stamp, referenced, settled, unchanged, wasteful
from moorage.worker.layers.tree import Data, Entry, LayerTree, Tree

_STAMP = Stamp(10, 20, 30)


@pytest.mark.parametrize(
    ("ctime", "clock", "expected"),
    [
        (1_500_000_001, 1_500_000_002, True),
        (1_500_000_001, 1_500_000_001, False),  # the same tick: a later write may get the same stamp
        (1_500_000_002, 1_500_000_001, False),  # the clock was set back
        (1_000_000_000, 1_500_000_000, False),  # whole seconds: the stamp stands for all of its second
        (1_000_000_000, 2_000_000_000, False),
        (1_000_000_000, 2_000_000_001, True),
    ],
)
def test_a_stamp_is_settled_when_no_later_write_can_repeat_it(ctime: int, clock: int, expected: bool) -> None:
    assert settled(ctime, clock) is expected


def test_only_a_settled_equal_stamp_means_unchanged() -> None:
    assert unchanged(Known(_STAMP, True, None, ()), _STAMP)
    assert not unchanged(Known(_STAMP, False, None, ()), _STAMP)
    assert not unchanged(None, _STAMP)
    for other in (Stamp(11, 20, 30), Stamp(10, 21, 30), Stamp(10, 20, 31)):
        assert not unchanged(Known(_STAMP, True, None, ()), other)


def _tree(*used: tuple[str, int]) -> Tree:
    entries = [Entry(b"", "d")]
    entries += [Entry(b"%d" % n, "f", size=size, data=Data(key, n)) for n, (key, size) in enumerate(used)]
    return Tree(working_directory="/", started_ns=0, layers=[LayerTree("root", "/", entries)])


def test_contents_that_are_less_than_half_alive_are_wasteful() -> None:
    tree = _tree(("half", 30), ("half", 20), ("little", 49), ("all", 7))
    contents = {"half": Content(100, []), "little": Content(100, []), "all": Content(7, []), "dead": Content(1, [])}
    assert wasteful(tree, contents) == {"little", "dead"}
    assert referenced(tree) == {"half", "little", "all"}


def test_an_index_is_itself_after_encoding_and_refuses_anything_else() -> None:
    known = Known(_STAMP, True, Data("k", 1, ((0, 1),)), ((b"user.\xff", b"\0"),))
    index = CaptureIndex(
        contents={"k": Content(5, [])}, layers={"root": LayerIndex(7, {99: known})}, wasteful=frozenset({"k"})
    )
    assert CaptureIndex.decode(index.encode()) == index
    for data in (b"", b"\xff", CaptureIndex(version=2).encode(), index.encode()[:-1]):
        with pytest.raises(CorruptData):
            CaptureIndex.decode(data)
