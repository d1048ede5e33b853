"""`PodLayers`: one pod's root file system in one folder.

``folder/upper``, ``work`` and ``merged`` belong to the root's overlay, ``folder/mounts/<name>/…`` to those of host
mounts; ``folder/layers.json`` says what they are.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path

import msgspec

from moorage.errors import Conflict, Incompatible, NotFound
from moorage.store.manifests import Content
from moorage.worker.layers.capture import LayerCapture, capture
from moorage.worker.layers.changes import Change, compare, sides_at
from moorage.worker.layers.hostmounts import below, mount_of, points_of, read_mounts
from moorage.worker.layers.index import CaptureIndex
from moorage.worker.layers.layer import ROOT, Layer, carried
from moorage.worker.layers.names import names_of
from moorage.worker.layers.overlay import is_mounted, mount_overlay, unmount_overlay
from moorage.worker.layers.owner import Owner, acting_as
from moorage.worker.layers.parts import FilePiece, pieces_at, pieces_of_changes
from moorage.worker.layers.populate import hide, make_folder, put_file, start_like
from moorage.worker.layers.restore import Fetch, restore
from moorage.worker.layers.state import Planned, State, boot_id
from moorage.worker.layers.tree import Tree, decode_tree
from moorage.worker.layers.view import PodView
from moorage.worker.layers.walk import remove_tree
from moorage.worker.layers.writeback import WriteBack, bring_up, write_back


class LayerBind(msgspec.Struct, frozen=True):
    """A bind mount that the OCI configuration must hold (an external mount for CRIU). ``key`` is stable over moves."""

    source: Path  # on this host
    destination: str  # absolute path in the pod
    key: str


class PodLayers:
    """Make one with `plan`, `from_tree` or `load`. Methods block; none may run beside another of the same pod, but for
    `iter_parts` and `changed_below`.
    """

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder.resolve()
        self._state = state
        self._layers = tuple(state.layer(planned, self.folder) for planned in state.layers)
        roots = {layer.mountpoint: layer.merged for layer in self._layers}
        self._view = PodView(roots, state.live)

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
        owner: Owner | None = None,
    ) -> PodLayers:
        """Layers of a pod that starts afresh. Writes ``layers.json`` into ``folder``; mounts nothing.

        ``interpreters``: absolute host paths that the pod needs (argv[0], the interpreter, its prefix).
        ``user_mounts``: destinations of ``--mount``. ``hidden``: host folders that no pod may see (state, store, keys).
        ``owner``: with whose rights the working directory and ``interpreters`` are looked for, so that no answer tells
        him of what he could not see himself; else with all that this process has.
        Raises `UsageError` (the working directory is hidden or absent), `Forbidden` (the owner may not reach it).
        """
        live = tuple(path.rstrip("/") for path in user_mounts)
        secret = [os.path.realpath(path) for path in hidden]
        with acting_as(owner) if owner is not None else nullcontext():
            points = points_of(image, working_directory, interpreters, live, secret)
        return cls._prepared(folder, image, points, working_directory, live, hidden, time.time_ns())

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
        saved = decode_tree(tree)
        points = [layer.mountpoint for layer in saved.layers if layer.name != ROOT]
        for point in points:
            if not Path(point).is_dir():
                raise Incompatible(
                    f"the pod needs the folder {point}, which this node does not have", "restore it on a node that has"
                )
        live = tuple(path.rstrip("/") for path in user_mounts)
        return cls._prepared(folder, image, points, saved.working_directory, live, hidden, saved.started_ns)

    @classmethod
    def _prepared(
        cls,
        folder: Path,
        image: Path | None,
        points: Sequence[str],
        working_directory: str,
        live: tuple[str, ...],
        hidden: Sequence[Path],
        started_ns: int,
    ) -> PodLayers:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = [os.path.realpath(path) for path in (*hidden, folder)]
        root = str(image.resolve()) if image is not None else "/"
        planned = [Planned(ROOT, "/", root, _hidden_below(root, secret))]
        planned += [Planned(_name(point), point, point, _hidden_below(point, secret)) for point in points]
        state = State(
            working_directory=working_directory,
            live=live,
            started_ns=started_ns,
            boot=boot_id(),
            layers=tuple(planned),
        )
        layers = cls(folder, state)
        for layer in layers._layers:
            for path in (layer.upper, layer.work, layer.merged):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            start_like(layer.lower, layer.upper)
        state.save(layers.folder)
        return layers

    @classmethod
    def load(cls, folder: Path) -> PodLayers:
        """What an earlier process planned in ``folder``. Raises `NotFound`, `CorruptData`, `NewerVersion`."""
        return cls(folder, State.read(folder))

    @property
    def working_directory(self) -> str:
        """Absolute path in the pod, as the user gave it."""
        return self._state.working_directory

    @property
    def root(self) -> Path:
        """Where the root file system is mounted: the OCI ``root.path``."""
        return self._layers[0].merged

    @property
    def upper(self) -> Path:
        """The upper layer of the root file system: what is written there before `mount` is in the pod."""
        return self._layers[0].upper

    @property
    def binds(self) -> tuple[LayerBind, ...]:
        """Bind mounts for the OCI configuration, parents first."""
        return tuple(LayerBind(layer.merged, layer.mountpoint, layer.name) for layer in self._layers[1:])

    @property
    def mounted(self) -> bool:
        """Whether all overlays are mounted."""
        return all(is_mounted(layer) for layer in self._layers)

    def mount(self, image: int | None = None) -> None:
        """Mount all overlays. Idempotent. Raises `EnvironmentLacking`; `CorruptData` after a crash of the host.

        ``image``: the open folder of the job's image. Its path alone could lead elsewhere by now: it is the user's.
        """
        crashed = self._state.boot != boot_id()
        for layer in self._layers:
            if not is_mounted(layer):
                for path in layer.hidden:
                    hide(layer, path)
                lower = None if image is None or layer.name != ROOT else Path(f"/proc/self/fd/{image}")
                mount_overlay(layer, crashed=crashed, lower=lower)

    @property
    def view(self) -> PodView:
        """The pod's files as it sees them. The overlays must be mounted."""
        return self._view

    @property
    def mountpoints(self) -> tuple[str, ...]:
        """Where the pod has layers of its own, ``/`` first."""
        return tuple(layer.mountpoint for layer in self._layers)

    def carried(self, path: str) -> Path | None:
        """Where a file of the pod lies in an upper layer, so that a checkpoint carries it; None if it is the host's.

        What lies in a folder that the pod has moved or replaced as a whole counts as carried.
        """
        layer = self._layer_of(path)
        return carried(layer, _relative(path, layer.mountpoint))

    def unmount(self) -> None:
        """Unmount all overlays, lazily if something still holds them. Idempotent."""
        for layer in reversed(self._layers):
            unmount_overlay(layer)

    def remove(self) -> None:
        """Unmount, then delete upper, work and merged (not the rest of ``folder``). Idempotent."""
        self.unmount()
        for layer in self._layers:
            for path in (layer.upper, layer.work, layer.merged):
                remove_tree(path)
        remove_tree(self.folder / "mounts")

    def put(self, path: str, data: bytes, *, mode: int = 0o644, uid: int = 0, gid: int = 0) -> None:
        """Write a file of the mounted root before the pod starts, replacing what is there (a symlink too)."""
        self._need_mounted()
        if path not in self._state.placed:
            self._state = msgspec.structs.replace(self._state, placed=(*self._state.placed, path))
            self._state.save(self.folder)
        put_file(self._view, path, data, mode, uid, gid)

    def make_folder(self, path: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> None:
        """Create a folder and its parents in the mounted root, if absent."""
        self._need_mounted()
        os.close(make_folder(self._view, path, mode, uid, gid))

    def write_identity(self, *, hostname: str, hosts: str, resolv_conf: str) -> None:
        """Write ``/etc/hostname``, ``/etc/hosts`` and ``/etc/resolv.conf``."""
        self.put("/etc/hostname", hostname.encode() + b"\n")
        self.put("/etc/hosts", hosts.encode())
        self.put("/etc/resolv.conf", resolv_conf.encode())

    def capture(
        self, staging: Path, previous: CaptureIndex | None, forced: Collection[tuple[int, int]] = ()
    ) -> LayerCapture:
        """Copy what changed since ``previous`` into ``staging/layers``. The pod must be frozen. No layer is written to.

        ``forced``: what `mapped_shared_writable` gave. Use an index only when the attempt that made it was committed,
        or the store's generation has not changed since: prune may drop the chunks of an attempt that was not.
        Raises `NoCapacity`; nothing is left in ``staging`` then.
        """
        frame = Tree(working_directory=self.working_directory, started_ns=self._state.started_ns, layers=[])
        return capture(self._layers, frame, staging, previous, forced)

    def restore(self, tree: bytes, contents: Mapping[str, Content], fetch: Fetch, *, threads: int = 8) -> CaptureIndex:
        """Fill the empty uppers from ``tree``; ``contents`` is the pod manifest's ``layer_files``.

        ``fetch(content, path)`` writes one content into an existing empty file; it is called from several threads.
        Call before `mount`; again when a process died within it. Raises `CorruptData`, `NoCapacity`, `Conflict` (an
        upper is not empty, or the overlay is mounted).
        """
        if any(is_mounted(layer) for layer in self._layers):
            raise Conflict(f"the root file system of the pod in {self.folder} is mounted", "restore into a new folder")
        scratch = self.folder / "fetch"
        return restore(self._layers, decode_tree(tree), contents, fetch, scratch=scratch, threads=threads)

    def changed_below(self, path: str = "") -> Iterator[Change]:
        """What the pod created, modified or deleted below ``path`` (default: the working directory), parents first.

        What moorage itself `put` there does not count, and neither does what lies on a live mount.
        The overlays must be mounted. Raises `NotFound`; `UsageError` for a path on a live mount.
        """
        self._need_mounted()
        place, fd = self._view.locate(self._absolute(path))
        os.close(fd)
        below_place = [layer for layer in self._layers if layer.mountpoint != place and below(layer.mountpoint, place)]
        apart = [layer.mountpoint for layer in below_place] + [*self._state.live, *self._state.placed]
        tops = [(self._layer_of(place), place), *((layer, layer.mountpoint) for layer in below_place)]
        for layer, top in tops:
            prefix = _relative(top, place)
            hidden = [f"{layer.mountpoint.rstrip('/')}/{path}" for path in layer.hidden]
            skip = frozenset(_relative(other, place) for other in (*apart, *hidden) if below(other, place))
            with ExitStack() as stack:
                try:
                    sides = sides_at(layer, _relative(top, layer.mountpoint), stack)
                except (FileNotFoundError, NotADirectoryError):
                    raise NotFound(f"{top} in the pod is no folder") from None
                if sides is not None:
                    yield from compare(sides, prefix + b"/" if prefix else b"", skip)

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

        ``target`` defaults to the working directory's own path. A file that the host changed since the job started is
        left alone; the pod's is written beside it as ``NAME.moorage-<job>-<pod>``. Symlinks are never followed.
        Failures of single files are in the report. The pod's processes must have ended; the overlays are mounted.
        A job whose working directory is ``/`` has no results: everything that any program wrote would be one.
        Raises `NotFound`, `MoorageError`.
        """
        if any(below(self.working_directory, mount) for mount in self._state.live):
            return WriteBack()  # it was written there all along
        place, fd = self._view.locate(self.working_directory)
        os.close(fd)
        if place == "/":
            return WriteBack()
        changes = list(self.changed_below())
        # The target is the lower layer as well. Once it is written to, only the upper layers can be relied on.
        uppers = PodView({layer.mountpoint: layer.upper for layer in self._layers}, self._state.live)
        bring_up(changes, self._view, uppers, place)
        return write_back(
            changes,
            uppers,
            place,
            target or Path(self.working_directory),
            Owner(uid, gid, tuple(groups)),
            started_ns=self._state.started_ns,
            suffix=f"moorage-{job}-{pod}",
        )

    def names_of(
        self, wanted: Collection[tuple[int, int]], near: Sequence[str] = (), *, deep: bool = False
    ) -> dict[tuple[int, int], str]:
        """Paths in the pod of files given by ``(st_dev, st_ino)`` as the pod sees them; of several names, one.

        Looked for in the folders ``near`` and in all that the pod wrote; ``deep``: then, for some seconds at most, in
        all that it sees. What is on no overlay (in a mount of the job) has none. The overlays must be mounted.
        """
        return names_of(self._layers, wanted, near, deep=deep)

    def iter_parts(self, path: str = "") -> Iterator[FilePiece]:
        """Files at ``path`` (absolute, or below the working directory; empty: all that changed below it), in pieces
        of at most 1 MiB. Safe beside a running pod: no symlink leads out of it.

        What is opened, is opened while the iterator is advanced: do that with the rights of the job's owner
        (`acting_as`), and nothing is given that a process of the job could not read.
        Raises `NotFound`, `UsageError`, `Forbidden`.
        """
        self._need_mounted()
        changes = None if path else list(self.changed_below())
        view = self._view.held()

        def pieces() -> Iterator[FilePiece]:
            try:
                if changes is None:
                    yield from pieces_at(view, self._absolute(path), [layer.mountpoint for layer in self._layers])
                else:
                    yield from pieces_of_changes(view, self.working_directory, changes)
            finally:
                view.close()

        return pieces()

    def _need_mounted(self) -> None:
        if not self.mounted:
            raise Conflict(f"the root file system of the pod in {self.folder} is not mounted")

    def _absolute(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.working_directory}/{path}"

    def _layer_of(self, place: str) -> Layer:
        return max((x for x in self._layers if below(place, x.mountpoint)), key=lambda x: len(x.mountpoint))


def _relative(path: str, top: str) -> bytes:
    return os.fsencode(path[len(top.rstrip("/")) :].strip("/"))


def _name(mountpoint: str) -> str:
    """A layer's name: the same on every host, and a plain file name."""
    return f"at-{hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16]}"


def _hidden_below(lower: str, secret: Sequence[str]) -> tuple[str, ...]:
    """Which of the secret folders show in an overlay of ``lower``: those on the same mount."""
    mounts = read_mounts()
    lower = os.path.realpath(lower)
    mount = mount_of(lower, mounts)
    return tuple(
        sorted(
            os.fsdecode(_relative(path, lower))
            for path in set(secret)
            if path != lower and below(path, lower) and mount_of(path, mounts) == mount
        )
    )
