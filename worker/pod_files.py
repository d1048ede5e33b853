"""The files of this node as a pod sees them through its lower layers and live mounts, whether the pod runs or not.

A lower layer is opened without what is mounted below it, as an overlay sees it, and every path is resolved within the
layer: no symlink of an image leads to the host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from moorage.compat import MountMark
from moorage.worker.layers import syscalls
from moorage.worker.layers.hostmounts import below


class _Root(NamedTuple):
    mountpoint: str
    fd: int
    live: bool


class NodeFiles:
    """``with NodeFiles(image, layers, mounts) as files:``. ``layers``: mount points of the pod's layers, ``/`` first.

    A layer or source that is not there has no files.
    """

    def __init__(self, image: str, layers: Sequence[str], mounts: Sequence[MountMark]) -> None:
        self._wanted = [(point, Path(image) if image and point == "/" else Path(point), False) for point in layers]
        self._wanted += [(mount.destination.rstrip("/") or "/", Path(mount.source), True) for mount in mounts]
        self._roots: list[_Root] = []

    def __enter__(self) -> Self:
        for point, folder, live in self._wanted:
            with contextlib.suppress(OSError):
                self._roots.append(_Root(point, _open_root(folder, live), live))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for root in self._roots:
            os.close(root.fd)
        self._roots = []

    def live(self, path: str) -> bool:
        """Whether this path of the pod lies on a live mount."""
        return any(live and below(path, point) for point, _, live in self._wanted)

    def open(self, path: str) -> int | None:
        """A regular file, open for reading; None if there is none, or none that can be read."""
        fd = self._open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        if fd is None or stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        return None

    def entries(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty if there is none."""
        fd = self._open(folder, os.O_RDONLY | os.O_DIRECTORY)
        if fd is None:
            return []
        try:
            return sorted(os.listdir(fd))  # noqa: PTH208 - of a descriptor
        finally:
            os.close(fd)

    def _open(self, path: str, flags: int) -> int | None:
        above = [root for root in self._roots if below(path, root.mountpoint)]
        if not above:
            return None
        root = max(above, key=lambda root: (len(root.mountpoint), root.live))
        relative = path[len(root.mountpoint.rstrip("/")) :].strip("/") or "."
        try:
            return syscalls.open_in_root(relative, flags, root.fd)
        except OSError:
            return None


def _open_root(folder: Path, live: bool) -> int:
    if not live:
        try:
            return syscalls.open_without_mounts(folder)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EINVAL):
                raise
    return os.open(folder, os.O_PATH | os.O_CLOEXEC)
