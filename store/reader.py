"""Reading contents back: neighbouring chunks of a pack in one read, every chunk verified, zero runs left as holes."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from moorage.errors import CorruptData, NotFound
from moorage.store import format as fmt
from moorage.store.backend import Backend, Source
from moorage.store.index import ChunkIndex, Location
from moorage.store.keys import StoreKey
from moorage.store.manifests import Chunk, Content
from moorage.store.posix import translated, write_all

SEGMENT = 16 << 20
_READ = 1 << 20
_PLAIN = 4 << 20  # what compressed chunks may grow to in memory
WAY_OUT = "use an earlier checkpoint; `moorage check CHECKPOINT --read-data` shows what else is damaged"


class Piece(NamedTuple):
    """A chunk and where it belongs in its file."""

    at: int
    chunk: Chunk


class Opened(NamedTuple):
    """A verified chunk: its bytes, and as they are stored. Both are valid until the next read."""

    piece: Piece
    codec: int
    stored: memoryview
    plain: memoryview


class _Part(NamedTuple):
    target: Path | int
    pieces: list[Piece]


class Reader:
    """Fetches and verifies chunks of one store. Thread-safe."""

    def __init__(self, backend: Backend, index: ChunkIndex, key: StoreKey, nonce: bytes) -> None:
        self._backend = backend
        self._index = index
        self._key = key
        self._nonce = nonce
        self._local = threading.local()

    def read_files(self, files: Sequence[tuple[Content, Path | int]], *, threads: int) -> None:
        """Write each content to its path (made 0600, or truncated) or descriptor. Raises `CorruptData`, `NoCapacity`.

        If anything fails the files at the paths are removed again.
        """
        made: list[Path] = []
        try:
            batches = list(_batches(self._prepared(files, made)))
            with ThreadPoolExecutor(threads, thread_name_prefix="store-read") as pool:
                futures = [pool.submit(self._fetch, batch) for batch in batches]
                done, rest = wait(futures, return_when=FIRST_EXCEPTION)
                for future in rest:
                    future.cancel()
            for future in done:
                future.result()
        except BaseException:
            for path in made:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def read_bytes(self, content: Content) -> bytes:
        """All of ``content``. Raises `CorruptData`."""
        out = bytearray(content.size)
        for pieces in _segments(content):
            for group in self.groups(pieces):
                for opened in group:
                    at = opened.piece.at
                    out[at : at + len(opened.plain)] = opened.plain
        return bytes(out)

    def groups(self, pieces: Sequence[Piece], *, again: bool = False) -> Iterator[list[Opened]]:
        """Each piece that is not zeros, opened and verified; those that one read brought come together.

        ``again``: the index has just been refreshed. Raises `CorruptData`.
        """
        buffer = self._buffer(_READ)
        sources: dict[str, Source] = {}
        try:
            for run, first in self._runs(pieces):
                size = sum(place.stored + fmt.CHUNK_HEADER for _, place in run)
                if size > len(buffer):
                    buffer = self._buffer(size)
                try:
                    got = self._read(sources, first, buffer[:size])
                except NotFound:
                    if again:
                        raise CorruptData(
                            f"pack {first.pack} is missing from {self._backend.location}", WAY_OUT
                        ) from None
                    self._index.refresh()  # prune may have moved the chunk to another pack
                    yield from self.groups([piece for piece, _ in run], again=True)
                    continue
                yield list(self._verified(run, buffer[:got]))
        finally:
            for source in sources.values():
                source.close()

    def _buffer(self, size: int) -> memoryview:
        """This thread's read buffer, of at least ``size`` bytes; small enough for the processor's cache."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = memoryview(bytearray(max(size, _READ + (1 << 16))))
        return buffer

    def _runs(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[tuple[Piece, Location]], Location]]:
        """Group pieces that lie one behind the other in one pack, up to `_READ` bytes."""
        run: list[tuple[Piece, Location]] = []
        end = size = plain = 0
        for piece in pieces:
            if not piece.chunk.name:
                continue
            place = self._locate(piece.chunk.name)
            length = place.stored + fmt.CHUNK_HEADER
            full = size + length > _READ or plain > _PLAIN
            if run and (place.pack != run[0][1].pack or place.offset != end or full):
                yield run, run[0][1]
                run, size, plain = [], 0, 0
            run.append((piece, place))
            end = place.offset + length
            size += length
            plain += piece.chunk.length
        if run:
            yield run, run[0][1]

    def _locate(self, name: bytes) -> Location:
        place = self._index.locate(name)
        if place is None:
            self._index.refresh()
            place = self._index.locate(name)
        if place is None:
            damaged = "".join(f"; {message}" for message in self._index.damaged.values())
            raise CorruptData(f"chunk {name.hex()} is in no index of {self._backend.location}{damaged}", WAY_OUT)
        return place

    def _read(self, sources: dict[str, Source], place: Location, buffer: memoryview) -> int:
        source = sources.get(place.pack)
        if source is None:
            source = sources[place.pack] = self._backend.open(f"packs/{place.pack}")
            head = memoryview(bytearray(fmt.PACK_HEADER))
            fmt.check_pack_header(head[: source.read_into(0, head)], self._nonce, place.pack)
        return source.read_into(place.offset, buffer)

    def _verified(self, run: list[tuple[Piece, Location]], data: memoryview) -> Iterator[Opened]:
        base = run[0][1].offset
        for piece, place in run:
            yield self._open(data, place.offset - base, place, piece)

    def _open(self, data: memoryview, start: int, place: Location, piece: Piece) -> Opened:
        """The chunk whose header is at ``data[start:]``, verified. Raises `CorruptData`."""
        name, length = piece.chunk.name, piece.chunk.length
        where = f"chunk {name.hex()} in pack {place.pack} at offset {place.offset}"
        header = fmt.parse_chunk_header(data, start, where)
        start += fmt.CHUNK_HEADER
        stored = data[start : start + header.stored]
        if header.name != name or header.stored != place.stored or header.plain != length:
            raise CorruptData(f"{where}: the header belongs to another chunk", WAY_OUT)
        if len(stored) < header.stored:
            raise CorruptData(f"{where} is cut short", WAY_OUT)
        plain = memoryview(fmt.decompress(stored, length, where)) if header.codec == fmt.CODEC_ZSTD else stored
        if len(plain) != length or self._key.chunk_name(plain) != name:
            raise CorruptData(f"{where} does not match its digest", WAY_OUT)
        return Opened(piece, header.codec, stored, plain)

    def _prepared(self, files: Iterable[tuple[Content, Path | int]], made: list[Path]) -> Iterator[_Part]:
        for content, target in files:
            if isinstance(target, int):
                with translated("the file to restore"):
                    if stat.S_ISREG(os.fstat(target).st_mode):
                        os.ftruncate(target, content.size)
            else:
                with translated(str(target)):
                    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                    made.append(target)
                    try:
                        os.ftruncate(fd, content.size)
                    finally:
                        os.close(fd)
            for pieces in _segments(content):
                yield _Part(target, pieces)

    def _fetch(self, batch: list[_Part]) -> None:
        for target, pieces in batch:
            fd = target if isinstance(target, int) else os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for group in self.groups(pieces):
                    with translated("the file to restore" if isinstance(target, int) else str(target)):
                        for at, buffers in _contiguous(group):
                            write_all(fd, buffers, at)
            finally:
                if fd is not target:
                    os.close(fd)


def _segments(content: Content) -> Iterator[list[Piece]]:
    """The content's stored chunks in runs of about `SEGMENT` bytes. Raises `CorruptData` if they do not add up."""
    pieces: list[Piece] = []
    at = size = 0
    for chunk in content.chunks:
        if chunk.name:
            pieces.append(Piece(at, chunk))
            size += chunk.length
            if size >= SEGMENT:
                yield pieces
                pieces, size = [], 0
        at += chunk.length
    if at != content.size:
        raise CorruptData(f"a content of {content.size} bytes has chunks for {at}", WAY_OUT)
    if pieces:
        yield pieces


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Small files together, so that a thread has something to do for its start."""
    batch: list[_Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += sum(piece.chunk.length for piece in part.pieces)
        if size >= SEGMENT:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _contiguous(group: list[Opened]) -> Iterator[tuple[int, list[memoryview]]]:
    """Neighbours in the file, to be written in one call."""
    buffers: list[memoryview] = []
    start = end = 0
    for piece, _, _, data in group:
        if buffers and piece.at != end:
            yield start, buffers
            buffers = []
        if not buffers:
            start = piece.at
        buffers.append(data)
        end = piece.at + len(data)
    if buffers:
        yield start, buffers
