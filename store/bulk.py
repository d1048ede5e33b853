"""Chunks in bulk whose digests are checked elsewhere: device memory, which the GPU hashes faster than any processor.

What is stored raw is read straight into the caller's buffer, headers and all. What is not (compressed, encrypted) goes
the ordinary way, through `Reader.groups`, and is verified there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from moorage.errors import CorruptData
from moorage.store import format as fmt
from moorage.store.index import Location

if TYPE_CHECKING:
    from moorage.store.store import Store


class Run(NamedTuple):
    """Chunks that lie one behind the other in one pack: names, plain lengths, places."""

    pack: str
    chunks: list[tuple[bytes, int, Location]]

    @property
    def size(self) -> int:
        """Bytes of the run in its pack, headers included."""
        return sum(place.stored + fmt.CHUNK_HEADER for _, _, place in self.chunks)


class Piece(NamedTuple):
    """A chunk's bytes within the buffer that `read` was given. ``verified``: its digest was compared already."""

    name: bytes
    offset: int
    length: int
    verified: bool


def runs(store: Store, sizes: Mapping[bytes, int], limit: int) -> list[Run]:
    """All chunks of ``sizes`` (name to plain length) in runs of at most ``limit`` bytes, in the order of the packs.

    Raises `CorruptData` for a chunk that is in no index.
    """
    store.index.ensure()
    if any(store.index.locate(name) is None for name in sizes):
        store.index.refresh()  # another writer may have brought them since
    places: list[tuple[Location, bytes, int]] = []
    for name, length in sizes.items():
        place = store.index.locate(name)
        if place is None:
            raise CorruptData(f"chunk {name.hex()} is in no index of {store.location}", "use an earlier checkpoint")
        places.append((place, name, length))
    found: list[Run] = []
    end = size = 0
    for place, name, length in sorted(places):
        stored = place.stored + fmt.CHUNK_HEADER
        if not found or found[-1].pack != place.pack or place.offset != end or size + stored > limit:
            found.append(Run(place.pack, []))
            size = 0
        found[-1].chunks.append((name, length, place))
        size += stored
        end = place.offset + stored
    return found


def read(store: Store, run: Run, buffer: memoryview) -> Iterator[Piece]:
    """Read one run into ``buffer``, which must hold ``run.size`` and as many plain bytes.

    Raises `CorruptData`, `NotFound`.
    """
    source = store.backend.open(f"packs/{run.pack}")
    try:
        got = source.read_into(run.chunks[0][2].offset, buffer[: run.size])
    finally:
        source.close()
    first = run.chunks[0][2].offset
    if got == run.size and all(
        fmt.is_raw(buffer, place.offset - first, name, length) for name, length, place in run.chunks
    ):
        for name, length, place in run.chunks:
            yield Piece(name, place.offset - first + fmt.CHUNK_HEADER, length, False)
        return
    if got == run.size:
        _examine(buffer, run)
    at = 0
    for group in store.reader.groups({name: length for name, length, _ in run.chunks}):
        for opened in group:
            length = len(opened.plain)
            buffer[at : at + length] = opened.plain
            yield Piece(opened.name, at, length, verified=True)
            at += length


def _examine(buffer: memoryview, run: Run) -> None:
    """Raises `CorruptData` where another chunk lies than the index says."""
    for name, length, place in run.chunks:
        where = f"chunk {name.hex()} in pack {run.pack}"
        header = fmt.parse_chunk_header(buffer, place.offset - run.chunks[0][2].offset, where)
        if header.name != name or header.plain != length or header.stored != place.stored:
            raise CorruptData(f"{where}: the header belongs to another chunk")
