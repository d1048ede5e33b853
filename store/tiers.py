"""A worker's store where the real one is far away: a folder on the node first, then the bucket.

A capture goes into the local folder, which is a store of its own with the same key and nonce, and is whole by itself.
`TieredStore.upload` then brings a pod's checkpoint into the remote store, as any writer does: under a lease, only what
is not there, packs before index before manifest. So every promise of the remote store (see the package's
docstring) holds as if the pod had been written there; and what is on the node alone costs the job no time.

Reading looks in the folder first and fetches from the bucket what is not there, or not sound. The folder may be
deleted at any time: what was uploaded comes back from the bucket.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
from blake3 import blake3

from moorage import failpoints
from moorage.errors import AttemptAborted, Conflict, CorruptData, MoorageError, NotFound, Unavailable
from moorage.store import config
from moorage.store import format as fmt
from moorage.store.backend import Backend
from moorage.store.leases import FileLeases
from moorage.store.manifests import Content, PodManifest
from moorage.store.packs import PackSet, PackWriter
from moorage.store.posix import PosixBackend
from moorage.store.reader import Opened, Reader
from moorage.store.store import Store
from moorage.store.writer import Writer
from moorage.store_settings import StoreSettings, wrapping_key

failpoints.declare(
    *(f"upload.{what}.{when}" for what in ("packs", "index", "manifest") for when in ("before", "after"))
)

_log = structlog.get_logger(__name__)
_BATCH = 64
_FETCHERS = 8
_KEPT = 2  # uploaded checkpoints of each pod that stay in the folder
_FORGOTTEN_AFTER = 24 * 3600.0
_PENDING = "pending"
_LOCAL_FOLDERS = (*config.FOLDERS, _PENDING)


class _TieredReader(Reader):
    """From the folder; what is not there or not sound, from the bucket."""

    def __init__(self, local: Store, remote: Store) -> None:
        super().__init__(local.backend, local.index, local.key, bytes.fromhex(local.nonce))
        self._local_index = local.index
        self._remote = remote

    def groups(self, sizes: Mapping[bytes, int], *, again: bool = False) -> Iterator[list[Opened]]:
        here = {name: size for name, size in sizes.items() if self._local_index.locate(name) is not None}
        done: set[bytes] = set()
        try:
            for group in super().groups(here, again=again):
                done.update(opened.name for opened in group)
                yield group
        except (CorruptData, NotFound) as error:
            _log.info("read from the remote store instead", reason=error.message)
        if missing := {name: size for name, size in sizes.items() if name not in done}:
            yield from self._remote.reader.groups(missing)


class TieredStore(Store):
    """See the module. Of `Store`'s methods only those for writing and reading pods concern the folder."""

    def __init__(self, local: PosixBackend, remote: Store, settings: StoreSettings, label: str) -> None:
        super().__init__(local, remote.settings, remote.key, FileLeases(local, remote.key.sealer))
        self.location = remote.location
        self.remote = remote
        self._local = local
        self._cache_bytes = settings.cache_bytes
        self._label = label
        self.reader = _TieredReader(self, remote)

    @classmethod
    def open_tiers(
        cls, location: str, folder: Path, *, label: str, settings: StoreSettings | None = None
    ) -> TieredStore:
        """Open the remote store at ``location`` with local copies in ``folder``; ``label`` names the node in leases.

        Where the remote store does not answer, what the folder remembers of it is enough to begin. Raises what
        `Store.open` raises, and `Conflict` when the folder belongs to another store.
        """
        settings = settings or StoreSettings()
        wrapping = wrapping_key(settings)
        backend = config.backend_of(location, settings)
        local = PosixBackend(folder / blake3(location.encode()).hexdigest()[:16])
        try:
            found, key = config.load(backend, wrapping)
        except Unavailable as error:
            if local.stat("config") is None:
                raise
            _log.warning("the remote store does not answer; what the node remembers of it is used", reason=str(error))
            found, key = config.load(local, wrapping)
        tiers = cls(local, Store(backend, found, key, FileLeases(backend, key.sealer)), settings, label)
        tiers._remember(backend, found, wrapping)
        return tiers

    def _remember(self, backend: Backend, found: config.StoreConfig, wrapping: bytes | None) -> None:
        self._local.make_folders(_LOCAL_FOLDERS)
        key = f"keys/{found.key}" if wrapping is None else config.wrapped_name(found, wrapping)
        if self._local.stat("config") is not None and config.read_config(self._local).nonce != found.nonce:
            raise Conflict(
                f"{self._local.location} holds copies of another store that was at {self.location}",
                "if that one is gone for good, delete the folder",
            )
        for name in (key, "config"):
            if self._local.stat(name) is None:
                with contextlib.suppress(Unavailable):
                    self._local.put(name, backend.get(name))

    # Writing

    def writer(self, *, label: str, threads: int | None = None, nice: int = 5) -> Writer:
        """As `Store.writer`, into the folder."""
        self._local.make_folders(_LOCAL_FOLDERS)  # somebody may have deleted it
        writer = super().writer(label=label, threads=threads, nice=nice)
        writer.elsewhere = self._in_remote
        return writer

    def _in_remote(self, name: bytes) -> bool:
        try:
            return self.remote.index.locate(name) is not None
        except Unavailable:
            return True  # it was; the upload will tell

    def free_bytes(self) -> int:
        """Bytes that can still be written to the folder."""
        self._local.make_folders(_LOCAL_FOLDERS)
        return super().free_bytes()

    def mark_pending(self, pod: str) -> None:
        """Write down that the pod's checkpoint counts as stored and still has to be uploaded."""
        self._local.put(f"{_PENDING}/{pod}", b"")

    def pending(self) -> list[str]:
        """Pod manifests that are still to be uploaded, oldest first."""
        entries = sorted(self._local.list(_PENDING), key=lambda entry: entry.modified)
        return [entry.name.rpartition("/")[2] for entry in entries]

    def give_up(self, pod: str) -> None:
        """Do not try to upload it any more."""
        self._local.delete(f"{_PENDING}/{pod}")

    def upload(
        self,
        pod: str,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Bring a pod's checkpoint into the remote store; returns the bytes that it took there.

        ``progress(done, total)`` in plain bytes of chunks. Raises `AttemptAborted` (``cancelled``), `NotFound` (it
        is not in the folder), `CorruptData`, `NoCapacity`, `EnvironmentLacking`, `Unavailable`. It may be called again.
        """
        manifest = super().read_pod_manifest(pod)
        remote = self.remote
        lease = remote.leases.acquire("write", f"{self._label} uploads {manifest.job} pod {manifest.pod}")
        try:
            remote.index.refresh()
            chunks = dict(manifest.chunks())
            wanted = {name: size for name, size in chunks.items() if not remote.index.reusable(name)}
            packs = PackSet(remote.backend, self.key, bytes.fromhex(self.nonce), lease.info.id, remote.write_rate)
            stored = 0
            done, total = sum(chunks.values()) - sum(wanted.values()), sum(chunks.values())
            try:
                failpoints.hit_sync("upload.packs.before")
                writer = PackWriter(packs)
                for batch in self._batches(wanted):
                    if cancelled():
                        raise AttemptAborted("the attempt is over")
                    for group in self.reader.groups(batch):
                        for _, header, data, _ in group:
                            writer.add(header, data)
                            stored += len(data) + fmt.CHUNK_HEADER
                        writer.flush()  # what was read is only valid until the next read
                    done += sum(batch.values())
                    progress(done, total)
                writer.close()
                records = packs.finish()
                if not lease.valid():
                    raise Unavailable("the lease in the remote store could not be renewed in time", "try again")
                failpoints.hit_sync("upload.packs.after")
            except BaseException:
                packs.abort()
                raise
            if records:
                failpoints.hit_sync("upload.index.before")
                remote.put_index(records)
                failpoints.hit_sync("upload.index.after")
            failpoints.hit_sync("upload.manifest.before")
            remote.write_pod_manifest(manifest)
            failpoints.hit_sync("upload.manifest.after")
            self._local.delete(f"{_PENDING}/{pod}")
            return stored
        finally:
            lease.close()

    def _batches(self, wanted: dict[bytes, int]) -> Iterator[dict[bytes, int]]:
        """In the order in which the chunks lie in the folder; first those that are not there."""
        places = [(self.index.locate(name), name) for name in wanted]
        order = [name for place, name in places if place is None]
        order += [name for _, name in sorted((place, name) for place, name in places if place is not None)]
        for start in range(0, len(order), _BATCH):
            yield {name: wanted[name] for name in order[start : start + _BATCH]}

    # Reading

    def read_pod_manifest(self, name: str) -> PodManifest:
        """As `Store.read_pod_manifest`, from the folder or from the remote store."""
        try:
            return super().read_pod_manifest(name)
        except (NotFound, CorruptData):
            return self.remote.read_pod_manifest(name)

    def read_files(self, files: Sequence[tuple[Content, Path | int]], *, threads: int | None = None) -> None:
        """As `Store.read_files`, with more threads: what the folder lacks comes over the network, side by side."""
        super().read_files(files, threads=threads or max(_FETCHERS, os.cpu_count() or 1))

    # What has nothing to do with the folder

    def put_object(self, name: str, data: bytes) -> None:
        """As `Store.put_object`, in the remote store."""
        self.remote.put_object(name, data)

    def get_object(self, name: str) -> bytes:
        """As `Store.get_object`, from the remote store."""
        return self.remote.get_object(name)

    # Care of the folder

    def tidy(self) -> None:
        """Delete from the folder what is uploaded and not among the newest of its pod; frees space at a later call."""
        pending = set(self.pending())
        found: dict[tuple[str, int], list[tuple[float, str]]] = {}
        for entry in self._local.list("pods"):
            name = entry.name.rpartition("/")[2]
            try:
                manifest = super().read_pod_manifest(name)
            except MoorageError:
                continue
            found.setdefault((manifest.job, manifest.pod), []).append((entry.modified, name))
        crowded = sum(entry.size for entry in self._local.list("packs")) > self._cache_bytes
        since = time.time() - _FORGOTTEN_AFTER
        kept = 1 if crowded else _KEPT
        keep = {name for versions in found.values() for at, name in sorted(versions)[-kept:] if at > since}
        generations = [entry.name.rpartition("/")[2] for entry in self._local.list("prunes")]
        newest = max((int(name) for name in generations if name.isdigit()), default=0)
        self.prune((), generation=newest + 1, protect_after=time.time() - 60, keep_pods=keep | pending)


def open_for_node(location: str, folder: Path, *, label: str, settings: StoreSettings | None = None) -> Store:
    """The store as a worker uses it: with copies in ``folder`` where it is remote. Raises what `Store.open` raises."""
    if config.remote(location):
        return TieredStore.open_tiers(location, folder, label=label, settings=settings)
    return Store.open(location, settings=settings)
