"""Which nodes are live, from their registrations in etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import msgspec
import structlog

from moorage.barrier import clock
from moorage.barrier.client import EtcdClient
from moorage.barrier.kv import KeyValue, Listing, Put
from moorage.coordinator.bell import Bell
from moorage.errors import MoorageError
from moorage.records import Keys, NodeRecord

log = structlog.get_logger(__name__)


class Nodes:
    """The live nodes. A callback runs for each node that is lost and for each registration that is new.

    ``gone_since``: CLOCK_BOOTTIME seconds at which a registration was first seen to be missing.
    """

    def __init__(self, etcd: EtcdClient, keys: Keys) -> None:
        self._etcd = etcd
        self._keys = keys
        self.live: dict[str, NodeRecord] = {}
        self.known: dict[str, NodeRecord] = {}
        self.changed = Bell()
        self.on_lost: Callable[[str], None] = lambda node: None
        self.on_live: Callable[[NodeRecord], None] = lambda record: None
        self._gone: dict[str, float] = {}
        self._began = clock.now()
        self._revision = 0

    async def list(self) -> None:
        """Read all registrations. Raises `Unavailable`."""
        self._began = clock.now()
        listing = await self._etcd.list(self._keys.nodes)
        self._revision = listing.revision
        self._replace(listing)

    async def follow(self) -> None:
        """Keep up with etcd from the last `list` on; never ends by itself."""
        while True:
            try:
                async with aclosing(self._etcd.watch(self._keys.nodes, since=self._revision + 1)) as batches:
                    async for batch in batches:
                        if batch.relisted is not None:
                            self._replace(batch.relisted)
                        for event in batch.events:
                            if isinstance(event, Put):
                                self._put(event.kv)
                            else:
                                self._remove(event.key.removeprefix(self._keys.nodes))
                        self._revision = max(self._revision, batch.revision)
            except MoorageError as error:
                log.warning("watch of the nodes failed", error=str(error))
                await asyncio.sleep(1.0)

    def gone_since(self, node: str) -> float:
        """When the node was seen to be gone; for one that never was there: when this coordinator began to look."""
        return self._gone.get(node, self._began)

    async def registered(self, node: str) -> bool:
        """Ask etcd now, past anything that the watch may lag behind. Raises `Unavailable`."""
        return await self._etcd.get(self._keys.node(node)) is not None

    def _replace(self, listing: Listing) -> None:
        found = {kv.key.removeprefix(self._keys.nodes) for kv in listing.items}
        for node in [node for node in self.live if node not in found]:
            self._remove(node)
        for kv in listing.items:
            self._put(kv)

    def _put(self, kv: KeyValue) -> None:
        try:
            record = msgspec.json.decode(kv.value, type=NodeRecord)
        except msgspec.DecodeError as error:
            log.warning("a registration cannot be read", key=kv.key, error=str(error))
            return
        before = self.live.get(record.node)
        self.live[record.node] = self.known[record.node] = record
        self._gone.pop(record.node, None)
        if before != record:
            log.info("node is live", node=record.node, endpoint=record.endpoint, session=record.session)
            self.on_live(record)
        self.changed.ring()

    def _remove(self, node: str) -> None:
        if self.live.pop(node, None) is None:
            return
        self._gone[node] = clock.now()
        log.warning("node is gone", node=node)
        self.on_lost(node)
        self.changed.ring()
