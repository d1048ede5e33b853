"""Files of a pod in pieces, for ``moorage pull``."""

from __future__ import annotations

import msgspec


class FilePiece(msgspec.Struct, frozen=True):
    """As the FilePart message: metadata in a file's first piece, data of at most 1 MiB, ``last`` ends it."""

    path: str  # relative to what was asked for; undecodable bytes as surrogates
    mode: int = 0
    modified: float = 0.0
    link_target: str = ""
    data: bytes = b""
    last: bool = False
