"""`PodLayers`: one pod's root file system in one folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moorage.worker.layers.capture import LayerCapture
from moorage.worker.layers.changes import Change
from moorage.worker.layers.index import CaptureIndex
from moorage.worker.layers.parts import FilePiece
from moorage.worker.layers.writeback import WriteBack

if TYPE_CHECKING:
    from moorage.store.manifests import Content

Fetch = Callable[["Content", Path], None]


class LayerBind(msgspec.Struct, frozen=True):
    """A bind mount that the OCI configuration must hold (an external mount for CRIU). ``key`` is stable over moves."""

    source: Path  # on this host
    destination: str  # absolute path in the pod
    key: str


class PodLayers:
    folder: Path
    working_directory: str

    @classmethod
    def plan(
        cls,
        folder: Path,
        *,
        image: Path | None,
        working_directory: str,
        interpreters: Sequence[str] = (),
        user_mounts: Sequence[str] = (),
        hidden: Sequence[Path] = (),
    ) -> PodLayers:
        """Layers of a pod that starts afresh. Writes ``layers.json`` into ``folder``; mounts nothing.

        ``interpreters``: absolute host paths that the pod needs (argv[0], its resolved target, its prefix).
        ``user_mounts``: destinations of ``--mount``. ``hidden``: host folders that no pod may see (state, store, keys).
        Raises `UsageError` (the working directory is hidden or absent), `EnvironmentLacking`.
        """
        raise NotImplementedError

    @classmethod
    def from_tree(
        cls,
        folder: Path,
        tree: bytes,
        *,
        image: Path | None,
        user_mounts: Sequence[str] = (),
        hidden: Sequence[Path] = (),
    ) -> PodLayers:
        """The same layers as saved in ``tree``. Raises `Incompatible` if this host lacks a mount point's folder."""
        raise NotImplementedError

    @classmethod
    def load(cls, folder: Path) -> PodLayers:
        """What an earlier process planned in ``folder``. Raises `NotFound`."""
        raise NotImplementedError

    @property
    def root(self) -> Path:
        """Where the root file system is mounted: the OCI ``root.path``."""
        raise NotImplementedError

    @property
    def binds(self) -> tuple[LayerBind, ...]:
        """Bind mounts for the OCI configuration, parents first."""
        raise NotImplementedError

    @property
    def mounted(self) -> bool:
        raise NotImplementedError

    def mount(self) -> None:
        """Mount all overlays. Idempotent. Raises `EnvironmentLacking`."""
        raise NotImplementedError

    def unmount(self) -> None:
        """Unmount all overlays, lazily if something still holds them. Idempotent."""
        raise NotImplementedError

    def remove(self) -> None:
        """Unmount, then delete upper, work and merged (not the rest of ``folder``). Idempotent."""
        raise NotImplementedError

    def put(self, path: str, data: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
        """Write a file of the mounted root before the pod starts, replacing what is there (a symlink too)."""
        raise NotImplementedError

    def make_folder(self, path: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        """Create a folder and its parents in the mounted root, if absent."""
        raise NotImplementedError

    def write_identity(self, *, hostname: str, hosts: str, resolv_conf: str) -> None:
        """Write ``/etc/hostname``, ``/etc/hosts`` and ``/etc/resolv.conf``."""
        raise NotImplementedError

    def capture(
        self, staging: Path, previous: CaptureIndex | None, forced: Collection[tuple[int, int]] = ()
    ) -> LayerCapture:
        """Copy what changed since ``previous`` into ``staging``. The pod must be frozen. Never writes to a layer.

        ``forced``: what `mapped_shared_writable` gave. Use an index only when the attempt that made it was committed,
        or the store's generation has not changed since: prune may drop the chunks of an attempt that was not.
        Raises `NoCapacity` (nothing is left in ``staging``), `Refused` (something that cannot be saved).
        """
        raise NotImplementedError

    def restore(self, tree: bytes, contents: Mapping[str, Content], fetch: Fetch, *, threads: int = 8) -> CaptureIndex:
        """Fill the empty uppers from ``tree``; ``contents`` is the pod manifest's ``layer_files``.

        ``fetch(content, path)`` writes one content into an existing empty file; it is called from several threads.

        Call before `mount`. Raises `CorruptData`, `NoCapacity`, `Conflict` (an upper is not empty).
        """
        raise NotImplementedError

    def changed_below(self, path: str = "") -> Iterator[Change]:
        """What the pod created, modified or deleted below ``path`` (default: the working directory), parents first."""
        raise NotImplementedError

    def write_back(
        self,
        target: Path | None = None,
        *,
        uid: int,
        gid: int,
        groups: Sequence[int] = (),
        job: str,
        pod: int,
    ) -> WriteBack:
        """Bring what changed below the working directory to the host's folder ``target``, as ``uid``.

        A file that the host changed since the job started is left alone; the pod's is written beside it as
        ``NAME.moorage-<job>-<pod>``. Symlinks are never followed. Failures of single files are in the report.
        """
        raise NotImplementedError

    def iter_parts(self, path: str = "") -> Iterator[FilePiece]:
        """Files at ``path`` (absolute, or below the working directory; empty: all that changed below it), in pieces
        of at most 1 MiB. Safe beside a running pod: no symlink leads out of it. Raises `NotFound`, `UsageError`.
        """
        raise NotImplementedError
