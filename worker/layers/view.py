"""Paths as a process of the pod would resolve them, but from outside and beside a running pod.

Each part is opened relative to its folder and no part through a symlink; the text of a symlink is read and resolved in
the pod's own tree. So a symlink that the pod makes, even while it is being looked at, never leads to the host.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from moorage.errors import Forbidden, NotFound, UsageError
from moorage.worker.layers.hostmounts import below

_MOST_LINKS: Final = 40
_PART_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class PodView:
    """``roots``: the merged folder of each mount point, ``/`` among them. ``live``: destinations of ``--mount``."""

    def __init__(self, roots: Mapping[str, Path], live: Sequence[str] = ()) -> None:
        self._roots = dict(roots)
        self._live = [path.rstrip("/") for path in live]
        self._held: dict[str, int] = {}

    def held(self) -> PodView:
        """The same view with its roots open, for a thread that has a job owner's rights: the way to them is root's
        alone. `close` it."""
        view = PodView(self._roots, self._live)
        for place, path in self._roots.items():
            view._held[place] = os.open(path, _PART_FLAGS | os.O_DIRECTORY)
        return view

    def close(self) -> None:
        """Close what `held` opened."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _root(self, place: str) -> int:
        if place in self._held:
            return os.dup(self._held[place])
        return os.open(self._roots[place], _PART_FLAGS | os.O_DIRECTORY)

    def open(self, path: str, *, follow: bool = True) -> int:
        """An O_PATH descriptor of an absolute path in the pod; ``follow``: also a symlink in its last part.

        Raises `NotFound`; `UsageError` for a path on a live mount, which is the host's own.
        """
        return self.locate(path, follow=follow)[1]

    def locate(self, path: str, *, follow: bool = True) -> tuple[str, int]:
        """As `open`, with the path that has no symlinks in it."""
        try:
            return self._resolve(path, follow)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound(f"there is no {path} in the pod") from None
        except OSError as error:
            if error.errno == errno.EACCES:
                raise Forbidden(f"{path} in the pod: the job's user may not go there") from None
            if error.errno != errno.ELOOP:
                raise
            raise NotFound(f"{path} in the pod goes through too many symlinks") from None

    def read(self, path: str, limit: int) -> bytes:
        """The first ``limit`` bytes of a regular file; no symlink in its last part. Raises `NotFound`, `OSError`."""
        fd = self.open(path, follow=False)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotFound(f"{path} in the pod is no file")
            opened = reopen(fd, os.O_RDONLY)
        finally:
            os.close(fd)
        with os.fdopen(opened, "rb") as file:
            return file.read(limit)

    def names(self, folder: str) -> list[str]:
        """What a folder holds. Raises `NotFound`, `OSError`."""
        fd = self.open(folder)
        try:
            opened = reopen(fd, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(fd)
        try:
            return os.listdir(opened)  # noqa: PTH208 - of a descriptor
        finally:
            os.close(opened)

    def _resolve(self, path: str, follow: bool) -> tuple[str, int]:
        # The open folders from the root to where we are; `..` goes back one.
        trail: list[tuple[str, int]] = [("/", self._root("/"))]
        ahead = path.split("/")[::-1]
        links = 0
        try:
            while ahead:
                part = ahead.pop()
                if part in {"", "."}:
                    continue
                if part == "..":
                    if len(trail) > 1:
                        os.close(trail.pop()[1])
                    continue
                here, fd = trail[-1]
                place = f"{here.rstrip('/')}/{part}"
                self._refuse_live(place)
                if place in self._roots:
                    os.close(os.open(".", _PART_FLAGS, dir_fd=fd))  # whether this thread may pass through the folder
                    trail.append((place, self._root(place)))
                    continue
                child = os.open(part, _PART_FLAGS, dir_fd=fd)
                trail.append((place, child))
                if not stat.S_ISLNK(os.fstat(child).st_mode) or not (follow or any(p for p in ahead)):
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                text = os.readlink("", dir_fd=child)
                os.close(trail.pop()[1])
                if text.startswith("/"):
                    while len(trail) > 1:
                        os.close(trail.pop()[1])
                ahead += text.split("/")[::-1]
            return trail[-1][0], os.dup(trail[-1][1])
        finally:
            for _, fd in trail:
                os.close(fd)

    def _refuse_live(self, place: str) -> None:
        for mount in self._live:
            if below(place, mount):
                raise UsageError(f"{place} lies on the mount {mount}", "its files are on the host: take them there")


def reopen(fd: int, flags: int) -> int:
    """Open for use what an O_PATH descriptor points to. Never blocks on a fifo when ``flags`` has O_NONBLOCK."""
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
