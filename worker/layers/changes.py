"""What a pod changed, in terms of the merged view."""

from __future__ import annotations

from typing import Literal

import msgspec

ChangeKind = Literal["created", "modified", "deleted"]


class Change(msgspec.Struct, frozen=True):
    """One change. ``path`` is relative to the folder that was asked for; ``mode`` is st_mode (0 when deleted)."""

    kind: ChangeKind
    path: bytes
    mode: int
    size: int
