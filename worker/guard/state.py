"""What a guard writes down before it acts, so that the next one knows what to finish: ``guard.state``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moorage.errors import CorruptData
from moorage.worker.guard.files import write_private
from moorage.worker.guard.messages import STATE_FILE, Desired


class Operation(msgspec.Struct, frozen=True):
    """A run of runc under way. ``started`` is the process's start time, which tells it from a later one of its pid."""

    name: str
    pid: int = 0
    started: int = 0


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The pod's story so far, as far as it cannot be read off the kernel."""

    desired: Desired = "run"
    reason: str = ""
    begun: bool = False  # a container was asked for
    fenced: bool = False
    killed: bool = False
    exit_code: int | None = None
    init_pid: int = 0
    init_started: int = 0
    operation: Operation | None = None


class Story:
    """The current `Saved`, on disk before `tell` returns."""

    def __init__(self, folder: Path) -> None:
        """Raises `CorruptData` when the file is not a guard's."""
        self._path = folder / STATE_FILE
        try:
            self.now = msgspec.json.decode(self._path.read_bytes(), type=Saved)
        except FileNotFoundError:
            self.now = Saved()
        except msgspec.DecodeError as error:
            raise CorruptData(f"{self._path}: {error}") from error

    def tell(self, **changes: object) -> None:
        """Change fields of the story, and write it down."""
        told = msgspec.structs.replace(self.now, **changes)
        if told != self.now:
            write_private(self._path, msgspec.json.encode(told))
            self.now = told
