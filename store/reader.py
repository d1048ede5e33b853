"""Reading contents back: neighbouring chunks of a pack in one read, every chunk verified, zero runs left as holes."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from moorage.errors import CorruptData, NotFound
from moorage.store import format as fmt
from moorage.store.backend import Backend, Source
from moorage.store.index import ChunkIndex, Location
from moorage.store.keys import StoreKey
from moorage.store.manifests import Content
from moorage.store.posix import translated, write_all

SEGMENT = 16 << 20
_READ = 1 << 20
_PLAIN = 4 << 20  # what compressed chunks may grow to in memory
WAY_OUT = "use an earlier checkpoint; `moorage check CHECKPOINT --read-data` shows what else is damaged"


class Opened(NamedTuple):
    """A verified chunk: its bytes, and as they are stored. Both are valid until this thread's next read."""

    name: bytes
    header: fmt.ChunkHeader
    stored: memoryview
    plain: memoryview


class Use(NamedTuple):
    """Bytes ``start`` to ``stop`` of a chunk belong at ``at`` in a file."""

    at: int
    start: int
    stop: int


class Segment:
    """A part of a file: which chunks it needs, and what of each belongs where."""

    def __init__(self) -> None:
        self.sizes: dict[bytes, int] = {}
        self.uses: dict[bytes, list[Use]] = {}
        self.length = 0


class _Part(NamedTuple):
    target: Path | int
    segment: Segment


_Run = list[tuple[bytes, int, Location]]


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
            batches = list(_batches(_prepared(files, made)))
            if len(batches) == 1:  # small: not worth a thread
                self._fetch(batches[0])
                return
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
        for segment in segments(content):
            for group in self.groups(segment.sizes):
                for name, _, _, plain in group:
                    for at, start, stop in segment.uses[name]:
                        out[at : at + stop - start] = plain[start:stop]
        return bytes(out)

    def groups(self, sizes: Mapping[bytes, int], *, again: bool = False) -> Iterator[list[Opened]]:
        """Every chunk in ``sizes`` (name to length), verified; those that one read brought come together.

        They come in the order in which they are stored. ``again``: the index has just been refreshed.
        Raises `CorruptData`.
        """
        sources: dict[str, Source] = {}
        try:
            for run in self._runs(sizes):
                first = run[0][2]
                size = sum(place.stored + fmt.CHUNK_HEADER for _, _, place in run)
                buffer = self._buffer(size)[:size]
                try:
                    got = self._read(sources, first, buffer)
                except NotFound:
                    if again:
                        raise CorruptData(
                            f"pack {first.pack} is missing from {self._backend.location}", WAY_OUT
                        ) from None
                    self._index.refresh()  # prune may have moved the chunk to another pack
                    yield from self.groups({name: length for name, length, _ in run}, again=True)
                    continue
                data = buffer[:got]
                yield [self._open(data, place.offset - first.offset, place, name, n) for name, n, place in run]
        finally:
            for source in sources.values():
                source.close()

    def _buffer(self, size: int) -> memoryview:
        """This thread's read buffer, of at least ``size`` bytes; small enough for the processor's cache."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = memoryview(bytearray(max(size, _READ + (1 << 16))))
        return buffer

    def _runs(self, sizes: Mapping[bytes, int]) -> Iterator[_Run]:
        """Group chunks that lie one behind the other in one pack, up to `_READ` bytes."""
        run: _Run = []
        pack = ""
        end = size = plain = 0
        places = sorted((self._locate(name), name) for name in sizes)
        for place, name in places:
            length = place.stored + fmt.CHUNK_HEADER
            if run and (place.pack != pack or place.offset != end or size + length > _READ or plain > _PLAIN):
                yield run
                run, size, plain = [], 0, 0
            run.append((name, sizes[name], place))
            pack, end = place.pack, place.offset + length
            size += length
            plain += sizes[name]
        if run:
            yield run

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

    def _open(self, data: memoryview, start: int, place: Location, name: bytes, length: int) -> Opened:
        """The chunk whose header is at ``data[start:]``, verified. Raises `CorruptData`."""
        where = f"chunk {name.hex()} in pack {place.pack} at offset {place.offset}"
        header = fmt.parse_chunk_header(data, start, where)
        start += fmt.CHUNK_HEADER
        stored = data[start : start + header.stored]
        if header.name != name or header.stored != place.stored or header.plain != length:
            raise CorruptData(f"{where}: the header belongs to another chunk", WAY_OUT)
        if len(stored) < header.stored:
            raise CorruptData(f"{where} is cut short", WAY_OUT)
        payload = fmt.open_chunk(self._key.sealer, header, data[start - fmt.CHUNK_HEADER : start], stored, where)
        plain = memoryview(fmt.decompress(payload, length, where)) if header.codec == fmt.CODEC_ZSTD else payload
        if len(plain) != length or self._key.chunk_name(plain) != name:
            raise CorruptData(f"{where} does not match its digest", WAY_OUT)
        return Opened(name, header, stored, plain)

    def _fetch(self, batch: list[_Part]) -> None:
        for target, segment in batch:
            fd = target if isinstance(target, int) else os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            try:
                for group in self.groups(segment.sizes):
                    with translated("the file to restore" if isinstance(target, int) else str(target)):
                        for at, buffers in _contiguous(group, segment.uses):
                            write_all(fd, buffers, at)
            finally:
                if fd is not target:
                    os.close(fd)


def _prepared(files: Iterable[tuple[Content, Path | int]], made: list[Path]) -> Iterator[_Part]:
    """Make every target with its full size; then what has to be written to it."""
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
        for segment in segments(content):
            yield _Part(target, segment)


def segments(content: Content) -> Iterator[Segment]:
    """The content in parts of about `SEGMENT` bytes. Raises `CorruptData` if its chunks do not add up."""
    segment = Segment()
    at = 0
    for chunk in content.chunks:
        if chunk.name:
            segment.sizes[chunk.name] = chunk.whole
            use = Use(at, chunk.offset, chunk.offset + chunk.length)
            segment.uses.setdefault(chunk.name, []).append(use)
            segment.length += chunk.length
            if use.stop > chunk.whole or use.start < 0:
                raise CorruptData(f"a content refers to bytes behind the end of chunk {chunk.name.hex()}", WAY_OUT)
            if segment.length >= SEGMENT:
                yield segment
                segment = Segment()
        at += chunk.length
    if at != content.size:
        raise CorruptData(f"a content of {content.size} bytes has chunks for {at}", WAY_OUT)
    if segment.length:
        yield segment


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Small files together, so that a thread has something to do for its start."""
    batch: list[_Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += part.segment.length
        if size >= SEGMENT:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _contiguous(group: list[Opened], uses: Mapping[bytes, list[Use]]) -> Iterator[tuple[int, list[memoryview]]]:
    """What a group's chunks are used for, in the file's order; neighbours in the file to be written in one call."""
    buffers: list[memoryview] = []
    begin = end = 0
    found = ((use, opened.plain) for opened in group for use in uses[opened.name])
    for use, plain in sorted(found, key=lambda pair: pair[0]):
        if buffers and use.at != end:
            yield begin, buffers
            buffers = []
        if not buffers:
            begin = use.at
        buffers.append(plain[use.start : use.stop])
        end = use.at + use.stop - use.start
    if buffers:
        yield begin, buffers
