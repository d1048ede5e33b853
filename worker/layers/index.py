"""What the last capture knew, so that the next one copies only what changed."""

from __future__ import annotations

import msgspec


class CaptureIndex(msgspec.Struct):
    """Opaque to callers; keep it in memory or as bytes in a file of the pod's folder."""

    def encode(self) -> bytes:
        raise NotImplementedError

    @classmethod
    def decode(cls, data: bytes) -> CaptureIndex:
        """Raises `CorruptData`."""
        raise NotImplementedError
