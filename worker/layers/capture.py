"""Copying what changed in the upper layers while the pod is frozen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from moorage.worker.layers.index import CaptureIndex

if TYPE_CHECKING:
    from moorage.store.manifests import Content


class StagedFile(msgspec.Struct, frozen=True):
    """One file in staging that the store must take in. ``size`` in bytes, logical."""

    path: Path
    key: str
    size: int


class LayerCapture:
    """A finished copy. ``files`` go to the store, then `complete` gives what the pod manifest needs."""

    files: tuple[StagedFile, ...]
    bytes_total: int  # logical bytes of all files of the layers
    bytes_new: int  # of them copied in this capture
    entries: int

    def complete(self, contents: Mapping[str, Content]) -> tuple[bytes, CaptureIndex]:
        """The serialized tree, and the index for the next capture. Raises `KeyError` if a key is missing.

        ``index.contents`` is the whole of what the tree refers to: the pod manifest's ``layer_files``.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Delete the staged files. Idempotent."""
        raise NotImplementedError
