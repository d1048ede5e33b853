"""The staging folder of a capture: small files packed together, large ones copied one by one beside the walk."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from moorage.worker.layers import syscalls
from moorage.worker.layers.extents import copy_range, gather, read_exactly
from moorage.worker.layers.tree import Data

SMALL = 256 << 10  # data of at most so many bytes goes into a pack
PACK = 32 << 20
_COPIES = 4
_WAITING = 64  # copies under way at most: each holds a descriptor

Extents = tuple[tuple[int, int], ...]


class StagedFile(msgspec.Struct, frozen=True):
    """One file in staging that the store must take in. ``size`` in bytes."""

    path: Path
    key: str
    size: int


class Staging:
    """Takes the data of files into a new folder. End with `finish`, or `abort`, which deletes everything."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        self.files: list[StagedFile] = []
        self._token = secrets.token_hex(6)  # keys live on in later captures: never the same one twice
        self._pack = -1  # descriptor of the pack that is being filled
        self._pack_at = 0  # its place in `files`
        self._filled = 0
        self._pool = ThreadPoolExecutor(_COPIES, thread_name_prefix="layers-copy")
        self._copies: deque[Future[None]] = deque()

    def take(self, fd: int, size: int, extents: Extents | None) -> Data | None:
        """Take the data of the open file ``fd``; None when it has none. A large file is copied after the return."""
        length = size if extents is None else sum(part for _, part in extents)
        if length == 0:
            return None
        if length <= SMALL:
            parts = ((0, size),) if extents is None else extents
            return self._append(b"".join(read_exactly(fd, start, part) for start, part in parts), extents)
        staged = self._new_file(length)
        if len(self._copies) >= _WAITING:
            self._copies.popleft().result()
        self._copies.append(self._pool.submit(_copy, os.dup(fd), staged.path, size, extents))
        return Data(staged.key, 0, extents)

    def finish(self) -> None:
        """Wait until all data is in the folder."""
        self._close_pack()
        while self._copies:
            self._copies.popleft().result()
        self._pool.shutdown()

    def abort(self) -> None:
        """Delete the folder."""
        self._pool.shutdown(cancel_futures=True)
        if self._pack >= 0:
            os.close(self._pack)
            self._pack = -1
        shutil.rmtree(self.folder, ignore_errors=True)

    def _new_file(self, size: int) -> StagedFile:
        key = f"{self._token}-{len(self.files)}"
        staged = StagedFile(self.folder / key, key, size)
        self.files.append(staged)
        return staged

    def _append(self, data: bytes, extents: Extents | None) -> Data:
        if self._pack < 0:
            self._pack_at = len(self.files)
            self._pack = os.open(self._new_file(0).path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        offset, written = self._filled, 0
        while written < len(data):
            written += os.write(self._pack, data[written:] if written else data)
        self._filled += len(data)
        key = self.files[self._pack_at].key
        if self._filled >= PACK:
            self._close_pack()
        return Data(key, offset, extents)

    def _close_pack(self) -> None:
        if self._pack >= 0:
            self.files[self._pack_at] = msgspec.structs.replace(self.files[self._pack_at], size=self._filled)
            os.close(self._pack)
            self._pack, self._filled = -1, 0


def _copy(source: int, path: Path, size: int, extents: Extents | None) -> None:
    try:
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if extents is not None:
                gather(source, target, extents)
            elif not syscalls.clone(source, target):
                copy_range(source, target, 0, size, 0)
        finally:
            os.close(target)
    finally:
        os.close(source)
