"""Filling packs: one `PackWriter` for each writing thread, so that no two threads ever share a file."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from moorage import failpoints
from moorage.store import format as fmt
from moorage.store.backend import Backend, Data, Sink
from moorage.store.codec import Rate
from moorage.store.index import Location, PackRecord
from moorage.store.keys import StoreKey

PACK_SIZE = 64 << 20  # at most; the backend may want smaller ones
_BUFFERED = 1 << 20
_UNSYNCED_PACKS = 4

failpoints.declare("store.pack.before", "store.pack.after")


class PackSet:
    """All packs of one writer: hands out names, syncs filled packs in the background, remembers what to index.

    ``owner`` is the lease id that the names begin with. Either `finish` or `abort` ends it.
    """

    def __init__(self, backend: Backend, key: StoreKey, nonce: bytes, owner: str, rate: Rate) -> None:
        self.backend = backend
        self.key = key
        self.nonce = nonce
        self._owner = owner
        self._rate = rate
        self._sequence: Iterator[int] = itertools.count()
        self._lock = threading.Lock()
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="store-sync")
        self._syncing: list[Future[None]] = []
        self._started: dict[str, Sink] = {}
        self._records: list[PackRecord] = []

    def start(self) -> tuple[str, Sink]:
        """A new pack: its name and where to write it. The header is already in it."""
        with self._lock:
            name = f"{self._owner}{next(self._sequence):08x}"
        failpoints.hit_sync("store.pack.before")
        sink = self.backend.create(f"packs/{name}")
        with self._lock:
            self._started[name] = sink
        sink.write([fmt.pack_header(self.key.id, self.nonce, name)])
        return name, sink

    def filled(self, name: str, sink: Sink, size: int, entries: list[fmt.PackEntry], seconds: float) -> None:
        """A pack is complete. Waits if too many packs are not on the medium yet."""
        record = PackRecord(name, size, fmt.encode_entries(entries))
        future = self._syncer.submit(self._sync, name, sink, record, seconds)
        with self._lock:
            self._syncing.append(future)
            oldest = self._syncing[-_UNSYNCED_PACKS] if len(self._syncing) >= _UNSYNCED_PACKS else None
        if oldest is not None:
            oldest.result()

    def _sync(self, name: str, sink: Sink, record: PackRecord, seconds: float) -> None:
        before = time.monotonic()
        sink.finish()
        self._rate.measured(record.size, seconds + time.monotonic() - before)
        failpoints.hit_sync("store.pack.after")
        with self._lock:
            self._records.append(record)

    def finish(self) -> list[PackRecord]:
        """All packs, durable. Raises what writing any of them raised."""
        for future in self._syncing:
            future.result()
        self._syncer.shutdown()
        return sorted(self._records, key=lambda record: record.pack)

    def abort(self) -> None:
        """Remove every pack of this writer: none of them is in an index."""
        self._syncer.shutdown(cancel_futures=True)
        for sink in self._started.values():
            sink.abort()


class PackWriter:
    """Puts chunks into packs of a `PackSet`, from one thread at a time."""

    def __init__(self, packs: PackSet) -> None:
        self._packs = packs
        self._sink: Sink | None = None
        self._name = ""
        self._size = 0
        self._entries: list[fmt.PackEntry] = []
        self._pending: list[Data] = []
        self._pending_size = 0
        self._seconds = 0.0

    def add(self, header: fmt.ChunkHeader, data: Data) -> Location:
        """Append a chunk as it is stored. ``data`` must stay as it is until `flush`. Returns where it will be."""
        if self._sink is None:
            self._name, self._sink = self._packs.start()
            self._size, self._entries, self._seconds = fmt.PACK_HEADER, [], 0.0
        self._entries.append(fmt.PackEntry(header.name, self._size, len(data), header.plain))
        self._pending.append(fmt.chunk_header(header, self._packs.key.id))
        self._pending.append(data)
        place = Location(self._name, self._size, len(data))
        added = fmt.CHUNK_HEADER + len(data)
        self._size += added
        self._pending_size += added
        if self._size >= min(PACK_SIZE, self._packs.backend.pack_size):
            self.close()
        return place

    def flush(self, *, lazy: bool = False) -> None:
        """Hand what is pending to the store. ``lazy``: only if that is worth a call."""
        if self._sink is not None and self._pending and not (lazy and self._pending_size < _BUFFERED):
            before = time.monotonic()
            self._sink.write(self._pending)
            self._seconds += time.monotonic() - before
            self._pending, self._pending_size = [], 0

    def close(self) -> None:
        """End the current pack, if there is one."""
        if self._sink is not None:
            self.flush()
            sink, self._sink = self._sink, None
            self._packs.filled(self._name, sink, self._size, self._entries, self._seconds)
