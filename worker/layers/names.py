"""From a file's device and inode number, as a process of the pod sees them, to a name of it in the pod."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from moorage.worker.layers.hostmounts import below
from moorage.worker.layers.layer import Layer

_DEEP_SECONDS = 3.0


def names_of(
    layers: Sequence[Layer], wanted: Collection[tuple[int, int]], near: Sequence[str] = (), *, deep: bool = False
) -> dict[tuple[int, int], str]:
    """See `PodLayers.names_of`."""
    own = {layer.merged.stat().st_dev for layer in layers}
    left, found = {identity for identity in wanted if identity[0] in own}, dict[tuple[int, int], str]()
    for path, shown in _candidates(layers, near, deep=deep):
        if not left:
            break
        try:
            status = shown.lstat()
        except OSError:
            continue
        identity = (status.st_dev, status.st_ino)
        if identity in left:
            left.discard(identity)
            found[identity] = path
    return found


def _candidates(layers: Sequence[Layer], near: Sequence[str], *, deep: bool) -> Iterator[tuple[str, Path]]:
    """Pairs of a path in the pod and where the host sees it."""
    for folder in dict.fromkeys(near):
        if not folder.startswith("/"):
            continue
        layer = max((x for x in layers if below(folder, x.mountpoint)), key=lambda x: len(x.mountpoint))
        shown = layer.merged / os.path.relpath(folder, layer.mountpoint)
        yield folder, shown
        try:
            names = sorted(entry.name for entry in shown.iterdir())
        except OSError:
            continue
        for name in names:
            yield f"{folder.rstrip('/')}/{name}", shown / name
    for layer in layers:
        for parent, folders, names in os.walk(layer.upper):
            inside = os.path.relpath(parent, layer.upper)
            for name in (*folders, *names):
                path = _joined(layer.mountpoint, inside, name)
                yield path, layer.merged / inside / name
    if deep:
        yield from _everything(layers)


def _everything(layers: Sequence[Layer]) -> Iterator[tuple[str, Path]]:
    """All that the pod can see, for `_DEEP_SECONDS` at most."""
    end = time.monotonic() + _DEEP_SECONDS
    for layer in layers:
        for parent, folders, names in os.walk(layer.merged):
            inside = os.path.relpath(parent, layer.merged)
            for name in (*folders, *names):
                yield _joined(layer.mountpoint, inside, name), Path(parent, name)
            if time.monotonic() > end:
                return


def _joined(mountpoint: str, inside: str, name: str) -> str:
    """The path in the pod. Two slashes in front would stay (POSIX lets them mean something else), and CRIU would look
    for such a path on the host. Pure."""
    return os.path.normpath(f"{mountpoint.rstrip('/')}/{inside}/{name}")
