"""The store as its users see it. See the package's docstring for the invariants."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moorage import failpoints
from moorage.errors import Conflict, CorruptData, NotFound, UsageError
from moorage.store import chunker, config, manifests
from moorage.store import format as fmt
from moorage.store.backend import Backend
from moorage.store.check import CheckResult, Usage, check, usage
from moorage.store.codec import Rate
from moorage.store.copying import confirm
from moorage.store.index import ChunkIndex, IndexObject, PackRecord
from moorage.store.keys import StoreKey
from moorage.store.leases import FileLeases, LeaseKeeper
from moorage.store.manifests import Content, GlobalManifest, PodManifest
from moorage.store.packs import PackSet
from moorage.store.patch import Patcher
from moorage.store.prune import Pruner, PruneResult, Terms, wait_for_rival
from moorage.store.reader import Reader
from moorage.store.rebuild import Rebuilt, rebuild
from moorage.store.writer import Writer
from moorage.store_settings import StoreSettings, WrappingKey, wrapping_key

failpoints.declare(
    *(f"store.{what}.{when}" for what in ("manifest.pod", "manifest.global", "object") for when in ("before", "after"))
)

_BLOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HINTS = {fmt.KIND_POD: "use an earlier checkpoint", fmt.KIND_GLOBAL: "use an earlier checkpoint"}


class Store:
    """One store, opened. Thread-safe and synchronous: call it through `asyncio.to_thread`."""

    def __init__(self, backend: Backend, settings: config.StoreConfig, key: StoreKey, leases: LeaseKeeper) -> None:
        self.settings = settings
        self.location = backend.location
        self.nonce = settings.nonce
        self.backend = backend
        self.leases = leases
        self.key = key
        self.index = ChunkIndex(backend, self.read_object)
        self.reader = Reader(backend, self.index, key, bytes.fromhex(settings.nonce))
        self._patcher = Patcher(key)
        self._marker = chunker.Marker(key.boundaries)
        # Guesses until the first pack has been written and the first chunk compressed.
        self._rates = Rate(400e6), Rate(500e6)

    @classmethod
    def open(
        cls,
        location: str,
        *,
        create: bool = False,
        leases: LeaseKeeper | None = None,
        settings: StoreSettings | None = None,
        key: WrappingKey | None = None,
    ) -> Store:
        """Open the store at ``location``: ``/path``, ``file:///path`` or ``s3://bucket/prefix``.

        ``create``: make it if there is none. ``key``: for a process whose settings name none.

        Raises `NotFound` (no store there), `NewerVersion`, `UsageError`,
        `EnvironmentLacking` (no rights, no such storage, not the right key), `CorruptData`, `Unavailable`.
        """
        settings = settings or StoreSettings()
        wrapping = wrapping_key(settings)
        if wrapping is None and key is not None:
            wrapping = key.key
        backend = config.backend_of(location, settings)
        if create:
            config.create(backend, wrapping)
        found, own = config.load(backend, wrapping)
        return cls(backend, found, own, leases or FileLeases(backend, own.sealer))

    def anew(self) -> Store:
        """The same store with nothing of its index in memory."""
        return Store(self.backend, self.settings, self.key, self.leases)

    def writer(self, *, label: str, threads: int | None = None, nice: int = 5) -> Writer:
        """Begin to write one pod's data; ``label`` names it in leases and errors.

        At most ``threads`` threads (default: one for each two cores, at most 2) work at nice value ``nice``, since the
        job may be running beside. Raises `Unavailable`, `NoCapacity`, `CorruptData`.
        """
        lease = self.leases.acquire("write", label)
        try:
            # Only now: prune lists the leases after it has condemned, so it waits for this writer, or this writer
            # sees what is condemned.
            self.index.verify()
            packs = PackSet(self.backend, self.key, bytes.fromhex(self.nonce), lease.info.id, self._rates[0])
            count = threads or max(1, min(2, (os.cpu_count() or 1) // 2))
            cutting = (self._marker, self._patcher)
            return Writer(packs, self.index, lease, cutting, self.put_index, self._rates, threads=count, nice=nice)
        except BaseException:
            lease.close()
            raise

    def free_bytes(self) -> int:
        """Bytes that can still be written."""
        return self.backend.free_bytes()

    # Manifests

    def write_pod_manifest(self, manifest: PodManifest) -> str:
        """Store it; its chunks must be durable already (`Writer.finish`). Returns its name, 64 hex digits."""
        failpoints.hit_sync("store.manifest.pod.before")
        name = self._put_named("pods", fmt.KIND_POD, manifests.encode(manifest))
        failpoints.hit_sync("store.manifest.pod.after")
        return name

    def name_of(self, manifest: GlobalManifest) -> str:
        """The name that it would have in this store."""
        return self.key.object_digest(fmt.KIND_GLOBAL, manifests.encode(manifest)).hex()

    def has_pod_manifest(self, name: str) -> bool:
        """Whether it is in the store. Raises `Unavailable`."""
        return self.backend.stat(f"pods/{name}") is not None

    def write_global_manifest(self, manifest: GlobalManifest) -> str:
        """Store it; its pod manifests must be there already. Returns its name. Raises `NotFound` if one is not."""
        for pod in manifest.pods:
            if self.backend.stat(f"pods/{pod}") is None:
                raise NotFound(f"pod manifest {pod} is not in {self.location}", "the attempt must be repeated")
        failpoints.hit_sync("store.manifest.global.before")
        name = self._put_named("checkpoints", fmt.KIND_GLOBAL, manifests.encode(manifest))
        failpoints.hit_sync("store.manifest.global.after")
        return name

    def read_pod_manifest(self, name: str) -> PodManifest:
        """Read and verify. Raises `NotFound`, `CorruptData`, `NewerVersion`."""
        data = self._get_named("pods", fmt.KIND_POD, name)
        return manifests.decode(data, PodManifest, f"pod manifest {name}")

    def read_global_manifest(self, name: str) -> GlobalManifest:
        """Read and verify. Raises `NotFound`, `CorruptData`, `NewerVersion`."""
        data = self._get_named("checkpoints", fmt.KIND_GLOBAL, name)
        return manifests.decode(data, GlobalManifest, f"global manifest {name}")

    # Reading

    @contextmanager
    def protect(self, global_manifest: str, *, label: str) -> Iterator[GlobalManifest]:
        """Hold a reader's lease on a checkpoint: prune deletes nothing of it inside the block.

        Raises `NotFound` if it is not there (any more), `Unavailable` if a prune that may delete it does not end.
        """
        lease = self.leases.acquire("read", label, [global_manifest])
        try:
            wait_for_rival(self.leases, global_manifest)
            yield self.read_global_manifest(global_manifest)
        finally:
            lease.close()

    def read_file(self, entry: Content, target: Path | int, *, threads: int | None = None) -> None:
        """Write ``entry`` to a path or an open descriptor, verified and with holes for zeros. See `read_files`."""
        self.read_files([(entry, target)], threads=threads)

    def read_files(self, files: Sequence[tuple[Content, Path | int]], *, threads: int | None = None) -> None:
        """Write many contents in parallel. ``threads`` defaults to the number of cores.

        Raises `CorruptData` naming chunk and pack, `NoCapacity`, `Unavailable`; then the files at paths are removed.
        """
        self.reader.read_files(files, threads=threads or os.cpu_count() or 1)

    def read_bytes(self, entry: Content) -> bytes:
        """All of ``entry``, verified. Raises `CorruptData`."""
        return self.reader.read_bytes(entry)

    # Small named objects

    def put_object(self, name: str, data: bytes) -> None:
        """Store a small blob (an archived log) as ``name``. Raises `Conflict` if other data has that name."""
        path = _blob_path(name)
        failpoints.hit_sync("store.object.before")
        if not self.backend.put(path, self._encode(path, fmt.KIND_BLOB, data)) and self.get_object(name) != data:
            raise Conflict(f"object {name} exists already in {self.location}", "choose another name")
        failpoints.hit_sync("store.object.after")

    def get_object(self, name: str) -> bytes:
        """Read and verify. Raises `NotFound`, `CorruptData`."""
        return self.read_object(_blob_path(name), fmt.KIND_BLOB)

    def list_objects(self, prefix: str = "") -> list[str]:
        """Names that begin with ``prefix``, sorted."""
        names = (entry.name.removeprefix("objects/") for entry in self.backend.list("objects"))
        return sorted(name for name in names if name.startswith(prefix))

    def delete_object(self, name: str) -> bool:
        """False: there was none."""
        return self.backend.delete(_blob_path(name))

    # Care

    def check(
        self, global_manifest: str, *, read_data: bool, progress: Callable[[int, int], None] | None = None
    ) -> CheckResult:
        """Whether all that a checkpoint needs is there; ``read_data``: and every chunk matches its digest.

        ``progress(done, total)`` in bytes. Raises `NotFound`; damage is in the result, not raised.
        """
        return check(self, global_manifest, read_data=read_data, progress=progress)

    def confirm(self, global_manifest: str) -> None:
        """Make sure that prune will not delete what a finished but uncommitted checkpoint needs.

        To be called when the prune generation rose between the attempt's start and its commit, after the new
        generation was read: chunks that prune condemned meanwhile are copied to new packs. Raises `CorruptData` if
        something is gone; the attempt then has to be given up.
        """
        confirm(self, global_manifest)

    def condemned(self) -> frozenset[str]:
        """Names of the records of what earlier prunes have condemned: to be read before the generation is raised."""
        return frozenset(entry.name for entry in self.backend.list("condemned"))

    def prune(
        self,
        keep: Collection[str],
        *,
        generation: int,
        protect_after: float,
        dry_run: bool = False,
        condemned: Collection[str] | None = None,
        keep_pods: Collection[str] = (),
    ) -> PruneResult:
        """Delete what no checkpoint in ``keep`` (names of global manifests) needs.

        ``generation``: the number to which the caller has raised the prune generation in etcd *before* it read
        ``keep``. ``protect_after``: seconds since the epoch; what was written later is left alone. ``condemned``: what
        `condemned` said before the generation was raised; None: all that a lower generation has condemned, which is
        right as long as no prune was stopped and goes on. ``keep_pods``: pod
        manifests to keep that no global one names (yet). Space is freed in two calls: the first condemns, a later one
        (with a higher generation) deletes.
        Raises `Fenced` if that or a later generation has pruned already, `NotFound` if a kept manifest is missing.
        """
        terms = Terms(frozenset(keep), generation, protect_after, dry_run, condemned, frozenset(keep_pods))
        return Pruner(self, terms).run()

    def rebuild_index(self) -> Rebuilt:
        """Index again what no sound index object names, from the packs themselves, and remove damaged index objects.

        Beside running writers; not beside a prune. Raises `Unavailable`, `NoCapacity`.
        """
        return rebuild(self)

    def usage(self, global_manifest: str) -> dict[str, Usage]:
        """Bytes by kind of data of one checkpoint, plain and as stored, each chunk counted once. Raises `NotFound`."""
        return usage(self, global_manifest)

    # Objects, for the package's own modules

    def read_object(self, path: str, kind: int) -> bytes:
        """The verified payload of the object at ``path``."""
        where = f"{self.location}/{path}"
        try:
            payload, digest = fmt.decode_object(self.backend.get(path), kind, where, self.key.sealer, path)
        except CorruptData as error:
            raise CorruptData(error.message, error.hint or _HINTS.get(kind, "")) from error
        if digest != self.key.object_digest(kind, payload):
            raise CorruptData(f"{where} does not match its digest", _HINTS.get(kind, ""))
        return payload

    @property
    def write_rate(self) -> Rate:
        """How fast packs have lately been written."""
        return self._rates[0]

    def put_index(self, records: Sequence[PackRecord]) -> str:
        """Write an index object for packs that are durable, and take it in. Returns its path."""
        data = msgspec.msgpack.encode(IndexObject(packs=list(records)))
        name = self._put_named("index", fmt.KIND_INDEX, data)
        self.index.added(f"index/{name}", records)
        return f"index/{name}"

    def put_record(self, path: str, kind: int, data: bytes) -> bool:
        """Write a record at a path. False: it exists."""
        return self.backend.put(path, self._encode(path, kind, data))

    def _encode(self, path: str, kind: int, data: bytes) -> bytes:
        return fmt.encode_object(kind, data, self.key.id, self.key.object_digest(kind, data), self.key.sealer, path)

    def _put_named(self, folder: str, kind: int, data: bytes) -> str:
        name = self.key.object_digest(kind, data).hex()
        path = f"{folder}/{name}"
        encoded = self._encode(path, kind, data)
        # One that stands already must be sound, and counts as written now; prune may remove it in between.
        while not self.backend.put(path, encoded):
            if self.backend.touch(path):
                self._get_named(folder, kind, name)
                break
        return name

    def _get_named(self, folder: str, kind: int, name: str) -> bytes:
        if not _DIGEST.fullmatch(name):
            raise UsageError(f"{name!r} is not the name of a manifest")
        data = self.read_object(f"{folder}/{name}", kind)
        if self.key.object_digest(kind, data).hex() != name:
            raise CorruptData(f"{self.location}/{folder}/{name} does not match its name", _HINTS.get(kind, ""))
        return data


def _blob_path(name: str) -> str:
    if not _BLOB.fullmatch(name):
        raise UsageError(f"{name!r} cannot name an object", "letters, digits, dots, dashes, underscores and slashes")
    return f"objects/{name}"
