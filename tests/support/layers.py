"""What the tests of a pod's layers share: a store in memory, an exact picture of a tree, a folder on a real disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moorage.store.manifests import Chunk, Content
from moorage.worker.layers import CaptureIndex, LayerCapture, PodLayers
from moorage.worker.layers.hostmounts import read_mounts
from moorage.worker.layers.syscalls import MNT_DETACH, unmount
from moorage.worker.layers.walk import read_xattrs, remove_tree, walk


class MemoryStore:
    """Takes contents as the real store does, but keeps them here."""

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.fetched = 0

    def persist(self, capture: LayerCapture) -> tuple[bytes, CaptureIndex]:
        contents = {}
        for file in capture.files:
            data = file.path.read_bytes()
            assert len(data) == file.size
            name = hashlib.sha256(data).digest()
            self.data[name] = data
            contents[file.key] = Content(len(data), [Chunk(name, len(data))])
        capture.discard()
        return capture.complete(contents)

    def fetch(self, content: Content, path: Path) -> None:
        self.fetched += 1
        assert path.stat().st_size == 0
        path.write_bytes(self.data[content.chunks[0].name])


@contextmanager
def disk_folder(where: str = "/var/tmp") -> Iterator[Path]:
    """A folder on a file system that can carry upper layers; whatever is mounted in it is unmounted at the end."""
    top = Path(tempfile.mkdtemp(prefix="moorage-test-", dir=where))
    try:
        yield top
    finally:
        points = [Path(m.mountpoint) for m in read_mounts() if m.mountpoint.startswith(f"{top}/")]
        for point in sorted(points, key=lambda path: len(path.parts), reverse=True):
            unmount(point, MNT_DETACH)
        remove_tree(top)


class Bench:
    """One folder with an image (the lower layer) and as many pods on it as a test wants."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.image = top / "image"
        self.job = self.image / "job"
        self.job.mkdir(parents=True)
        (self.image / "etc").mkdir()
        self.store = MemoryStore()
        self._pods = 0

    def plan(self, **more: Any) -> PodLayers:
        self._pods += 1
        options: dict[str, Any] = {"image": self.image, "working_directory": "/job", **more}
        return PodLayers.plan(self.top / f"pod{self._pods}", **options)

    def start(self, **more: Any) -> PodLayers:
        layers = self.plan(**more)
        layers.mount()
        return layers

    def capture(
        self, layers: PodLayers, index: CaptureIndex | None = None, forced: set[tuple[int, int]] | None = None
    ) -> tuple[bytes, CaptureIndex, LayerCapture]:
        capture = layers.capture(self.top / "staging", index, forced or set())
        tree, index = self.store.persist(capture)
        return tree, index, capture

    def restore(self, tree: bytes, index: CaptureIndex, **more: Any) -> tuple[PodLayers, CaptureIndex]:
        self._pods += 1
        layers = PodLayers.from_tree(self.top / f"pod{self._pods}", tree, **{"image": self.image, **more})
        restored = layers.restore(tree, index.contents, self.store.fetch)
        layers.mount()
        return layers, restored

    def move(self, layers: PodLayers) -> PodLayers:
        """Capture, and restore into a new pod."""
        tree, index, _ = self.capture(layers)
        return self.restore(tree, index)[0]


@contextmanager
def bench(where: str = "/var/tmp") -> Iterator[Bench]:
    with disk_folder(where) as top:
        yield Bench(top)


def picture(top: Path, *, overlay: bool = False) -> dict[bytes, tuple[Any, ...]]:
    """All that can be seen of a tree, by path: two trees are the same if their pictures are equal.

    ``overlay``: with the overlay's own attributes (of an upper layer).
    """
    found: dict[bytes, tuple[Any, ...]] = {}
    names: dict[int, bytes] = {}
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for entry in walk(root):
            status = entry.status
            whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
            if whiteout:
                found[entry.path] = ("whiteout",)
                continue
            local = {b"trusted.overlay." + name for name in (b"origin", b"impure", b"uuid")}
            xattrs = [
                pair
                for pair in read_xattrs(entry.dir_fd, entry.name)
                if (overlay and pair[0] not in local) or not pair[0].startswith(b"trusted.overlay.")
            ]
            first = names.setdefault(status.st_ino, entry.path) if not stat.S_ISDIR(status.st_mode) else entry.path
            found[entry.path] = (
                status.st_mode,
                status.st_uid,
                status.st_gid,
                status.st_mtime_ns,
                status.st_rdev,
                first,
                _content(entry.dir_fd, entry.name, status),
                xattrs,
            )
    finally:
        os.close(root)
    return found


def _content(dir_fd: int, name: str, status: os.stat_result) -> Any:
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(name, dir_fd=dir_fd)
    if not stat.S_ISREG(status.st_mode):
        return None
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
    with os.fdopen(fd, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return (status.st_size, digest)


def wipe(folder: Path) -> None:
    """Empty a folder."""
    for child in folder.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
