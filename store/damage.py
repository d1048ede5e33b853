"""What the store lacks although a checkpoint names it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from moorage.errors import CorruptData, NotFound


@contextlib.contextmanager
def missing_is_damage() -> Iterator[None]:
    """Around reading what a committed checkpoint names: if it is missing, the checkpoint is damaged, and whoever asked
    for it has named no wrong thing. Raises `CorruptData` for `NotFound`, unless that has a way out of its own (a bucket
    that is gone)."""
    try:
        yield
    except NotFound as error:
        if error.hint:
            raise
        message = f"{error.message.removesuffix(' does not exist')} is missing, though the checkpoint needs it"
        raise CorruptData(message, "use an earlier checkpoint") from error
