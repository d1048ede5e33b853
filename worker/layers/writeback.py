"""Writing the pod's results to the host."""

from __future__ import annotations

import msgspec


class WriteBack(msgspec.Struct):
    """What became of the results. Paths relative to the working directory, undecodable bytes as surrogates."""

    written: list[str] = []
    deleted: list[str] = []
    conflicts: dict[str, str] = {}  # path: where the pod's version was written instead ("" when nothing was)
    failed: dict[str, str] = {}  # path: one sentence
