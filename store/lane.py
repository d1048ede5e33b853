"""What one writing thread owns: its pack, its compressor, its buffer, and the packs that it compares chunks with."""

from __future__ import annotations

from moorage.errors import MoorageError
from moorage.store import chunker
from moorage.store import format as fmt
from moorage.store.backend import Source
from moorage.store.codec import Compressor
from moorage.store.index import Location
from moorage.store.packs import PackSet, PackWriter

BLOCK = 1 << 20
_SOURCES = 16


class Lane:
    """Used by one thread at a time."""

    def __init__(self, packs: PackSet, compressor: Compressor) -> None:
        self._backend = packs.backend
        self._key = packs.key
        self._pack = PackWriter(packs)
        self._compressor = compressor
        self._sources: dict[str, Source] = {}
        self.buffer = bytearray(BLOCK + chunker.MAX_PAGES * chunker.PAGE)

    def store(self, name: bytes, data: bytes | memoryview, *, raw: bool = False) -> tuple[Location, int]:
        """Append a chunk; ``data`` must not change before `flush`. Returns its place and the bytes that it takes.

        ``raw``: it is not compressed, so that a reader can take it as it is.
        """
        packed = None if raw else self._compressor.compress(memoryview(data))
        payload = data if packed is None else packed
        codec = fmt.CODEC_RAW if packed is None else fmt.CODEC_ZSTD
        header, stored = fmt.seal_chunk(self._key.sealer, name, codec, len(data), payload, self._key.id)
        return self._pack.add(header, stored), fmt.CHUNK_HEADER + len(stored)

    def flush(self, *, lazy: bool = False) -> None:
        """Hand what was stored to the backend. ``lazy``: only if that is worth a call."""
        self._pack.flush(lazy=lazy)

    def finish(self) -> None:
        """End the current pack."""
        self._pack.close()

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def load(self, place: Location, name: bytes, size: int) -> bytearray | None:
        """The ``size`` bytes of a stored chunk, not verified; None if they cannot be had (not yet, or any more)."""
        buffer = bytearray(fmt.CHUNK_HEADER + place.stored)
        try:
            source = self._source(place.pack)
            if source.read_into(place.offset, memoryview(buffer)) < len(buffer):
                return None
            header = fmt.parse_chunk_header(buffer, 0, place.pack)
            if header.name != name or header.stored != place.stored or header.plain != size:
                return None
            view = memoryview(buffer)
            head, stored = view[: fmt.CHUNK_HEADER], view[fmt.CHUNK_HEADER :]
            payload = fmt.open_chunk(self._key.sealer, header, head, stored, place.pack)
            if header.codec == fmt.CODEC_ZSTD:
                return bytearray(fmt.decompress(payload, size, place.pack))
            return bytearray(payload) if len(payload) == size else None
        except MoorageError:
            return None

    def _source(self, pack: str) -> Source:
        source = self._sources.get(pack)
        if source is None:
            if len(self._sources) >= _SOURCES:
                self.close()
            source = self._sources[pack] = self._backend.open(f"packs/{pack}")
        return source
