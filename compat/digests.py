"""Digests of files, remembered by device, inode, size and change time, so that a file is read once.

A change time cannot be set back by anybody, so a file with the same four has the same content; only one that changed
within the last second is not remembered, because a second change in the same tick would leave the time as it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3

_FRESH_NS: Final = 1_000_000_000
_BLOCK: Final = 16 << 20
#: What a job has mapped may be many GiB (the libraries of CUDA), and its first checkpoint waits for all of it.
_THREADS: Final = max(1, (os.cpu_count() or 1) // 2)
#: Live files above this size (data sets, weights on a shared disk) are sampled: beginning, end and blocks between.
SAMPLED_ABOVE: Final = 256 << 20
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 64 << 10
_MOST: Final = 50_000

Key = tuple[int, int, int, int]


class Digests:
    """Thread-safe. ``file``: where what is known outlives this process; an unreadable one counts as empty."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._known: dict[Key, str] = {}
        self._changed = False
        self.read_bytes = 0  # so far, for those who want to know what the memory saves
        if file is not None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._known = dict(msgspec.msgpack.decode(file.read_bytes(), type=list[tuple[Key, str]]))

    def of(self, fd: int, *, sampled: bool = False) -> tuple[int, str]:
        """Size and digest of an open regular file; ``sampled``: of samples only. Raises `OSError`."""
        status = os.fstat(fd)
        if sampled and status.st_size > SAMPLED_ABOVE:
            return status.st_size, _sample(fd, status.st_size)
        key = (status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns)
        with self._lock:
            known = self._known.get(key)
        if known is not None:
            return status.st_size, known
        digest = self._read(fd)
        after = os.fstat(fd)
        settled = (after.st_size, after.st_ctime_ns) == key[2:] and time.time_ns() - after.st_ctime_ns > _FRESH_NS
        if settled:
            with self._lock:
                self._known[key] = digest
                self._changed = True
                while len(self._known) > _MOST:
                    del self._known[next(iter(self._known))]
        return after.st_size, digest

    def _read(self, fd: int) -> str:
        hasher = blake3(max_threads=_THREADS)
        offset = 0
        while data := os.pread(fd, _BLOCK, offset):
            hasher.update(data)
            offset += len(data)
        with self._lock:
            self.read_bytes += offset
        return hasher.hexdigest()

    def save(self) -> None:
        """Write down what is known, if it is more than before. Raises `OSError`."""
        with self._lock:
            if self._file is None or not self._changed:
                return
            data = msgspec.msgpack.encode(list(self._known.items()))
            self._changed = False
        new = self._file.with_name(f".{self._file.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        new.replace(self._file)


def _sample(fd: int, size: int) -> str:
    hasher = blake3(size.to_bytes(8, "little"))
    for number in range(_SAMPLES + 1):
        offset = (size - _SAMPLE_BYTES) * number // _SAMPLES
        hasher.update(os.pread(fd, _SAMPLE_BYTES, offset))
    return f"sampled:{hasher.hexdigest()}"
