"""Copying what changed in the upper layers while the pod is frozen. Nothing in a layer is ever written."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from moorage import failpoints
from moorage.errors import CorruptData, MoorageError, NoCapacity
from moorage.store.manifests import Content
from moorage.worker.layers import syscalls
from moorage.worker.layers.extents import CutShort, data_extents
from moorage.worker.layers.index import CaptureIndex, Known, LayerIndex, Stamp, referenced, settled, unchanged, wasteful
from moorage.worker.layers.layer import Layer
from moorage.worker.layers.staging import StagedFile, Staging
from moorage.worker.layers.tree import (
    Data,
    Entry,
    Kind,
    LayerTree,
    Tree,
    data_length,
    decode_tree,
    encode_tree,
    kind_of,
    portable,
)
from moorage.worker.layers.walk import Found, folder, read_xattrs, walk

__all__ = ["LayerCapture", "StagedFile", "capture", "stamp_of"]

failpoints.declare("layers.capture.before", "layers.capture.after")

# Where CRIU puts a deleted file that is still open for the time of a restore, and the link that it makes for the time
# of a dump to one that lost its name. Their data is elsewhere; one that was left behind is nobody's.
_GHOST = re.compile(r".*\.cr\.[0-9a-f]+\.ghost|link_remap\.\d+")
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME | os.O_NONBLOCK | os.O_CLOEXEC


class LayerCapture:
    """A finished copy. ``files`` go to the store, then `complete` gives what the pod manifest needs."""

    def __init__(
        self,
        tree: Tree,
        files: Sequence[StagedFile],
        layers: dict[str, LayerIndex],
        earlier: Mapping[str, Content],
        staging: Path,
    ) -> None:
        self.files: tuple[StagedFile, ...] = tuple(files)
        self.tree = tree
        self._layers = layers
        self._earlier = earlier
        self._staging = staging

    @property
    def bytes_new(self) -> int:
        """Bytes that this capture copied."""
        return sum(file.size for file in self.files)

    @property
    def bytes_total(self) -> int:
        """Bytes of all files of the layers, holes not counted."""
        entries = (entry for layer in self.tree.layers for entry in layer.entries)
        return sum(data_length(entry.data, entry.size) for entry in entries if entry.data is not None)

    @property
    def entries(self) -> int:
        """Files, folders and all else in the layers."""
        return sum(len(layer.entries) for layer in self.tree.layers)

    def complete(self, contents: Mapping[str, Content]) -> tuple[bytes, CaptureIndex]:
        """The serialized tree, and the index for the next capture. Raises `KeyError` if a key is missing.

        ``index.contents`` is the whole of what the tree refers to: the pod manifest's ``layer_files``.
        """
        new = {file.key for file in self.files}
        needed = {key: contents[key] if key in new else self._earlier[key] for key in sorted(referenced(self.tree))}
        index = CaptureIndex(contents=needed, layers=self._layers, wasteful=wasteful(self.tree, needed))
        return encode_tree(self.tree), index

    def discard(self) -> None:
        """Delete the staged files. Idempotent."""
        shutil.rmtree(self._staging, ignore_errors=True)

    def encode(self) -> bytes:
        """All but the staged files themselves, for a process that goes on with this capture when this one dies."""
        return msgspec.msgpack.encode(
            _Saved(
                encode_tree(self.tree),
                [(str(file.path), file.key, file.size) for file in self.files],
                CaptureIndex(contents=dict(self._earlier), layers=self._layers).encode(),
                str(self._staging),
            )
        )

    @classmethod
    def decode(cls, data: bytes) -> LayerCapture:
        """What `encode` gave. Raises `CorruptData`."""
        try:
            saved = msgspec.msgpack.decode(data, type=_Saved)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"the capture of the pod's files cannot be read: {error}") from None
        index = CaptureIndex.decode(saved.index)
        files = [StagedFile(Path(path), key, size) for path, key, size in saved.files]
        return cls(decode_tree(saved.tree), files, index.layers, index.contents, Path(saved.staging))


class _Saved(msgspec.Struct, array_like=True):
    tree: bytes
    files: list[tuple[str, str, int]]
    index: bytes
    staging: str


def stamp_of(status: os.stat_result) -> Stamp:
    """What tells whether this file changes."""
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def capture(
    layers: Sequence[Layer],
    frame: Tree,
    staging: Path,
    previous: CaptureIndex | None,
    forced: Collection[tuple[int, int]],
) -> LayerCapture:
    """See `PodLayers.capture`. ``frame`` is the tree without layers."""
    failpoints.hit_sync("layers.capture.before")
    target = staging / "layers"
    shutil.rmtree(target, ignore_errors=True)
    previous = previous or CaptureIndex()
    forced = frozenset(forced)
    with _told_plainly(target):
        stage = Staging(target)
        try:
            runs = [_LayerRun(layer, stage, previous, forced) for layer in layers]
            trees = [run.tree() for run in runs]
            stage.finish()
            failpoints.hit_sync("layers.capture.after")
        except BaseException:
            stage.abort()
            raise
    tree = msgspec.structs.replace(frame, layers=trees)
    indexes = {run.layer.name: run.index for run in runs}
    return LayerCapture(tree, stage.files, indexes, previous.contents, target)


@contextmanager
def _told_plainly(staging: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise NoCapacity(
                f"no space in {staging.parent} for the copy of the pod's files",
                "free space there, or give the worker a state folder on a larger file system",
            ) from None
        raise MoorageError(f"the pod's files cannot be copied: {error}") from error
    except CutShort:
        raise MoorageError(
            "a file of the pod changed while the pod was frozen", "is it written from outside?"
        ) from None


class _LayerRun:
    """The walk of one layer."""

    def __init__(
        self, layer: Layer, stage: Staging, previous: CaptureIndex, forced: frozenset[tuple[int, int]]
    ) -> None:
        self.layer = layer
        self._stage = stage
        self._forced = forced
        self._wasteful = previous.wasteful
        self._hidden = {os.fsencode(path) for path in layer.hidden}
        self._first_name: dict[int, bytes] = {}
        device = layer.upper.stat().st_dev
        before = previous.layers.get(layer.name)
        self._known: dict[int, Known] = before.files if before and before.device == device else {}
        self.index = LayerIndex(device, {})
        # Read before any stamp is: what is written later must not look older.
        self._clock = time.clock_gettime_ns(syscalls.CLOCK_REALTIME_COARSE)

    def tree(self) -> LayerTree:
        with folder(self.layer.upper) as root:
            entries = [self._plain(Found(root, ".", b"", os.fstat(root)), "d")]
            for found in walk(root, os.O_NOATIME):
                entry = self._entry(found)
                if entry is not None:
                    entries.append(entry)
        return LayerTree(self.layer.name, self.layer.mountpoint, entries)

    def _entry(self, found: Found) -> Entry | None:
        status = found.status
        kind = kind_of(status.st_mode, status.st_rdev)
        if kind == "w":
            # The kernel links all whiteouts to one inode, so they are told apart before hard links are.
            return None if found.path in self._hidden else Entry(found.path, "w")
        if kind == "d":
            return self._plain(found, "d")
        if _GHOST.fullmatch(found.name):
            return None
        if status.st_nlink > 1:
            first = self._first_name.setdefault(status.st_ino, found.path)
            if first != found.path:
                return Entry(found.path, "h", target=first)
        if kind == "f":
            return self._file(found)
        target = os.fsencode(os.readlink(found.name, dir_fd=found.dir_fd)) if kind == "l" else b""
        device = (os.major(status.st_rdev), os.minor(status.st_rdev)) if kind in {"c", "b"} else (0, 0)
        return msgspec.structs.replace(self._plain(found, kind), target=target, device=device)

    def _plain(self, found: Found, kind: Kind) -> Entry:
        xattrs = tuple(pair for pair in read_xattrs(found.dir_fd, found.name) if portable(pair[0]))
        return _describe(found, kind, xattrs)

    def _file(self, found: Found) -> Entry:
        status = found.status
        stamp = stamp_of(status)
        forced = self._is_forced(found)
        known = self._known.get(status.st_ino)
        if known is not None and unchanged(known, stamp) and not forced and not self._is_wasteful(known.data):
            self.index.files[status.st_ino] = known
            return _describe(found, "f", known.xattrs, known.data)
        entry = self._plain(found, "f")
        data = self._read(found) if status.st_size else None
        known = Known(stamp, settled(status.st_ctime_ns, self._clock) and not forced, data, entry.xattrs)
        self.index.files[status.st_ino] = known
        return msgspec.structs.replace(entry, data=data)

    def _is_wasteful(self, data: Data | None) -> bool:
        return data is not None and data.key in self._wasteful

    def _is_forced(self, found: Found) -> bool:
        if not self._forced:
            return False
        status = found.status
        if (status.st_dev, status.st_ino) in self._forced:
            return True
        # A mapping shows the overlay's device and inode number, and only the overlay knows which are this file's.
        try:
            seen = (self.layer.merged / os.fsdecode(found.path)).lstat()
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return True
        return (seen.st_dev, seen.st_ino) in self._forced

    def _read(self, found: Found) -> Data | None:
        size = found.status.st_size
        fd = os.open(found.name, _READ_FLAGS, dir_fd=found.dir_fd)
        try:
            return self._stage.take(fd, size, data_extents(fd, size, found.status.st_blocks))
        finally:
            os.close(fd)


def _describe(found: Found, kind: Kind, xattrs: tuple[tuple[bytes, bytes], ...], data: Data | None = None) -> Entry:
    status = found.status
    return Entry(
        found.path,
        kind,
        stat.S_IMODE(status.st_mode),
        status.st_uid,
        status.st_gid,
        status.st_atime_ns,
        status.st_mtime_ns,
        status.st_size if kind == "f" else 0,
        data,
        xattrs,
    )
