"""Writing one pod's data: cut, name, look up, compress where it pays, put into packs.

The order of writing is packs, index object, then (by `Store`) manifests. A writer that fails or is aborted leaves
nothing visible. A writer that is killed leaves packs that no index names, which prune removes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from moorage import failpoints
from moorage.errors import MoorageError, Unavailable
from moorage.store import chunker, patch
from moorage.store.codec import Compressor, Rate
from moorage.store.index import ChunkIndex, Location, PackRecord
from moorage.store.lane import BLOCK, Lane
from moorage.store.leases import Lease
from moorage.store.manifests import Chunk, Content
from moorage.store.packs import PackSet
from moorage.store.posix import translated

STRIPE = 32 << 20
_COARSE = chunker.MIN_PAGES * chunker.PAGE
_LARGEST_ZERO = 1 << 31

failpoints.declare("store.index.before", "store.index.after")


class WriteStats(NamedTuple):
    """Bytes and chunks that a writer was given, and those of them that the store did not have.

    ``bytes_stored`` is what the new ones take in packs, after compression and with their headers.
    """

    bytes_total: int
    bytes_new: int
    chunks: int
    chunks_new: int
    bytes_stored: int


class KindStats:
    """Running totals of one kind of data."""

    def __init__(self) -> None:
        self.total = self.new = self.chunks = self.chunks_new = self.stored = 0


class Writer:
    """Adds files to the store. Made by `Store.writer`; use as a context manager.

    Leaving the block gives the lease back, so write the pod manifest inside it: what the writer reused is protected
    from prune until the manifest protects it. Without `finish` the packs are removed again.
    Safe to use from several threads; at most ``threads`` work at a time, at nice value ``nice``.
    """

    def __init__(
        self,
        packs: PackSet,
        index: ChunkIndex,
        lease: Lease,
        cutting: tuple[chunker.Marker, patch.Patcher],
        put_index: Callable[[list[PackRecord]], str],
        rates: tuple[Rate, Rate],
        *,
        threads: int,
        nice: int,
    ) -> None:
        self._packs = packs
        self._index = index
        self._key = packs.key
        self._lease = lease
        self._marker, self._patcher = cutting
        self._put_index = put_index
        self._pool = ThreadPoolExecutor(
            threads, thread_name_prefix="store-write", initializer=_lower_priority, initargs=(nice,)
        )
        self._lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
        self._all_lanes = [Lane(packs, Compressor(rates[0], rates[1], threads)) for _ in range(threads)]
        for lane in self._all_lanes:
            self._lanes.put(lane)
        self._lock = threading.Lock()
        self._mine: dict[bytes, Location | None] = {}  # None: being stored
        self._kinds: dict[str, KindStats] = {}
        self._state = "open"
        self._failed = False
        self.elsewhere: Callable[[bytes], bool] = lambda name: False  # whether a chunk can be had from another store

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @property
    def lease_id(self) -> str:
        return self._lease.info.id

    def lease_valid(self) -> bool:
        """False: prune may not know of this writer any more, and `finish` will fail."""
        return self._lease.valid()

    def lacking(self, contents: Iterable[Content]) -> int:
        """How many chunks of ``contents``, which were stored before, are neither in the store nor in this writer."""
        chunks = {chunk.name for content in contents for chunk in content.chunks if chunk.name}
        return sum(self._lacks(name) for name in chunks)

    def _lacks(self, name: bytes) -> bool:
        return name not in self._mine and self._index.locate(name) is None and not self.elsewhere(name)

    @property
    def by_kind(self) -> dict[str, KindStats]:
        """Totals for each ``kind`` that was passed to `add_file` and `add_bytes`."""
        return dict(self._kinds)

    def add_file(self, path: Path, *, kind: str = "image") -> Content:
        """Store the file at ``path``, which must not change meanwhile. Holes and zero pages take no space.

        Raises `NoCapacity`, `Unavailable`, `NotFound` (no such file), and `Unavailable` if the file shrinks.
        """
        with translated(str(path)):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self.add_descriptor(fd, kind=kind)
        finally:
            os.close(fd)

    def add_descriptor(self, fd: int, *, kind: str = "image") -> Content:
        """As `add_file`, for an open regular file; its offset does not matter and may move."""
        self._check_open()
        with translated("the file to store"):
            status = os.fstat(fd)
            size = status.st_size
            holes = status.st_blocks * 512 < size
            ranges = list(_data_ranges(fd, size)) if holes else [(0, size)]
        pieces: list[tuple[int, int]] = []
        for start, stop in ranges:
            edges = [start, *(self._edge(fd, at, stop) for at in range(start + STRIPE, stop - BLOCK, STRIPE)), stop]
            pieces += [(a, b) for a, b in itertools.pairwise(edges) if b > a]
        if not pieces:
            return Content(size, _zeros(size))
        futures = [self._pool.submit(self._stripe, fd, start, stop, kind) for start, stop in pieces]
        chunks: list[Chunk] = []
        at = 0
        try:
            for (start, stop), future in zip(pieces, futures, strict=True):
                chunks += _zeros(start - at)
                chunks += future.result()
                at = stop
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()  # nobody may use the descriptor when this returns
        return Content(size, _joined(chunks + _zeros(size - at)))

    def add_bytes(self, data: bytes, *, kind: str = "bytes") -> Content:
        """Store ``data``. Raises `NoCapacity`, `Unavailable`."""
        chunks: list[Chunk] = []
        with self._lane() as lane:
            for start in range(0, len(data), BLOCK):
                part = bytearray(data[start : start + BLOCK])
                for offset, length, zero in self._spans(part, len(part), last=True)[0]:
                    if zero:
                        chunks += _zeros(length)
                        self._count(kind, length, length, False, 0)
                    else:
                        # A copy: what is pending in the lane outlives this call.
                        chunks += self._chunk(lane, memoryview(bytes(part[offset : offset + length])), kind)
            lane.flush(lazy=True)
        return Content(len(data), _joined(chunks))

    def has(self, name: bytes) -> bool:
        """Whether the chunk of this name need not be given: it is there, and stays as long as this writer lives."""
        return self._known(name)

    def add_named(self, chunks: Sequence[tuple[bytes, memoryview]], *, kind: str) -> None:
        """Store chunks that were named (`StoreKey.chunk_name`) by the caller, as they are.

        The buffers are the caller's again on return. Raises `NoCapacity`, `Unavailable`.
        """
        with self._lane() as lane:
            for name, data in chunks:
                stored = self._put(lane, name, data, raw=True)
                self._count(kind, len(data), 0 if stored else len(data), True, stored)
            lane.flush()

    def count_known(self, size: int, chunks: int, *, kind: str) -> None:
        """Count ``chunks`` chunks, ``size`` bytes in all, that belong to this writer's data and were there already."""
        with self._lock:
            stats = self._kinds.setdefault(kind, KindStats())
            stats.total += size
            stats.chunks += chunks

    def finish(self) -> WriteStats:
        """Make everything durable and write the index object. After it nothing more can be added.

        Raises `NoCapacity`, and `Unavailable` when the lease was lost: then nothing of it is visible, try again.
        """
        self._check_open()
        self._pool.shutdown()
        for lane in self._all_lanes:
            lane.finish()
        records = self._packs.finish()
        if not self._lease.valid():
            raise Unavailable(
                f"writer {self._lease.info.label}: the store lease could not be renewed in time",
                "check that the store answers, then try again",
            )
        if records:
            failpoints.hit_sync("store.index.before")
            # From here on it is unknown whether an index names these packs: they must not be removed any more.
            self._state = "indexing"
            self._put_index(records)
            failpoints.hit_sync("store.index.after")
        self._state = "finished"
        kinds = self._kinds.values()
        return WriteStats(
            sum(k.total for k in kinds),
            sum(k.new for k in kinds),
            sum(k.chunks for k in kinds),
            sum(k.chunks_new for k in kinds),
            sum(k.stored for k in kinds),
        )

    def abort(self) -> None:
        """End the writer. Removes what it wrote unless `finish` succeeded. Calling it again does nothing."""
        if self._state == "closed":
            return
        self._pool.shutdown(cancel_futures=True)
        for lane in self._all_lanes:
            lane.close()
        if self._state == "open":
            self._packs.abort()
        self._state = "closed"
        self._lease.close()

    def _check_open(self) -> None:
        if self._state != "open":
            raise MoorageError(f"writer {self._lease.info.label} is {self._state}")
        if self._failed:
            raise MoorageError(f"writer {self._lease.info.label} failed before", "abort it and start another")

    @contextlib.contextmanager
    def _lane(self) -> Iterator[Lane]:
        """A free lane, waited for. If the block fails, so has the writer: its packs may lack promised chunks."""
        self._check_open()
        lane = self._lanes.get()
        try:
            yield lane
        except BaseException:
            self._failed = True
            raise
        finally:
            self._lanes.put(lane)

    def _edge(self, fd: int, at: int, limit: int) -> int:
        """The first boundary behind ``at``: where one stripe ends and the next begins, wherever pages have moved to."""
        block = bytearray(min(BLOCK, limit - at))
        got = os.preadv(fd, [block], at)
        cuts = self._marker.marks(memoryview(block)[:got]).translate(self._marker.cut)
        return at + (cuts.find(1) + 1) * chunker.PAGE

    def _stripe(self, fd: int, start: int, stop: int, kind: str) -> list[Chunk]:
        with self._lane() as lane:
            return list(self._chunks_of(lane, fd, start, stop, kind))

    def _chunks_of(self, lane: Lane, fd: int, start: int, stop: int, kind: str) -> Iterator[Chunk]:
        buffer = lane.buffer
        view = memoryview(buffer)
        held = 0  # bytes at the buffer's front that no chunk has taken yet
        at = start
        while at < stop or held:
            want = min(BLOCK, stop - at)
            with translated("the file to store"):
                got = os.preadv(fd, [view[held : held + want]], at) if want else 0
            if want and not got:
                raise Unavailable("a file became shorter while it was stored", "files must not change meanwhile")
            at += got
            size = held + got
            spans, held = self._spans(buffer, size, last=at >= stop)
            for offset, length, zero in spans:
                if zero:
                    self._count(kind, length, length, False, 0)
                    yield Chunk(b"", length)
                else:
                    yield from self._chunk(lane, view[offset : offset + length], kind)
            lane.flush()
            if held:
                view[:held] = view[size - held : size]

    def _spans(self, buffer: bytearray, size: int, *, last: bool) -> tuple[list[tuple[int, int, bool]], int]:
        """``(offset, length, zero)`` of what can be cut, and the number of bytes that are left behind it."""
        found = []
        at = 0
        for span in self._marker.split(buffer, size, last=last):
            length = min(span.pages * chunker.PAGE, size - at)
            found.append((at, length, span.zero))
            at += length
        return found, size - at

    def _chunk(self, lane: Lane, data: memoryview, kind: str) -> list[Chunk]:
        """The references that stand for ``data``; stores what the store does not have."""
        name = self._key.chunk_name(data)
        size = len(data)
        if size < _COARSE or size % chunker.PAGE:
            stored = self._put(lane, name, data)
            self._count(kind, size, 0 if stored else size, True, stored)
            return [Chunk(name, size)]
        recipe = self._patcher.recipe(name)
        if recipe is not None and self._usable(recipe):
            self._count(kind, size, size, True, 0)
            return list(recipe)
        ends = self._patcher.ends(data)
        parts = None if self._known(name) else self._patched(lane, ends, data, kind)
        if parts is None:
            stored = self._put(lane, name, data)
            self._count(kind, size, 0 if stored else size, True, stored)
            parts = [Chunk(name, size)]
        self._patcher.learn(name, ends, tuple(parts))
        return parts

    def _patched(self, lane: Lane, ends: patch.Ends, data: memoryview, kind: str) -> list[Chunk] | None:
        """``data`` put together from what is stored and a chunk of what is not; None: nothing like it is stored."""
        found = self._patcher.match(data, ends, self._extendable, lambda recipe: self._load(lane, recipe))
        if found is None:
            return None
        changed = b"".join(data[start:stop] for start, stop in found.changed)
        stored = 0
        if changed:
            new = self._key.chunk_name(changed)
            stored = self._put(lane, new, changed)
            self._count(kind, len(data), len(data) - (len(changed) if stored else 0), True, stored)
            return patch.assemble(len(data), found, Chunk(new, len(changed)))
        self._count(kind, len(data), len(data), True, 0)
        return patch.assemble(len(data), found, None)

    def _known(self, name: bytes) -> bool:
        return self._index.reusable(name) or name in self._mine

    def _usable(self, recipe: patch.Recipe) -> bool:
        return all(self._known(chunk.name) for chunk in recipe)

    def _extendable(self, recipe: patch.Recipe) -> bool:
        return self._usable(recipe) and patch.compact(recipe)

    def _load(self, lane: Lane, recipe: patch.Recipe) -> bytearray | None:
        """The bytes that ``recipe`` makes, as they are stored; None if that takes more than reading them."""
        loaded: dict[bytes, bytearray] = {}
        for chunk in recipe:
            if chunk.name not in loaded:
                place = self._mine.get(chunk.name) or self._index.locate(chunk.name)
                data = lane.load(place, chunk.name, chunk.whole) if place else None
                if data is None:
                    return None
                loaded[chunk.name] = data
        if len(recipe) == 1 and recipe[0].length == recipe[0].whole:
            return loaded[recipe[0].name]
        views = {name: memoryview(data) for name, data in loaded.items()}
        return bytearray().join(views[c.name][c.offset : c.offset + c.length] for c in recipe)

    def _put(self, lane: Lane, name: bytes, data: bytes | memoryview, *, raw: bool = False) -> int:
        """Store a chunk unless that is done already. Returns the bytes that it takes in the store; 0: none."""
        if self._index.reusable(name):
            return 0
        with self._lock:
            if name in self._mine:
                return 0
            self._mine[name] = None
        self._mine[name], stored = lane.store(name, data, raw=raw)
        return stored

    def _count(self, kind: str, size: int, known: int, chunk: bool, stored: int) -> None:
        with self._lock:
            stats = self._kinds.setdefault(kind, KindStats())
            stats.total += size
            stats.new += size - known
            stats.chunks += chunk
            stats.chunks_new += chunk and known == 0
            stats.stored += stored


def _lower_priority(nice: int) -> None:
    if nice:
        # On Linux the nice value belongs to the thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def _zeros(size: int) -> list[Chunk]:
    return [Chunk(b"", min(_LARGEST_ZERO, size - at)) for at in range(0, size, _LARGEST_ZERO)]


def _joined(chunks: list[Chunk]) -> list[Chunk]:
    """``chunks`` with neighbouring runs of zeros made one."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if joined and not chunk.name and not joined[-1].name and joined[-1].length + chunk.length <= _LARGEST_ZERO:
            joined[-1] = Chunk(b"", joined[-1].length + chunk.length)
        else:
            joined.append(chunk)
    return joined


def _data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a sparse file that hold data, widened to whole pages."""
    page = chunker.PAGE
    at = done = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            return
        at = os.lseek(fd, start, os.SEEK_HOLE)
        first, behind = max(done, start // page * page), min(size, (at + page - 1) // page * page)
        if behind > first:
            yield first, behind
            done = behind
