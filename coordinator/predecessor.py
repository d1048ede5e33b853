"""A coordinator that is started again on the same machine does not wait for its dead predecessor's lease to run out.

The state folder's lock is held for as long as the process lives; the kernel lets it go when the process is dead, never
before. So whoever holds the lock knows that the one whose lease stands written in it is dead, and may end that lease:
nobody acts under it any more. Without the lock nothing is assumed, and the lease runs out by itself.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from moorage.barrier.client import EtcdClient
from moorage.errors import MoorageError

log = structlog.get_logger(__name__)


class Predecessor:
    """``with Predecessor(folder, cluster) as predecessor``, around all that a coordinator's process does."""

    def __init__(self, folder: Path, cluster: str) -> None:
        self._path = folder / f"coordinator-{cluster}.lock"
        self._descriptor = -1

    def __enter__(self) -> Self:
        descriptor = -1
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # another one runs here, or there is no such folder: then every term begins unaided
            log.info("no word of a predecessor", path=str(self._path), reason=error.strerror)
            if descriptor >= 0:
                os.close(descriptor)
            return self
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def bury(self, etcd: EtcdClient) -> None:
        """End the lease of the one before, whose process is dead. Raises nothing: at worst the lease is waited out."""
        if self._descriptor < 0:
            return
        written = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
        try:
            if written:
                await etcd.lease_revoke(int(written, 16))
                log.info("the dead predecessor's lease was ended", lease=written)
        except (MoorageError, ValueError) as error:
            log.info("the predecessor's lease runs out by itself", lease=written, reason=str(error))

    def succeed(self, lease: int) -> None:
        """Write down one's own lease, before anything is done under it."""
        if self._descriptor >= 0:
            os.pwrite(self._descriptor, f"{lease:<32x}".encode(), 0)
