"""The serialized form of a pod's upper layers."""

from __future__ import annotations

import msgspec


class Tree(msgspec.Struct):
    """All layers of a pod at one capture."""


def decode_tree(data: bytes) -> Tree:
    """Decode and validate. Raises `CorruptData`, `NewerVersion`."""
    raise NotImplementedError
