"""What the last capture knew, so that the next one copies only what changed. Pure.

A file is taken to be unchanged when inode, size, mtime and ctime are what they were, and none of these holds:

* Its ctime was not safely in the past when it was copied: a write within the same tick of the file system's clock
  would have left the same stamp ("racily clean").
* A process had it mapped shared and writable, then or now. A page that is already dirty takes further writes without
  any stamp; so a file that was mapped at the last capture is copied again even when the mapping has gone since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from moorage.errors import CorruptData
from moorage.store.manifests import Content
from moorage.worker.layers.tree import Data, Tree, data_length

INDEX_VERSION: Final = 1
_SECOND: Final = 1_000_000_000


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What tells that a file has not changed. Bytes, nanoseconds since the epoch."""

    size: int
    mtime_ns: int
    ctime_ns: int


class Known(msgspec.Struct, frozen=True, array_like=True):
    """One regular file at the last capture. ``settled``: an equal stamp proves that it has not changed."""

    stamp: Stamp
    settled: bool
    data: Data | None
    xattrs: tuple[tuple[bytes, bytes], ...]


class LayerIndex(msgspec.Struct, array_like=True):
    """One layer's files by inode number, valid for the file system with this st_dev."""

    device: int
    files: dict[int, Known]


class CaptureIndex(msgspec.Struct, kw_only=True):
    """Keep it in memory or as bytes in a file of the pod's folder. Only ``contents`` is of interest to callers."""

    version: int = INDEX_VERSION
    contents: dict[str, Content] = {}
    layers: dict[str, LayerIndex] = {}
    wasteful: frozenset[str] = frozenset()  # contents whose files are to be copied anew

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> CaptureIndex:
        """Raises `CorruptData`, also for another version: the next capture then simply copies everything."""
        try:
            index = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"the index of the last capture cannot be read: {error}") from None
        if index.version != INDEX_VERSION:
            raise CorruptData(f"the index of the last capture has version {index.version}")
        return index


def settled(ctime_ns: int, clock_ns: int) -> bool:
    """Whether any write after ``clock_ns`` (the file system's own clock) must change a ctime of ``ctime_ns``."""
    # A file system that keeps whole seconds shows no fraction; then the stamp stands for all of its second.
    coarse = ctime_ns % _SECOND == 0
    return ctime_ns + (_SECOND if coarse else 0) < clock_ns


def unchanged(known: Known | None, stamp: Stamp) -> bool:
    """Whether the file's bytes are still what ``known`` says, as far as stamps can tell."""
    return known is not None and known.settled and known.stamp == stamp


def wasteful(tree: Tree, contents: Mapping[str, Content]) -> frozenset[str]:
    """Contents of which the tree uses less than half: copying the living part anew is cheaper than keeping the rest."""
    used: dict[str, int] = {}
    for key, length in _uses(tree):
        used[key] = used.get(key, 0) + length
    return frozenset(key for key, content in contents.items() if 2 * used.get(key, 0) < content.size)


def _uses(tree: Tree) -> Iterable[tuple[str, int]]:
    for layer in tree.layers:
        for entry in layer.entries:
            if entry.data is not None:
                yield entry.data.key, data_length(entry.data, entry.size)


def referenced(tree: Tree) -> frozenset[str]:
    """All content keys that the tree needs."""
    return frozenset(key for key, _ in _uses(tree))
