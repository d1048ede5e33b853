"""Write the parts of a pull into a folder, without ever leaving it."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from moorage.errors import MoorageError
from moorage.v1 import worker_pb2


class Receiver:
    """Takes `FilePart` messages in order. A file appears under its name only when it is whole."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: tuple[str, Path, BinaryIO] | None = None
        self._mode = 0
        self._modified = 0.0
        self._files: dict[str, None] = {}
        self.bytes = 0  # that came so far

    @property
    def files(self) -> list[str]:
        """What has arrived whole, in the order in which it came."""
        return list(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def _target(self, name: str) -> Path:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise MoorageError(f"the node sent a path that leaves the folder: {name!r}")
        target = self._root.joinpath(*pure.parts)
        for parent in target.relative_to(self._root).parents:
            if self._root.joinpath(parent).is_symlink():
                raise MoorageError(f"{self._root / parent} is a symbolic link", "pull into an empty folder")
        return target

    def accept(self, part: worker_pb2.FilePart) -> None:
        """Take one part. Raises `MoorageError` for a path that leaves the folder, `OSError`."""
        # Only a file's first part has a mode. The same file may begin twice: a broken stream is sent from its start.
        if self._open is None or self._open[0] != part.path or part.mode:
            self._begin(part)
        if self._open is not None:
            _, target, file = self._open
            file.write(part.data)
            self.bytes += len(part.data)
            if part.last:
                file.close()
                self._open = None
                temporary = target.with_name(target.name + ".moorage-part")
                temporary.chmod(stat.S_IMODE(self._mode) & 0o777 or 0o600)
                os.utime(temporary, (self._modified, self._modified))
                temporary.replace(target)
                self._files[part.path] = None

    def _begin(self, part: worker_pb2.FilePart) -> None:
        self.close()
        target = self._target(part.path)
        self._mode, self._modified = part.mode, part.modified
        if stat.S_ISDIR(part.mode):
            target.mkdir(parents=True, exist_ok=True)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(part.mode):
            target.unlink(missing_ok=True)
            target.symlink_to(part.link_target)
            self._files[part.path] = None
            return
        temporary = target.with_name(target.name + ".moorage-part")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._open = (part.path, target, os.fdopen(descriptor, "wb"))

    def close(self) -> None:
        """Drop a file that did not arrive whole."""
        if self._open is not None:
            _, target, file = self._open
            file.close()
            target.with_name(target.name + ".moorage-part").unlink(missing_ok=True)
            self._open = None
