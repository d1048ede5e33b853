"""One layer of a pod: where its folders are."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

ROOT = "root"


class Layer(msgspec.Struct, frozen=True):
    """An overlay of the folder ``lower`` of this host, seen at ``mountpoint`` in the pod.

    ``hidden``: paths from the layer's root, without a leading slash, that no pod may see.
    """

    name: str
    mountpoint: str
    lower: Path
    folder: Path
    hidden: tuple[str, ...] = ()

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def merged(self) -> Path:
        return self.folder / "merged"


def carried(layer: Layer, path: bytes) -> Path | None:
    """Where ``path`` (from the layer's root) lies in the upper layer; None if it shows through from the lower one."""
    upper = layer.upper
    for part in path.split(b"/"):
        upper = upper / os.fsdecode(part)
        if not os.path.lexists(upper):
            return None
        with suppress(OSError):
            if os.getxattr(upper, "trusted.overlay.redirect", follow_symlinks=False):
                return upper
        with suppress(OSError):
            if os.getxattr(upper, "trusted.overlay.opaque", follow_symlinks=False) == b"y":
                return upper
    return upper
