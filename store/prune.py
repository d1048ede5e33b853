"""Prune: delete what no checkpoint needs, beside running writers and readers. The package's docstring proves it safe.

One run: claim the generation; find what is live; copy live chunks out of condemned and out of mostly empty packs;
condemn packs and manifests that are not live; write down who holds a lease now; delete what an earlier run has
condemned. It may die between any two steps; the next run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import structlog

from moorage import failpoints
from moorage.errors import CorruptData, Fenced, NoCapacity, NotFound, Unavailable
from moorage.store import condemned
from moorage.store import format as fmt
from moorage.store.copying import copy_chunks
from moorage.store.leases import TTL_SECONDS, FileLeases, Lease, LeaseKeeper
from moorage.store.plan import PackView, deletable, plan_packs

if TYPE_CHECKING:
    from moorage.store.store import Store

_log = structlog.get_logger(__name__)

failpoints.declare("store.prune.claim.before", "store.prune.claim.after")


class PruneResult(NamedTuple):
    """What a run did, or with ``dry_run`` would do. Sizes in bytes.

    What is condemned is deleted in a later run, with a higher generation. ``bytes_pending`` were condemned earlier and
    wait for that, for a lease, or for the settling time of a network file system.
    """

    manifests_deleted: int
    manifests_condemned: int
    packs_deleted: int
    bytes_freed: int
    packs_condemned: int
    bytes_condemned: int
    bytes_pending: int
    bytes_copied: int
    problems: list[str]


class _Live(NamedTuple):
    chunks: dict[bytes, int]  # name -> length
    manifests: set[str]  # paths


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


class Terms(NamedTuple):
    """What a run was told: the arguments of `Store.prune`."""

    keep: frozenset[str]
    generation: int
    protect_after: float
    dry_run: bool
    condemned: Collection[str] | None
    keep_pods: frozenset[str] = frozenset()


class Pruner:
    """One run over one store."""

    def __init__(self, store: Store, terms: Terms) -> None:
        self._store = store
        self._backend = store.backend
        self._terms = terms
        self._problems: list[str] = []

    def run(self) -> PruneResult:
        """See `Store.prune`."""
        lease = self._store.leases.acquire("prune", f"prune {self._terms.generation}", sorted(self._terms.keep))
        try:
            if not self._terms.dry_run:
                self._claim()
            return self._run(lease)
        finally:
            lease.close()

    def _run(self, lease: Lease) -> PruneResult:
        # The order of these three matters: a writer's packs are listed, its lease was seen or is gone, and if it is
        # gone its index object is there.
        packs = {entry.name: entry for entry in self._backend.list("packs")}
        leases = [info for info in self._store.leases.active() if info.id != lease.info.id]
        index = self._store.index
        index.refresh()
        for message in index.damaged.values():
            raise CorruptData(
                message, "nothing was deleted; make a new one from the packs: moorage store rebuild-index"
            )
        live = self._live(self._terms.keep.union(*(info.roots for info in leases if info.role != "prune")))
        already = index.condemned
        dead = [path for path in self._old_manifests() if path not in live.manifests and path not in already]

        used = self._used(live.chunks)
        views = [
            PackView(name.removeprefix("packs/"), e.size, e.modified, used.get(name, 0), name in already)
            for name, e in packs.items()
        ]
        plan = plan_packs(views, protect_after=self._terms.protect_after, owners={info.id for info in leases})
        doomed = plan.garbage + plan.repack
        # Chunks that are only in condemned packs: what holds them must stay until they are copied.
        stranded = {name: size for name, size in live.chunks.items() if not index.reusable(name)}
        needed = self._packs_of(stranded)
        copied = sum(pack.used for pack in plan.repack)
        records = condemned.records(self._store)
        if not self._terms.dry_run:
            try:
                copied = copy_chunks(self._store, lease, stranded | self._inside(plan.repack, live.chunks))
                needed = set()
            except NoCapacity as error:
                _log.warning("no room to copy live chunks; pruning goes on without", error=str(error))
                copied, doomed = 0, plan.garbage
            self._fence(lease)
            condemned.condemn(self._store, lease, self._terms.generation, dead)
            condemned.condemn(self._store, lease, self._terms.generation, (f"packs/{pack.name}" for pack in doomed))
            for record in records:
                if record.leases is None:  # its run died before it wrote down the leases
                    condemned.put_barrier(self._store, lease, record.name)
        known = self._terms.condemned
        ready = deletable(
            [record for record in records if known is None or record.name in known],
            generation=self._terms.generation,
            active={info.id for info in (*leases, *self._store.leases.active())} - {lease.info.id},
            settle=2 * self._backend.settle_seconds,
            needed=needed | live.manifests,
        )
        gone = {path for record in ready for path in record.objects}
        waiting = {path for record in records for path in record.objects} - gone
        if not self._terms.dry_run:
            condemned.delete(self._store, ready, lambda: self._fence(lease))
            self._tidy()
        return PruneResult(
            manifests_deleted=sum(not path.startswith("packs/") for path in gone),
            manifests_condemned=len(dead),
            packs_deleted=len(gone & packs.keys()),
            bytes_freed=sum(packs[path].size for path in gone & packs.keys()),
            packs_condemned=len(doomed),
            bytes_condemned=sum(pack.size for pack in doomed),
            bytes_pending=sum(packs[path].size for path in waiting & packs.keys()),
            bytes_copied=copied,
            problems=self._problems,
        )

    def _claim(self) -> None:
        failpoints.hit_sync("store.prune.claim.before")
        data = msgspec.json.encode(sorted(self._terms.keep))
        mine = self._store.put_record(f"prunes/{self._terms.generation:016d}", fmt.KIND_PRUNE, data)
        failpoints.hit_sync("store.prune.claim.after")
        if not mine or self._newest_claim() > self._terms.generation:
            raise Fenced(
                f"prune generation {self._terms.generation} has been used already", "raise the generation and try again"
            )

    def _newest_claim(self) -> int:
        names = (entry.name.rpartition("/")[2] for entry in self._backend.list("prunes"))
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def _fence(self, lease: Lease) -> None:
        if not lease.valid() or self._newest_claim() > self._terms.generation:
            raise Fenced(f"prune generation {self._terms.generation} was overtaken", "nothing is lost; run prune again")

    def _old_manifests(self) -> list[str]:
        entries = [*self._backend.list("checkpoints"), *self._backend.list("pods")]
        return [entry.name for entry in entries if entry.modified <= self._terms.protect_after]

    def _live(self, roots: frozenset[str]) -> _Live:
        """All manifests that are kept, rooted or recent, and all chunks that they need.

        Raises `NotFound`, `CorruptData`.
        """
        recent = [e.name for e in self._backend.list("checkpoints") if e.modified > self._terms.protect_after]
        pods = {e.name: False for e in self._backend.list("pods") if e.modified > self._terms.protect_after}
        pods.update((f"pods/{name}", False) for name in self._terms.keep_pods)
        manifests = {f"checkpoints/{name}" for name in roots}.union(recent)
        for path in sorted(manifests):
            name = path.removeprefix("checkpoints/")
            try:
                pods.update((f"pods/{pod}", True) for pod in self._store.read_global_manifest(name).pods)
            except NotFound:
                if name in self._terms.keep:
                    raise NotFound(
                        f"checkpoint manifest {name} should be kept but is missing",
                        "put it back from a copy, or forget its checkpoint; nothing was deleted",
                    ) from None
        chunks: dict[bytes, int] = {}
        for path, required in pods.items():
            try:
                chunks.update(self._store.read_pod_manifest(path.removeprefix("pods/")).chunks())
            except NotFound:
                if required:
                    self._problems.append(f"manifest {path} is missing")
        return _Live(chunks, manifests.union(pods))

    def _used(self, chunks: Iterable[bytes]) -> dict[str, int]:
        """Bytes of live chunks for each pack (by path)."""
        used: dict[str, int] = {}
        for name in chunks:
            place = self._store.index.locate(name)
            if place is None:
                self._problems.append(f"chunk {name.hex()} is in no index")
            else:
                path = f"packs/{place.pack}"
                used[path] = used.get(path, 0) + place.stored + fmt.CHUNK_HEADER
        return used

    def _packs_of(self, names: Iterable[bytes]) -> set[str]:
        places = (self._store.index.locate(name) for name in names)
        return {f"packs/{place.pack}" for place in places if place is not None}

    def _inside(self, packs: list[PackView], chunks: dict[bytes, int]) -> dict[bytes, int]:
        """Those of ``chunks`` that lie in one of ``packs``."""
        wanted = {pack.name for pack in packs}
        if not wanted:
            return {}
        locate = self._store.index.locate
        return {name: size for name, size in chunks.items() if (p := locate(name)) is not None and p.pack in wanted}

    def _tidy(self) -> None:
        """Remove leftovers that nothing refers to."""
        for entry in list(self._backend.list("tmp")):
            if entry.modified <= self._terms.protect_after:
                self._backend.delete(entry.name)
        for entry in list(self._backend.list("prunes")):
            name = entry.name.rpartition("/")[2]
            old = name.isdigit() and int(name) < self._terms.generation
            # A barrier is written after its record and removed after it.
            orphan = not name.isdigit() and not self._backend.stat(f"condemned/{name.removesuffix('.barrier')}")
            if old or orphan:
                self._backend.delete(entry.name)
        if isinstance(self._store.leases, FileLeases):
            for expired in self._store.leases.expired():
                self._backend.delete(expired)
