"""The serialized tree: nothing that breaks its rules is ever created from it."""

from __future__ import annotations

import stat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.errors import CorruptData, NewerVersion
from moorage.worker.layers.tree import (
    Data,
    Entry,
    LayerTree,
    Tree,
    data_length,
    decode_tree,
    encode_tree,
    kind_of,
    portable,
)

_ROOT = Entry(b"", "d", 0o755)


def _tree(*entries: Entry) -> Tree:
    return Tree(working_directory="/job", started_ns=1, layers=[LayerTree("root", "/", list(entries))])


_GOOD = (
    _ROOT,
    Entry(b"a", "d", 0o700, 1, 2, -3, 4),
    Entry(b"a/\xff", "f", size=10, data=Data("k", 5), xattrs=((b"user.x", b"\0"),)),
    Entry(b"a/deep", "d"),
    Entry(b"a/deep/h", "h", target=b"a/\xff"),
    Entry(b"a/gone", "w"),
    Entry(b"b", "f", size=100, data=Data("s", 0, ((0, 10), (50, 50)))),
    Entry(b"c", "c", device=(1, 3)),
    Entry(b"l", "l", target=b"/anywhere/../at all"),
)


def test_a_good_tree_survives() -> None:
    tree = _tree(*_GOOD)
    assert decode_tree(encode_tree(tree)) == tree
    assert encode_tree(tree) == encode_tree(decode_tree(encode_tree(tree)))


@pytest.mark.parametrize(
    "entries",
    [
        (),
        (Entry(b"a", "d"),),
        (Entry(b"", "f"),),
        (_ROOT, Entry(b"/a", "f")),
        (_ROOT, Entry(b"a//b", "f")),
        (_ROOT, Entry(b"..", "f")),
        (_ROOT, Entry(b"a", "d"), Entry(b"a/../../etc/passwd", "f")),
        (_ROOT, Entry(b"a", "d"), Entry(b"a/.", "d")),
        (_ROOT, Entry(b"a\0b", "f")),
        (_ROOT, Entry(b"a/b", "f")),
        (_ROOT, Entry(b"a", "l", target=b"/etc"), Entry(b"a/passwd", "f")),
        (_ROOT, Entry(b"a", "f"), Entry(b"a/b", "f")),
        (_ROOT, Entry(b"a", "f"), Entry(b"a", "d")),
        (_ROOT, Entry(b"", "d")),
        (_ROOT, Entry(b"a", "d"), Entry(b"b", "d"), Entry(b"a/late", "f")),
        (_ROOT, Entry(b"h", "h", target=b"later"), Entry(b"later", "f")),
        (_ROOT, Entry(b"d", "d"), Entry(b"h", "h", target=b"d")),
        (_ROOT, Entry(b"w", "w"), Entry(b"h", "h", target=b"w")),
        (_ROOT, Entry(b"a", "d", data=Data("k"))),
        (_ROOT, Entry(b"f", "f", size=10, data=Data("k", -1))),
        (_ROOT, Entry(b"f", "f", size=10, data=Data("k", 0, ((5, 6),)))),
        (_ROOT, Entry(b"f", "f", size=10, data=Data("k", 0, ((5, 2), (6, 1))))),
        (_ROOT, Entry(b"f", "f", size=10, data=Data("k", 0, ((5, 0),)))),
    ],
)
def test_a_tree_that_breaks_a_rule_is_corrupt(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(CorruptData):
        decode_tree(encode_tree(_tree(*entries)))


def test_a_newer_tree_is_told_from_a_broken_one() -> None:
    with pytest.raises(NewerVersion, match="format 2"):
        decode_tree(msgspec.msgpack.encode({"version": 2, "whatever": []}))
    with pytest.raises(CorruptData):
        decode_tree(msgspec.msgpack.encode({"version": 1, "whatever": []}))


@given(st.data())
def test_damaged_bytes_never_give_anything_but_a_named_error(data: st.DataObject) -> None:
    encoded = bytearray(encode_tree(_tree(*_GOOD)))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        tree = decode_tree(bytes(encoded))
    except (CorruptData, NewerVersion):
        return
    assert all(b".." not in entry.path.split(b"/") for layer in tree.layers for entry in layer.entries)


def test_kinds_come_from_modes_and_a_null_device_is_a_whiteout() -> None:
    assert kind_of(stat.S_IFCHR | 0o600, 0) == "w"
    assert kind_of(stat.S_IFCHR | 0o600, 259) == "c"
    assert [kind_of(kind | 0o644, 0) for kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)] == ["f", "d", "l"]


def test_notes_about_this_hosts_inodes_do_not_travel() -> None:
    assert not portable(b"trusted.overlay.origin")
    assert not portable(b"trusted.overlay.uuid")
    for name in (b"trusted.overlay.opaque", b"trusted.overlay.redirect", b"trusted.overlay.overlay.origin", b"user.a"):
        assert portable(name)


def test_the_length_of_sparse_data_is_that_of_its_extents() -> None:
    assert data_length(Data("k"), 100) == 100
    assert data_length(Data("k", 0, ((0, 5), (50, 7))), 100) == 12
    assert data_length(Data("k", 0, ()), 100) == 0
