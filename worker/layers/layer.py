"""One layer of a pod: where its folders are."""

from __future__ import annotations

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
