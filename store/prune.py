"""Prune: delete what no checkpoint needs, beside running writers and readers. The package's docstring proves it safe.

One run: claim the generation; find what is live; delete manifests that are not; copy live chunks out of condemned and
out of mostly empty packs; condemn packs; write down who holds a lease now; delete the packs that an earlier run has
condemned. It may die between any two steps; the next run goes on.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from moorage import failpoints
from moorage.errors import CorruptData, Fenced, NoCapacity, NotFound, Unavailable
from moorage.store import format as fmt
from moorage.store.index import Condemned, IndexObject, PackRecord
from moorage.store.leases import TTL_SECONDS, FileLeases, Lease, LeaseKeeper
from moorage.store.manifests import Chunk
from moorage.store.packs import PackSet, PackWriter
from moorage.store.plan import PackView, RecordView, deletable, plan_packs
from moorage.store.reader import Piece

if TYPE_CHECKING:
    from moorage.store.store import Store

_STEPS = ("claim", "manifests", "copy", "condemn", "barrier", "index", "packs", "record")
_MERGE_FROM = 32  # index objects
_SMALL_INDEX = 4 << 20
_INDEX_SIZE = 16 << 20
_log = structlog.get_logger(__name__)

failpoints.declare(*(f"store.prune.{step}.{when}" for step in _STEPS for when in ("before", "after")))


class PruneResult(NamedTuple):
    """What a run did, or with ``dry_run`` would do. Sizes in bytes.

    ``bytes_condemned`` become free in a later run, ``bytes_pending`` were condemned earlier and wait for a lease, a
    later generation or the settling time.
    """

    manifests_deleted: int
    packs_deleted: int
    bytes_freed: int
    packs_condemned: int
    bytes_condemned: int
    bytes_pending: int
    bytes_copied: int
    problems: list[str]


class _Barrier(msgspec.Struct, frozen=True):
    leases: list[str]


class _Live(NamedTuple):
    chunks: dict[bytes, int]  # name -> length
    globals: set[str]
    pods: set[str]


class Pruner:
    """One run over one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._backend = store.backend
        self._problems: list[str] = []

    @staticmethod
    def wait_for_rival(leases: LeaseKeeper, manifest: str) -> None:
        """Wait until no prune runs that does not keep ``manifest``. The caller's own lease names it as root already.

        Raises `Unavailable` after a while.
        """
        deadline = time.monotonic() + TTL_SECONDS + 30
        pause = threading.Event()
        while rivals := [x for x in leases.active() if x.role == "prune" and manifest not in x.roots]:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"checkpoint manifest {manifest}: {rivals[0].label} on {rivals[0].host} may delete it", "try later"
                )
            pause.wait(0.1)

    def run(self, keep: Collection[str], *, generation: int, protect_after: float, dry_run: bool) -> PruneResult:
        """See `Store.prune`."""
        lease = self._store.leases.acquire("prune", f"prune {generation}", sorted(keep))
        try:
            if not dry_run:
                self._claim(generation, keep)
            return self._run(lease, set(keep), generation, protect_after, dry_run)
        finally:
            lease.close()

    def _run(self, lease: Lease, keep: set[str], generation: int, protect_after: float, dry_run: bool) -> PruneResult:
        # The order of these three matters: a writer's packs are listed, its lease was seen or is gone, and if it is
        # gone its index object is there.
        packs = {entry.name.removeprefix("packs/"): entry for entry in self._backend.list("packs")}
        leases = [info for info in self._store.leases.active() if info.id != lease.info.id]
        self._store.index.refresh()
        for message in self._store.index.damaged.values():
            raise CorruptData(message, "nothing was deleted; put that file back from a copy, or repair the index")
        roots = keep.union(*(info.roots for info in leases if info.role != "prune"))
        live = self._live(keep, roots, protect_after)
        dead = self._dead_manifests(live, protect_after)
        if not dry_run:
            self._delete_manifests(lease, generation, dead)

        used = self._used(live.chunks)
        stranded = {name: size for name, size in live.chunks.items() if not self._store.index.reusable(name)}
        condemned = self._store.index.condemned
        indexed = {pack for named in self._store.index.objects.values() for pack in named}
        views = [
            PackView(name, e.size, e.modified, used.get(name, 0), name in indexed, name in condemned)
            for name, e in packs.items()
        ]
        plan = plan_packs(views, protect_after=protect_after, owners={info.id for info in leases})
        moving = {pack.name for pack in plan.repack}
        copied = sum(pack.used for pack in plan.repack)
        doomed = plan.garbage + plan.repack
        records = self._records()
        needed = self._packs_of(stranded)
        if not dry_run:
            copied, done = self._copy(lease, live.chunks, stranded, moving)
            if done:
                needed = set()
            else:
                doomed = plan.garbage
            self._condemn(lease, generation, doomed)
            records = self._barriers(records, lease)
        ready = deletable(
            records,
            generation=generation,
            active={info.id for info in leases} | {info.id for info in self._store.leases.active()} - {lease.info.id},
            settle=2 * self._backend.settle_seconds,
            needed=needed,
        )
        gone = frozenset(pack for record in ready for pack in record.packs)
        if not dry_run:
            self._sweep(lease, generation, ready, gone)
            self._tidy(generation, protect_after)
        sizes = {name: entry.size for name, entry in packs.items()}
        waiting = {pack for record in records for pack in record.packs} - gone
        return PruneResult(
            manifests_deleted=len(dead),
            packs_deleted=len(gone & packs.keys()),
            bytes_freed=sum(sizes.get(pack, 0) for pack in gone),
            packs_condemned=len(doomed),
            bytes_condemned=sum(pack.size for pack in doomed),
            bytes_pending=sum(sizes.get(pack, 0) for pack in waiting),
            bytes_copied=copied,
            problems=self._problems,
        )

    # Steps

    def _claim(self, generation: int, keep: Collection[str]) -> None:
        failpoints.hit_sync("store.prune.claim.before")
        data = msgspec.json.encode(sorted(keep))
        mine = self._store.put_record(_claim_path(generation), fmt.KIND_PRUNE, data)
        failpoints.hit_sync("store.prune.claim.after")
        if not mine or self._newest_claim() > generation:
            raise Fenced(f"prune generation {generation} has been used already", "raise the generation and try again")

    def _newest_claim(self) -> int:
        names = (entry.name.rpartition("/")[2] for entry in self._backend.list("prunes"))
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _fence(self, lease: Lease, generation: int) -> None:
        if not lease.valid() or self._newest_claim() > generation:
            raise Fenced(f"prune generation {generation} was overtaken", "nothing is lost; run prune again")

    def _live(self, keep: set[str], roots: set[str], protect_after: float) -> _Live:
        """All chunks that a kept, rooted or recent manifest needs. Raises `NotFound`, `CorruptData`."""
        globals_ = {_name(e.name) for e in self._backend.list("checkpoints") if e.modified > protect_after} | roots
        recent = {_name(e.name) for e in self._backend.list("pods") if e.modified > protect_after}
        pods: dict[str, bool] = dict.fromkeys(recent, False)
        for name in sorted(globals_):
            try:
                pods.update(dict.fromkeys(self._store.read_global_manifest(name).pods, True))
            except NotFound as error:
                if name in keep:
                    raise NotFound(
                        f"checkpoint manifest {name} should be kept but is missing",
                        "forget that checkpoint, then prune again; nothing was deleted",
                    ) from error
        chunks: dict[bytes, int] = {}
        for name, required in pods.items():
            try:
                manifest = self._store.read_pod_manifest(name)
            except NotFound:
                if required:
                    self._problems.append(f"pod manifest {name} is missing")
                continue
            for _, _, content in manifest.contents():
                chunks.update((chunk.name, chunk.length) for chunk in content.chunks if chunk.name)
        return _Live(chunks, globals_, set(pods))

    def _dead_manifests(self, live: _Live, protect_after: float) -> list[str]:
        """Global manifests first: a global manifest never outlives its pods."""
        return [
            entry.name
            for folder, alive in (("checkpoints", live.globals), ("pods", live.pods))
            for entry in self._backend.list(folder)
            if _name(entry.name) not in alive and entry.modified <= protect_after
        ]

    def _delete_manifests(self, lease: Lease, generation: int, dead: list[str]) -> None:
        if dead:
            self._fence(lease, generation)
            failpoints.hit_sync("store.prune.manifests.before")
            for name in dead:
                self._backend.delete(name)
            failpoints.hit_sync("store.prune.manifests.after")

    def _used(self, chunks: Iterable[bytes]) -> dict[str, int]:
        used: dict[str, int] = {}
        for name in chunks:
            place = self._store.index.locate(name)
            if place is None:
                self._problems.append(f"chunk {name.hex()} is in no index")
            else:
                used[place.pack] = used.get(place.pack, 0) + place.stored + fmt.CHUNK_HEADER
        return used

    def _packs_of(self, names: Iterable[bytes]) -> set[str]:
        places = (self._store.index.locate(name) for name in names)
        return {place.pack for place in places if place is not None}

    def _copy(
        self, lease: Lease, live: dict[bytes, int], stranded: dict[bytes, int], moving: set[str]
    ) -> tuple[int, bool]:
        """Copy chunks that are only in condemned packs, and those of the packs ``moving``. False: there is no room."""
        wanted = dict(stranded)
        if moving:
            for name, size in live.items():
                place = self._store.index.locate(name)
                if place is not None and place.pack in moving:
                    wanted[name] = size
        try:
            return self.copy_chunks(lease, wanted), True
        except NoCapacity as error:
            _log.warning("no room to copy live chunks; pruning goes on without", error=str(error))
            return 0, False

    def copy_chunks(self, lease: Lease, wanted: dict[bytes, int]) -> int:
        """Copy chunks as they are stored into new packs and index them. Returns their stored bytes."""
        places = sorted((p, name) for name in wanted if (p := self._store.index.locate(name)) is not None)
        if not places:
            return 0
        failpoints.hit_sync("store.prune.copy.before")
        store = self._store
        packs = PackSet(store.backend, store.key, bytes.fromhex(store.nonce), lease.info.id, store.write_rate)
        copied = 0
        try:
            writer = PackWriter(packs)
            for batch in _batches([Piece(0, Chunk(name, wanted[name])) for _, name in places]):
                for group in store.reader.groups(batch):
                    for piece, codec, stored, plain in group:
                        writer.add(piece.chunk.name, codec, len(plain), stored)
                        copied += len(stored) + fmt.CHUNK_HEADER
                    writer.flush()
            writer.close()
            records = packs.finish()
            if not lease.valid():
                raise Fenced("prune: the store lease could not be renewed in time", "run prune again")
        except BaseException:
            packs.abort()
            raise
        store.put_index(records)
        failpoints.hit_sync("store.prune.copy.after")
        return copied

    def _condemn(self, lease: Lease, generation: int, doomed: list[PackView]) -> None:
        if doomed:
            self._fence(lease, generation)
            failpoints.hit_sync("store.prune.condemn.before")
            record = Condemned(generation=generation, packs=sorted(pack.name for pack in doomed))
            path = f"condemned/{generation:016d}-{secrets.token_hex(8)}"
            self._store.put_record(path, fmt.KIND_CONDEMNED, msgspec.msgpack.encode(record))
            failpoints.hit_sync("store.prune.condemn.after")
            self._barrier(path, lease)

    def _barrier(self, record: str, lease: Lease) -> None:
        """Write down who may have looked at the index before ``record`` was there."""
        failpoints.hit_sync("store.prune.barrier.before")
        alive = [info.id for info in self._store.leases.active() if info.id != lease.info.id]
        self._store.put_record(_barrier_path(record), fmt.KIND_PRUNE, msgspec.json.encode(_Barrier(alive)))
        failpoints.hit_sync("store.prune.barrier.after")

    def _records(self) -> list[RecordView]:
        now = self._backend.now()
        found = []
        for entry in list(self._backend.list("condemned")):
            try:
                data = self._store.read_object(entry.name, fmt.KIND_CONDEMNED)
            except NotFound:
                continue
            record = msgspec.msgpack.decode(data, type=Condemned)
            path = _barrier_path(entry.name)
            barrier = self._backend.stat(path)
            alive: frozenset[str] | None = None
            if barrier is not None:
                data = self._store.read_object(path, fmt.KIND_PRUNE)
                alive = frozenset(msgspec.json.decode(data, type=_Barrier).leases)
            age = now - barrier.modified if barrier else 0.0
            found.append(RecordView(entry.name, record.generation, frozenset(record.packs), alive, age))
        return found

    def _barriers(self, records: list[RecordView], lease: Lease) -> list[RecordView]:
        """Complete the records of a run that died between condemning and writing down the leases."""
        for record in records:
            if record.leases is None:
                self._barrier(record.name, lease)
        return records

    def _sweep(self, lease: Lease, generation: int, ready: list[RecordView], gone: frozenset[str]) -> None:
        self._rewrite_indexes(lease, generation, gone)
        if not ready:
            return
        self._fence(lease, generation)
        failpoints.hit_sync("store.prune.packs.before")
        for pack in sorted(gone):
            self._backend.delete(f"packs/{pack}")
        failpoints.hit_sync("store.prune.packs.after")
        failpoints.hit_sync("store.prune.record.before")
        for record in ready:
            self._backend.delete(record.name)
            self._backend.delete(_barrier_path(record.name))
        failpoints.hit_sync("store.prune.record.after")
        self._store.index.refresh()

    def _rewrite_indexes(self, lease: Lease, generation: int, gone: frozenset[str]) -> None:
        """New index objects without the packs ``gone``, then the old ones away. Merges small ones if there are many."""
        entries = {entry.name: entry for entry in self._backend.list("index")}
        objects = self._store.index.objects
        old = {name for name, packs in objects.items() if not gone.isdisjoint(packs)}
        if len(entries) > _MERGE_FROM:
            old |= {name for name, entry in entries.items() if entry.size < _SMALL_INDEX and name in objects}
        if not old:
            return
        self._fence(lease, generation)
        records: dict[str, PackRecord] = {}
        for name in sorted(old):
            data = self._store.read_object(name, fmt.KIND_INDEX)
            for record in msgspec.msgpack.decode(data, type=IndexObject).packs:
                if record.pack not in gone:
                    records[record.pack] = record
        failpoints.hit_sync("store.prune.index.before")
        fresh = {self._store.put_index(part) for part in _by_size(records.values())}
        for name in sorted(old - fresh):
            self._backend.delete(name)
        failpoints.hit_sync("store.prune.index.after")

    def _tidy(self, generation: int, protect_after: float) -> None:
        """Remove leftovers that nothing refers to."""
        for entry in list(self._backend.list("tmp")):
            if entry.modified <= protect_after:
                self._backend.delete(entry.name)
        for entry in list(self._backend.list("prunes")):
            name = _name(entry.name)
            if name.isdigit() and int(name) < generation:
                self._backend.delete(entry.name)
        if isinstance(self._store.leases, FileLeases):
            for expired in self._store.leases.expired():
                self._backend.delete(expired)

    def confirm(self, global_manifest: str) -> None:
        """See `Store.confirm`."""
        lease = self._store.leases.acquire("write", f"confirm {global_manifest[:12]}", [global_manifest])
        try:
            self._store.index.refresh()
            chunks: dict[bytes, int] = {}
            try:
                for pod in self._store.read_global_manifest(global_manifest).pods:
                    for _, _, content in self._store.read_pod_manifest(pod).contents():
                        chunks.update((chunk.name, chunk.length) for chunk in content.chunks if chunk.name)
            except NotFound as error:
                raise CorruptData(
                    f"{error.message}: it was pruned before the commit", "take a new checkpoint"
                ) from None
            index = self._store.index
            for pack in self._packs_of(chunks):
                if self._backend.stat(f"packs/{pack}") is None:
                    raise CorruptData(f"pack {pack} was pruned before the commit", "take a new checkpoint")
            for name in chunks:
                if index.locate(name) is None:
                    raise CorruptData(f"chunk {name.hex()} was pruned before the commit", "take a new checkpoint")
            self.copy_chunks(lease, {name: size for name, size in chunks.items() if not index.reusable(name)})
        finally:
            lease.close()


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _claim_path(generation: int) -> str:
    return f"prunes/{generation:016d}"


def _barrier_path(record: str) -> str:
    return f"prunes/{_name(record)}.barrier"


def _batches(pieces: list[Piece], size: int = 64) -> Iterator[list[Piece]]:
    for start in range(0, len(pieces), size):
        yield pieces[start : start + size]


def _by_size(records: Iterable[PackRecord]) -> Iterator[list[PackRecord]]:
    """Records in groups of about `_INDEX_SIZE` bytes."""
    part: list[PackRecord] = []
    size = 0
    for record in records:
        part.append(record)
        size += len(record.entries)
        if size >= _INDEX_SIZE:
            yield part
            part, size = [], 0
    if part:
        yield part
