"""Filling empty upper layers from a saved tree."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import structlog

from moorage import failpoints
from moorage.errors import Conflict, CorruptData, MoorageError, NoCapacity
from moorage.store.manifests import Content
from moorage.worker.layers import syscalls
from moorage.worker.layers.capture import stamp_of
from moorage.worker.layers.extents import CutShort, copy_range, read_exactly, scatter
from moorage.worker.layers.index import CaptureIndex, Known, LayerIndex, referenced, settled, wasteful
from moorage.worker.layers.layer import Layer
from moorage.worker.layers.staging import SMALL
from moorage.worker.layers.tree import Entry, LayerTree, Tree, data_length
from moorage.worker.layers.walk import Trail, folder, open_folder, remove_tree, through

failpoints.declare("layers.restore.before", "layers.restore.after")

Fetch = Callable[[Content, Path], None]

_log = structlog.get_logger(__name__)
_LONGEST_TICK_NS = 20_000_000
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NODE_TYPES = {"p": stat.S_IFIFO, "s": stat.S_IFSOCK, "c": stat.S_IFCHR, "b": stat.S_IFBLK}
# Attributes that belong to the security policy of a host. Where another host does not take them they are left out.
_POLICY_XATTRS = (b"security.selinux", b"security.ima", b"security.evm", b"security.apparmor", b"security.SMACK64")


def restore(
    layers: Sequence[Layer], tree: Tree, contents: Mapping[str, Content], fetch: Fetch, *, scratch: Path, threads: int
) -> CaptureIndex:
    """See `PodLayers.restore`. ``scratch``: a folder to be made for the time being, on the uppers' file system."""
    failpoints.hit_sync("layers.restore.before")
    saved = {layer.name: layer for layer in tree.layers}
    if scratch.exists():  # a process died while it restored: what it left is no pod's
        for layer in layers:
            _empty(layer.upper)
        remove_tree(scratch)
    _check(layers, tree, contents)
    index = CaptureIndex(contents=dict(contents), wasteful=wasteful(tree, contents))
    scratch.mkdir(mode=0o700)
    try:
        with _told_plainly(scratch), _Contents(contents, fetch, scratch, threads) as source:
            source.prefetch(tree)
            for layer in layers:
                index.layers[layer.name] = _LayerFill(layer, saved[layer.name], source).run()
        failpoints.hit_sync("layers.restore.after")
    except BaseException:
        for layer in layers:
            _empty(layer.upper)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return index


def _check(layers: Sequence[Layer], tree: Tree, contents: Mapping[str, Content]) -> None:
    if {layer.name for layer in layers} != {layer.name for layer in tree.layers}:
        raise Conflict("the pod's layers are not those of the checkpoint")
    for layer in layers:
        if any(layer.upper.iterdir()):
            raise Conflict(f"{layer.upper} is not empty", "restore into a new folder")
    if missing := referenced(tree) - contents.keys():
        raise CorruptData(f"the checkpoint lacks the content {min(missing)} that its tree of files refers to")
    for saved in tree.layers:
        for entry in saved.entries:
            data = entry.data
            if data is not None and data.offset + data_length(data, entry.size) > contents[data.key].size:
                raise CorruptData(f"the data of {entry.path!r} in the checkpoint is cut short")


def _empty(upper: Path) -> None:
    for child in upper.iterdir():
        remove_tree(child)


@contextmanager
def _told_plainly(scratch: Path) -> Iterator[None]:
    try:
        yield
    except CutShort:
        raise CorruptData("a content of the checkpoint is shorter than its tree of files says") from None
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise NoCapacity(
                f"no space in {scratch.parent} for the files of the pod", "free space there, or restore on another node"
            ) from None
        raise MoorageError(f"the pod's files cannot be restored: {error}") from error


class _Contents:
    """Contents as files in the scratch folder, fetched by several threads in the order in which they are needed."""

    def __init__(self, contents: Mapping[str, Content], fetch: Fetch, scratch: Path, threads: int) -> None:
        self._contents = contents
        self._fetch = fetch
        self._scratch = scratch
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="layers-fetch")
        self._fetched: dict[str, Future[Path]] = {}
        self._open: dict[str, int] = {}

    def __enter__(self) -> _Contents:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for fd in self._open.values():
            os.close(fd)

    def prefetch(self, tree: Tree) -> None:
        for layer in tree.layers:
            for entry in layer.entries:
                if entry.data is not None and entry.data.key not in self._fetched:
                    path = self._scratch / str(len(self._fetched))
                    self._fetched[entry.data.key] = self._pool.submit(self._get, entry.data.key, path)

    def _get(self, key: str, path: Path) -> Path:
        os.close(os.open(path, _NEW_FILE, 0o600))
        self._fetch(self._contents[key], path)
        return path

    def path(self, key: str) -> Path:
        """The fetched file; waits for it."""
        return self._fetched[key].result()

    def fd(self, key: str) -> int:
        """The fetched file, open for reading."""
        if key not in self._open:
            self._open[key] = os.open(self.path(key), os.O_RDONLY | os.O_CLOEXEC)
        return self._open[key]


class _LayerFill:
    """Creates the entries of one layer, in order."""

    def __init__(self, layer: Layer, saved: LayerTree, source: _Contents) -> None:
        self._layer = layer
        self._saved = saved
        self._source = source
        self._inodes: dict[bytes, int] = {}
        self._index = LayerIndex(layer.upper.stat().st_dev, {})
        self._users: dict[str, int] = {}
        for entry in saved.entries:
            if entry.data is not None:
                self._users[entry.data.key] = self._users.get(entry.data.key, 0) + 1

    def run(self) -> LayerIndex:
        with folder(self._layer.upper) as root:
            self._root = root
            trail = Trail(root)
            try:
                # Folders that are being filled; their times are set when they are full.
                stack = [self._saved.entries[0]]
                for entry in self._saved.entries[1:]:
                    parent, _, name = entry.path.rpartition(b"/")
                    while stack[-1].path != parent:
                        _finish_folder(stack.pop(), trail.fd)
                        trail.up()
                    self._create(entry, os.fsdecode(name), trail.fd)
                    if entry.kind == "d":
                        trail.down(os.fsdecode(name))
                        stack.append(entry)
                while stack:
                    _finish_folder(stack.pop(), trail.fd)
                    if stack:
                        trail.up()
            finally:
                trail.close()
        self._settle()
        return self._index

    def _settle(self) -> None:
        newest = max((known.stamp.ctime_ns for known in self._index.files.values()), default=0)
        clock = time.clock_gettime_ns(syscalls.CLOCK_REALTIME_COARSE)
        # One tick of the clock (some milliseconds) spares the next capture all files that were written within it.
        give_up = clock + _LONGEST_TICK_NS
        while newest >= clock and clock < give_up:
            time.sleep(0.001)
            clock = time.clock_gettime_ns(syscalls.CLOCK_REALTIME_COARSE)
        for inode, known in self._index.files.items():
            if not settled(known.stamp.ctime_ns, clock):
                self._index.files[inode] = msgspec.structs.replace(known, settled=False)

    def _create(self, entry: Entry, name: str, at: int) -> None:
        match entry.kind:
            case "d":
                os.mkdir(name, 0o700, dir_fd=at)
            case "w":
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=at)
                return
            case "h":
                self._link(entry, name, at)
                return
            case "f":
                self._file(entry, name, at)
                return
            case "l":
                os.symlink(os.fsdecode(entry.target), name, dir_fd=at)
            case _:
                os.mknod(name, _NODE_TYPES[entry.kind] | 0o600, os.makedev(*entry.device), dir_fd=at)
        os.chown(name, entry.uid, entry.gid, dir_fd=at, follow_symlinks=False)
        if entry.kind != "l":
            os.chmod(name, entry.mode, dir_fd=at)
        if entry.kind != "d":
            _set_xattrs(through(at, name), entry)
            os.utime(name, ns=(entry.atime_ns, entry.mtime_ns), dir_fd=at, follow_symlinks=False)

    def _link(self, entry: Entry, name: str, at: int) -> None:
        folder_path, _, first = entry.target.rpartition(b"/")
        fd = open_folder(self._root, folder_path)
        try:
            os.link(os.fsdecode(first), name, src_dir_fd=fd, dst_dir_fd=at, follow_symlinks=False)
        finally:
            os.close(fd)
        inode = self._inodes.get(entry.target)
        if inode is not None:  # a new name is a new ctime
            stamp = stamp_of(os.stat(name, dir_fd=at, follow_symlinks=False))
            self._index.files[inode] = msgspec.structs.replace(self._index.files[inode], stamp=stamp)

    def _file(self, entry: Entry, name: str, at: int) -> None:
        data = entry.data
        whole = data is not None and data.extents is None and entry.size > SMALL and self._users[data.key] == 1
        if whole and data is not None:  # the fetched file is the file
            os.rename(self._source.path(data.key), name, dst_dir_fd=at)
            fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        else:
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=at)
        try:
            if whole:
                if os.fstat(fd).st_size != entry.size:
                    raise CutShort
            else:
                self._fill(fd, entry)
            os.fchown(fd, entry.uid, entry.gid)
            os.fchmod(fd, entry.mode)
            _set_xattrs(fd, entry)
            os.utime(fd, ns=(entry.atime_ns, entry.mtime_ns))
            status = os.fstat(fd)
        finally:
            os.close(fd)
        self._inodes[entry.path] = status.st_ino
        self._index.files[status.st_ino] = Known(stamp_of(status), True, data, entry.xattrs)

    def _fill(self, fd: int, entry: Entry) -> None:
        data = entry.data
        if data is None or data.extents is not None or entry.size > SMALL:
            os.ftruncate(fd, entry.size)
        if data is None:
            return
        source = self._source.fd(data.key)
        if data.extents is not None:
            scatter(source, fd, data.offset, data.extents)
        elif entry.size > SMALL:
            copy_range(source, fd, data.offset, entry.size, 0)
        else:
            left = memoryview(read_exactly(source, data.offset, entry.size))
            while left:
                left = left[os.write(fd, left) :]


def _finish_folder(entry: Entry, fd: int) -> None:
    if not entry.path:  # the root's other attributes: it existed before
        os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
    # Only now: a default ACL would have gone to everything that was made in the folder.
    _set_xattrs(fd, entry)
    os.utime(fd, ns=(entry.atime_ns, entry.mtime_ns))


def _set_xattrs(path: str | int, entry: Entry) -> None:
    for name, value in entry.xattrs:
        try:
            if isinstance(path, int):
                os.setxattr(path, name, value)
            else:
                os.setxattr(path, name, value, follow_symlinks=False)
        except OSError as error:
            if not name.startswith(_POLICY_XATTRS):
                raise
            _log.warning("an attribute of a file was not restored", path=entry.path, name=name, why=str(error))
