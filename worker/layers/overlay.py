"""Overlay mounts and whether a file system can carry an upper layer."""

from __future__ import annotations

from pathlib import Path


def check_upper(folder: Path) -> None:
    """Whether upper layers can stand in ``folder``. Raises `EnvironmentLacking` with the way out. For doctor too."""
    raise NotImplementedError
