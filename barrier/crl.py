"""The authority's revocation list on its way to every server: from the authority's folder into etcd, and from there
into the file that lies beside each server's certificates.

Whoever leads and has the authority publishes; everybody follows. A list is taken only if the authority signed it and
it revokes at least as much as the one that is there.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import structlog

from moorage import failpoints
from moorage.barrier.client import EtcdClient
from moorage.barrier.kv import Put
from moorage.errors import MoorageError
from moorage.records import Keys
from moorage.tls import CRL_FILE, TlsFiles, stamp

log = structlog.get_logger(__name__)
_LOOK_SECONDS = 2.0

failpoints.declare("coordinator.crl.before", "coordinator.crl.after")


def newer(data: bytes, tls: TlsFiles) -> bool:
    """Whether ``data`` is a list of the authority that should replace the one beside ``tls``. Raises `Forbidden`."""
    from moorage.trust import read_crl

    ca = Path(tls.ca).read_bytes()
    number = read_crl(data, ca)[0]
    if not tls.crl.exists():
        return True
    try:
        return number > read_crl(tls.crl.read_bytes(), ca)[0]
    except MoorageError:
        return True


class Publisher:
    """Puts the authority's list into etcd whenever it changes; for the coordinator that leads."""

    def __init__(self, etcd: EtcdClient, keys: Keys, authority: str) -> None:
        self._etcd = etcd
        self._keys = keys
        self._path = Path(authority) / CRL_FILE if authority else None

    async def publish(self) -> None:
        """Put it there if etcd has another one. Does not raise when etcd is away: `run` tries again."""
        if self._path is None:
            return
        try:
            data = await asyncio.to_thread(self._path.read_bytes)
            held = await self._etcd.get(self._keys.crl)
            if held is None or held.value != data:
                await failpoints.hit("coordinator.crl.before")
                await self._etcd.put(self._keys.crl, data)
                await failpoints.hit("coordinator.crl.after")
        except (MoorageError, OSError) as error:
            log.warning("revocation list not published", error=str(error))

    async def run(self) -> None:
        """Look at the file for ever."""
        seen: object = None
        while self._path is not None:
            if (now := stamp(self._path)) != seen:
                await self.publish()
                seen = now
            await asyncio.sleep(_LOOK_SECONDS)


async def follow(etcd: EtcdClient, keys: Keys, tls: TlsFiles) -> None:
    """Lay every new list beside the certificates, until cancelled."""
    while True:
        try:
            listing = await etcd.list(keys.crl)
            for kv in listing.items:
                await asyncio.to_thread(_take, kv.value, tls)
            async with aclosing(etcd.watch(keys.crl, since=listing.revision + 1)) as batches:
                async for batch in batches:
                    found = [event.kv for event in batch.events if isinstance(event, Put)]
                    for kv in batch.relisted.items if batch.relisted else found:
                        await asyncio.to_thread(_take, kv.value, tls)
        except MoorageError as error:
            log.info("revocation list cannot be followed", error=str(error))
        await asyncio.sleep(_LOOK_SECONDS)


def _take(data: bytes, tls: TlsFiles) -> None:
    from moorage.trust import write_private

    try:
        if newer(data, tls):
            write_private(tls.crl, data)
            log.info("a new revocation list is in force", path=str(tls.crl))
    except (MoorageError, OSError) as error:
        log.error("a revocation list is not taken", error=str(error))
