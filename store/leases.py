"""Leases: how prune knows who is reading and writing. The caller may bring a keeper of its own (over etcd, say).

A lease is created first, and only then does its holder look at the store; prune first writes down what it condemns, and
only then looks at the leases. So one of the two always sees the other.

`FileLeases` keeps them as files in the store. A lease is alive while its file's time is younger than
`TTL_SECONDS` by the store's own clock; the holder stops trusting it sooner, by its own clock (`Lease.valid`).
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import structlog

from moorage.errors import CorruptData, MoorageError, NotFound, Unavailable
from moorage.store.backend import Backend
from moorage.store.sealing import NONCE_BYTES, Sealer

TTL_SECONDS = 90.0
_TRUST_SECONDS = 45.0
_RENEW_SECONDS = 10.0
_log = structlog.get_logger(__name__)

Role = Literal["read", "write", "prune"]


class LeaseInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What others see. ``roots`` are global manifests that the holder needs (for prune: those that it keeps)."""

    id: str  # 24 hex digits; the packs of a writer begin with it
    role: Role
    label: str
    host: str = ""
    roots: list[str] = []


class Lease(Protocol):
    """One's own lease, renewed in the background until `close`."""

    @property
    def info(self) -> LeaseInfo: ...

    def valid(self) -> bool:
        """False: it may have expired in the eyes of others. What was written under it must not be finished."""

    def close(self) -> None:
        """Give it back. Raises nothing."""


class LeaseKeeper(Protocol):
    """Gives leases and lists those that are alive."""

    def acquire(self, role: Role, label: str, roots: Sequence[str] = ()) -> Lease: ...

    def active(self) -> list[LeaseInfo]: ...


def new_lease_id() -> str:
    return secrets.token_hex(12)


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _FileLease:
    def __init__(self, info: LeaseInfo, close: Callable[[_FileLease], None]) -> None:
        self._info = info
        self._close = close
        self.renewed = _clock()

    @property
    def info(self) -> LeaseInfo:
        return self._info

    def valid(self) -> bool:
        return _clock() - self.renewed < _TRUST_SECONDS

    def close(self) -> None:
        self._close(self)


class FileLeases:
    """Leases as files ``leases/<id>`` of the store itself. One thread renews all leases of this keeper."""

    def __init__(self, backend: Backend, sealer: Sealer | None = None) -> None:
        self._backend = backend
        self._sealer = sealer
        self._held: dict[str, _FileLease] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    def acquire(self, role: Role, label: str, roots: Sequence[str] = ()) -> _FileLease:
        info = LeaseInfo(id=new_lease_id(), role=role, label=label, host=socket.gethostname(), roots=list(roots))
        lease = _FileLease(info, self._release)
        # Not durable: after a loss of power its holder is gone as well.
        if not self._backend.put(_name(info.id), self._encoded(info), durable=False):
            raise Unavailable(f"lease {info.id} exists already", "try again")
        with self._lock:
            self._held[info.id] = lease
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="store-leases", daemon=True)
                self._thread.start()
        return lease

    def active(self) -> list[LeaseInfo]:
        now = self._backend.now()
        found = []
        for entry in self._backend.list("leases"):
            if now - entry.modified < TTL_SECONDS:
                try:
                    found.append(self._decoded(entry.name, self._backend.get(entry.name)))
                except NotFound:
                    continue  # given back while we looked
                except (CorruptData, msgspec.MsgspecError):
                    # Half a lease cannot exist; one of a later release may look different. It counts.
                    found.append(LeaseInfo(id=entry.name.rpartition("/")[2], role="write", label="unreadable"))
        return found

    def _encoded(self, info: LeaseInfo) -> bytes:
        data = msgspec.json.encode(info)
        if self._sealer is None:
            return data
        nonce = self._sealer.nonce()
        return nonce + self._sealer.seal(nonce, data, _name(info.id).encode())

    def _decoded(self, name: str, data: bytes) -> LeaseInfo:
        if self._sealer is not None:
            data = self._sealer.open(data[:NONCE_BYTES], data[NONCE_BYTES:], name.encode(), name)
        return msgspec.json.decode(data, type=LeaseInfo)

    def expired(self) -> list[str]:
        """Names of lease files whose holder is gone for good, for prune to remove."""
        now = self._backend.now()
        return [entry.name for entry in self._backend.list("leases") if now - entry.modified > 2 * TTL_SECONDS]

    def _release(self, lease: _FileLease) -> None:
        with self._lock:
            self._held.pop(lease.info.id, None)
            self._wake.notify()
        try:
            self._backend.delete(_name(lease.info.id))
        except MoorageError as error:
            _log.warning("lease not removed; it expires", lease=lease.info.id, error=str(error))

    def _renew(self) -> None:
        while True:
            with self._lock:
                self._wake.wait(_RENEW_SECONDS)
                if not self._held:
                    self._thread = None
                    return
                due = [lease for lease in self._held.values() if _clock() - lease.renewed > _RENEW_SECONDS / 2]
            for lease in due:
                before = _clock()
                try:
                    # A lease whose file is gone was taken for dead: it is not revived, and becomes invalid.
                    if self._backend.touch(_name(lease.info.id)):
                        lease.renewed = before
                except MoorageError as error:
                    _log.warning("lease not renewed", lease=lease.info.id, error=str(error))


def _name(lease: str) -> str:
    return f"leases/{lease}"
