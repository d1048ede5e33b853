"""What the last capture knew, so that the next one copies only what changed."""

from __future__ import annotations

import msgspec

from moorage.store.manifests import Content


class CaptureIndex(msgspec.Struct):
    """Keep it in memory or as bytes in a file of the pod's folder. Only ``contents`` is of interest to callers."""

    contents: dict[str, Content] = {}

    def encode(self) -> bytes:
        raise NotImplementedError

    @classmethod
    def decode(cls, data: bytes) -> CaptureIndex:
        """Raises `CorruptData`."""
        raise NotImplementedError
