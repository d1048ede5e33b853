"""Condemning and deleting: the records that prune leaves behind, and what it does with them later."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from moorage import failpoints
from moorage.errors import NotFound
from moorage.store import format as fmt
from moorage.store.index import Condemned, IndexObject, PackRecord
from moorage.store.leases import Lease
from moorage.store.plan import RecordView

if TYPE_CHECKING:
    from moorage.store.store import Store

_STEPS = ("condemn", "barrier", "index", "delete", "record")
_MERGE_FROM = 32  # index objects
_SMALL_INDEX = 4 << 20
_INDEX_SIZE = 16 << 20

failpoints.declare(*(f"store.prune.{step}.{when}" for step in _STEPS for when in ("before", "after")))


class _Barrier(msgspec.Struct, frozen=True):
    leases: list[str]


def condemn(store: Store, lease: Lease, generation: int, paths: Iterable[str]) -> None:
    """Record that ``paths`` will be deleted, then who may have seen them before that. Nothing to do for no paths."""
    found = sorted(paths)
    if found:
        failpoints.hit_sync("store.prune.condemn.before")
        record = Condemned(generation=generation, objects=found)
        path = f"condemned/{generation:016d}-{secrets.token_hex(8)}"
        store.put_record(path, fmt.KIND_CONDEMNED, msgspec.msgpack.encode(record))
        failpoints.hit_sync("store.prune.condemn.after")
        put_barrier(store, lease, path)


def put_barrier(store: Store, lease: Lease, record: str) -> None:
    """Write down who may have looked at the index before ``record`` was there."""
    failpoints.hit_sync("store.prune.barrier.before")
    alive = [info.id for info in store.leases.active() if info.id != lease.info.id]
    store.put_record(barrier_path(record), fmt.KIND_PRUNE, msgspec.json.encode(_Barrier(alive)))
    failpoints.hit_sync("store.prune.barrier.after")


def records(store: Store) -> list[RecordView]:
    """All records with what is known about them."""
    now = store.backend.now()
    found = []
    for entry in list(store.backend.list("condemned")):
        path = barrier_path(entry.name)
        barrier = store.backend.stat(path)
        alive: frozenset[str] | None = None
        try:
            record = msgspec.msgpack.decode(store.read_object(entry.name, fmt.KIND_CONDEMNED), type=Condemned)
            if barrier is not None:
                data = store.read_object(path, fmt.KIND_PRUNE)
                alive = frozenset(msgspec.json.decode(data, type=_Barrier).leases)
        except NotFound:
            continue  # another prune has just finished with it
        age = max(0.0, now - barrier.modified) if barrier else 0.0  # clocks that count in seconds may say less
        found.append(RecordView(entry.name, record.generation, frozenset(record.objects), alive, age))
    return found


def delete(store: Store, ready: list[RecordView], fence: Callable[[], None]) -> None:
    """Delete what the records ``ready`` name, then the records.

    The order is that of reading: global manifests, pod manifests, index entries, packs; so what is there is whole.
    ``fence`` raises `Fenced` when another prune has overtaken this one.
    """
    gone = frozenset(path for record in ready for path in record.objects)
    packs = frozenset(path.removeprefix("packs/") for path in gone if path.startswith("packs/"))
    if ready:
        fence()
        failpoints.hit_sync("store.prune.delete.before")
        for path in sorted(path for path in gone if not path.startswith("packs/")):
            store.backend.delete(path)
    _rewrite_indexes(store, packs, fence)
    if not ready:
        return
    fence()
    for pack in sorted(packs):
        store.backend.delete(f"packs/{pack}")
    failpoints.hit_sync("store.prune.delete.after")
    failpoints.hit_sync("store.prune.record.before")
    for record in ready:
        store.backend.delete(record.name)
        store.backend.delete(barrier_path(record.name))
    failpoints.hit_sync("store.prune.record.after")
    store.index.refresh()


def _rewrite_indexes(store: Store, gone: frozenset[str], fence: Callable[[], None]) -> None:
    """New index objects without the packs ``gone``, then the old ones away. Merges small ones if there are many."""
    entries = {entry.name: entry for entry in store.backend.list("index")}
    objects = store.index.objects
    # A writer that was stopped for long may have written an index after prune had taken its packs.
    suspects = store.index.missing.difference(gone)
    gone = gone.union(pack for pack in suspects if store.backend.stat(f"packs/{pack}") is None)
    old = {name for name, packs in objects.items() if not gone.isdisjoint(packs)}
    if len(entries) > _MERGE_FROM:
        old |= {name for name, entry in entries.items() if entry.size < _SMALL_INDEX and name in objects}
    if not old:
        return
    fence()
    kept: dict[str, PackRecord] = {}
    for name in sorted(old):
        data = store.read_object(name, fmt.KIND_INDEX)
        for record in msgspec.msgpack.decode(data, type=IndexObject).packs:
            if record.pack not in gone:
                kept[record.pack] = record
    failpoints.hit_sync("store.prune.index.before")
    fresh = {store.put_index(part) for part in _by_size(kept.values())}
    for name in sorted(old - fresh):
        store.backend.delete(name)
    failpoints.hit_sync("store.prune.index.after")


def barrier_path(record: str) -> str:
    """Where the leases that were alive after ``record`` are written down."""
    return f"prunes/{record.rpartition('/')[2]}.barrier"


def _by_size(packs: Iterable[PackRecord]) -> Iterator[list[PackRecord]]:
    """Records in groups of about `_INDEX_SIZE` bytes."""
    part: list[PackRecord] = []
    size = 0
    for record in packs:
        part.append(record)
        size += len(record.entries)
        if size >= _INDEX_SIZE:
            yield part
            part, size = [], 0
    if part:
        yield part
