"""The serialized form of a pod's upper layers: plain data, and the rules that it keeps.

Invariants of a tree, checked by `decode_tree` before anything is created from it:

* The entries of a layer stand in the order of a walk: a folder directly before what is in it. The first is the layer's
  root, with the empty path.
* No path is absolute or has an empty, ``.`` or ``..`` part; none occurs twice.
* A hard link names an entry, not a folder, that stands before it.
* Data lies within ``size``, extents are sorted and do not overlap.
"""

from __future__ import annotations

import stat
from typing import Literal

import msgspec

from moorage.errors import CorruptData, NewerVersion

TREE_VERSION = 1

# f file, d folder, l symlink, h hard link, w whiteout (deleted in the lower layer), p fifo, s socket, c and b devices
Kind = Literal["f", "d", "l", "h", "w", "p", "s", "c", "b"]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "f",
    stat.S_IFDIR: "d",
    stat.S_IFLNK: "l",
    stat.S_IFIFO: "p",
    stat.S_IFSOCK: "s",
    stat.S_IFCHR: "c",
    stat.S_IFBLK: "b",
}

OVERLAY_PREFIX = b"trusted.overlay."

# What the kernel notes about one host's inodes (file handles, ids). On another host it would be wrong.
_LOCAL_XATTRS = frozenset(OVERLAY_PREFIX + name for name in (b"origin", b"impure", b"uuid", b"nlink", b"upper"))


class Data(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Where the bytes of a file are: from ``offset`` of the content called ``key`` on, its extents one after another.

    ``extents``: (start, length) in the file, all else is a hole; None: the whole file, no hole.
    """

    key: str
    offset: int = 0
    extents: tuple[tuple[int, int], ...] | None = None


class Entry(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One name in a layer. Times in nanoseconds since the epoch. ``mode`` without the type bits."""

    path: bytes
    kind: Kind
    mode: int = 0
    uid: int = 0
    gid: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    size: int = 0
    data: Data | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    target: bytes = b""  # of a symlink: its text; of a hard link: the path of the first name
    device: tuple[int, int] = (0, 0)  # major, minor


class LayerTree(msgspec.Struct, frozen=True, array_like=True):
    """One layer. ``name`` is stable over hosts; ``mountpoint`` is absolute in the pod."""

    name: str
    mountpoint: str
    entries: list[Entry]


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """All layers of a pod at one capture. ``started_ns``: when the pod's first incarnation got its layers."""

    version: int = TREE_VERSION
    working_directory: str
    started_ns: int
    layers: list[LayerTree]


class _Versioned(msgspec.Struct):
    version: int


def kind_of(mode: int, rdev: int) -> Kind:
    """The kind of an entry of an upper layer with this st_mode and st_rdev. Raises `KeyError` for an unknown type."""
    kind = _KINDS[stat.S_IFMT(mode)]
    return "w" if kind == "c" and rdev == 0 else kind


def portable(xattr: bytes) -> bool:
    """Whether an extended attribute of an upper layer means the same on every host."""
    return xattr not in _LOCAL_XATTRS


def data_length(data: Data, size: int) -> int:
    """How many bytes of its content a file of ``size`` bytes uses."""
    return size if data.extents is None else sum(length for _, length in data.extents)


def encode_tree(tree: Tree) -> bytes:
    """Equal trees give equal bytes."""
    return msgspec.msgpack.encode(tree, order="deterministic")


def decode_tree(data: bytes) -> Tree:
    """Decode and check all invariants. Raises `CorruptData`, `NewerVersion`."""
    try:
        version = msgspec.msgpack.decode(data, type=_Versioned).version
        if version > TREE_VERSION:
            raise NewerVersion(
                f"the layers of this checkpoint have format {version}, this moorage knows {TREE_VERSION}",
                "upgrade moorage on this node",
            )
        tree = msgspec.msgpack.decode(data, type=Tree)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"the tree of the pod's layers cannot be read: {error}") from None
    for layer in tree.layers:
        _check_layer(layer)
    return tree


def _check_layer(layer: LayerTree) -> None:
    def wrong(path: bytes, what: str) -> CorruptData:
        return CorruptData(f"layer {layer.mountpoint} of the checkpoint, entry {path!r}: {what}")

    if not layer.entries or layer.entries[0].path or layer.entries[0].kind != "d":
        raise wrong(b"", "the layer does not begin with its root")
    open_folders = [b""]
    linkable: set[bytes] = set()
    seen = {b""}
    for entry in layer.entries[1:]:
        parts = entry.path.split(b"/")
        if any(part in {b"", b".", b".."} for part in parts) or b"\0" in entry.path:
            raise wrong(entry.path, "not a plain path")
        if entry.path in seen:
            raise wrong(entry.path, "occurs twice")
        seen.add(entry.path)
        parent = entry.path.rpartition(b"/")[0]
        while open_folders and open_folders[-1] != parent:
            open_folders.pop()
        if not open_folders:
            raise wrong(entry.path, "its folder does not stand before it")
        if entry.kind == "d":
            open_folders.append(entry.path)
        elif entry.kind == "h":
            if entry.target not in linkable:
                raise wrong(entry.path, "a hard link to nothing")
        elif entry.kind != "w":
            linkable.add(entry.path)
        if entry.data is not None and (entry.kind != "f" or not _within(entry.data, entry.size)):
            raise wrong(entry.path, "its data does not fit it")


def _within(data: Data, size: int) -> bool:
    end = 0
    for start, length in data.extents or ():
        if start < end or length <= 0:
            return False
        end = start + length
    return end <= size and data.offset >= 0
