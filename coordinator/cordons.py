"""Which nodes are out of service: nothing new is placed there until somebody takes the cordon away."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import op
from moorage.barrier.kv import Op
from moorage.errors import NotFound
from moorage.records import CordonRecord

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

failpoints.declare("coordinator.cordon.before", "coordinator.cordon.after")

#: How many keys one transaction writes at most; etcd's own limit is 128.
CHUNK = 64


class Cordons:
    """The cordons of the cluster. Only the leader writes them, so what it has in memory is what etcd holds."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._there: dict[str, CordonRecord] = {}

    def __contains__(self, node: str) -> bool:
        return node in self._there

    def get(self, node: str) -> CordonRecord | None:
        """The node's cordon."""
        return self._there.get(node)

    async def load(self) -> None:
        """Read them all. Raises `Unavailable`."""
        listing = await self._leader.etcd.list(self._leader.keys.cordons)
        records = (msgspec.json.decode(kv.value, type=CordonRecord) for kv in listing.items)
        self._there = {record.node: record for record in records}

    def require(self, nodes: Iterable[str]) -> None:
        """Raise `NotFound` for a node that nobody knows."""
        if missing := [node for node in nodes if node not in self._leader.nodes.known and node not in self._there]:
            raise NotFound(f"no node {', '.join(missing)}", "moorage nodes lists all of them")

    async def put(self, nodes: Iterable[str], *, reason: str, by: str, drain: str = "") -> None:
        """Cordon nodes; one that is cordoned stays as it is. Raises `NotFound`, `Unavailable`, `LeadershipLost`."""
        wanted = [node for node in nodes if node not in self._there]
        self.require(wanted)
        now = time.time()
        records = [CordonRecord(node=node, reason=reason, by=by, time=now, drain=drain) for node in wanted]
        ops: list[Op] = [op.put(self._leader.keys.cordon(r.node), msgspec.json.encode(r)) for r in records]
        await self._write(ops)
        self._there |= {record.node: record for record in records}
        self._told(wanted, "cordoned")

    async def remove(self, nodes: Iterable[str]) -> None:
        """Take nodes into service again. Raises `NotFound`, `Unavailable`, `LeadershipLost`."""
        nodes = list(nodes)
        self.require(nodes)
        there = [node for node in nodes if node in self._there]
        await self._write([op.delete(self._leader.keys.cordon(node)) for node in there])
        for node in there:
            del self._there[node]
        self._told(there, "uncordoned")

    async def _write(self, ops: list[Op]) -> None:
        for at in range(0, len(ops), CHUNK):
            await failpoints.hit("coordinator.cordon.before")
            result = await self._leader.etcd.txn([self._leader.leadership.compare()], ops[at : at + CHUNK])
            await failpoints.hit("coordinator.cordon.after")
            if not result.succeeded:
                await self._leader.verify()

    def _told(self, nodes: list[str], what: str) -> None:
        for node in nodes:
            log.info(f"node is {what}", node=node)
        if nodes:
            self._leader.nodes.changed.ring()  # whoever waits for a node looks again
