"""Leader election: the candidate whose key under the prefix is the oldest leads.

A leader may not know yet that it no longer leads. So leadership is worth nothing unless every write compares it: put
`Leadership.compare` into each transaction. The key's create revision never comes again and only grows from leader to
leader: it is the epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from moorage import failpoints
from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.kv import Compare, Deleted, KeyValue
from moorage.barrier.session import Lost, Session
from moorage.errors import MoorageError, Unavailable

log = structlog.get_logger(__name__)

failpoints.declare(
    "barrier.election.enter.before",
    "barrier.election.enter.after",
    "barrier.election.elected",
    "barrier.election.resign.before",
    "barrier.election.resign.after",
)


class Leadership:
    """What `campaign` returns. ``lost`` is set when the session is lost or the key was deleted; never cleared."""

    def __init__(self, client: EtcdClient, session: Session, key: str, epoch: int) -> None:
        self._client = client
        self._session = session
        self.key = key
        self.epoch = epoch
        self.lost = Lost(session.lost)
        self._tasks = [
            asyncio.create_task(self._follow_session(), name="leadership: session"),
            asyncio.create_task(self._follow_key(), name="leadership: key"),
        ]

    def compare(self) -> Compare:
        """The condition that makes a transaction fail once this leadership is over."""
        return cmp.create_revision(self.key, self.epoch)

    async def _follow_session(self) -> None:
        await self._session.lost.wait()
        self.lost.set()

    async def _follow_key(self) -> None:
        try:
            await self._until_deleted()
            log.warning("the leader key was deleted", key=self.key, epoch=self.epoch)
        except MoorageError as error:
            log.warning("the leader key cannot be watched", key=self.key, epoch=self.epoch, error=str(error))
        self.lost.set()

    async def _until_deleted(self) -> None:
        async with aclosing(self._client.watch(self.key, since=self.epoch + 1)) as batches:
            async for batch in batches:
                gone = any(isinstance(event, Deleted) and event.key == self.key for event in batch.events)
                if batch.relisted is not None:
                    gone = not any(
                        kv.key == self.key and kv.create_revision == self.epoch for kv in batch.relisted.items
                    )
                if gone:
                    return

    async def resign(self) -> None:
        """Give leadership up: ``lost`` is set first, then the key is deleted. Does not raise if etcd is away."""
        self.lost.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await failpoints.hit("barrier.election.resign.before")
        await _withdraw(self._client, self.key, self.epoch)
        await failpoints.hit("barrier.election.resign.after")


async def _withdraw(client: EtcdClient, key: str, epoch: int) -> None:
    """``epoch`` 0: it is not known. The key carries the session's lease id, so it is never someone else's."""
    try:
        await client.txn([cmp.create_revision(key, epoch) if epoch else cmp.exists(key)], [op.delete(key)])
    except MoorageError as error:
        log.info("leader key not deleted, it ends with its lease", key=key, error=str(error))


async def campaign(client: EtcdClient, session: Session, prefix: str, value: bytes) -> Leadership:
    """Stand for election under ``prefix`` and return when elected. ``value`` is what `observe` shows to others.

    Raises `Unavailable` when the session is lost meanwhile. When cancelled, it takes its candidacy back.
    """
    key = f"{prefix}{session.lease:016x}"
    epoch = 0
    waiting = asyncio.ensure_future(session.lost.wait())
    try:
        epoch = await _enter(client, session, key, value)
        elected = asyncio.ensure_future(_wait_for_turn(client, prefix, key, epoch))
        try:
            await asyncio.wait({elected, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not elected.done():
                elected.cancel()
                await asyncio.gather(elected, return_exceptions=True)
        if session.lost.is_set() or elected.cancelled():
            raise Unavailable("the session in etcd was lost during the election")
        elected.result()
        await failpoints.hit("barrier.election.elected")
        log.info("elected", key=key, epoch=epoch)
        return Leadership(client, session, key, epoch)
    except BaseException:
        if not session.lost.is_set():
            await asyncio.shield(_withdraw(client, key, epoch))
        raise
    finally:
        waiting.cancel()


async def _enter(client: EtcdClient, session: Session, key: str, value: bytes) -> int:
    await failpoints.hit("barrier.election.enter.before")
    result = await client.txn([cmp.absent(key)], [op.put(key, value, session.lease)], [op.get(key)])
    await failpoints.hit("barrier.election.enter.after")
    if result.succeeded:
        return result.revision
    found = result.gets[0]
    assert found is not None
    if found.value != value:  # an earlier candidacy of the same session
        await client.put(key, value, lease=session.lease)
    return found.create_revision


def _standing(items: tuple[KeyValue, ...]) -> list[KeyValue]:
    return sorted(items, key=lambda kv: kv.create_revision)


async def _wait_for_turn(client: EtcdClient, prefix: str, key: str, epoch: int) -> None:
    """Wait until no older candidate is left: each candidate watches only the one before it."""
    while True:
        listing = await client.list(prefix)
        if not any(kv.key == key and kv.create_revision == epoch for kv in listing.items):
            raise Unavailable("the candidacy in etcd was deleted during the election")
        older = [kv for kv in _standing(listing.items) if kv.create_revision < epoch]
        if not older:
            return
        async with aclosing(client.watch(older[-1].key, since=listing.revision + 1)) as batches:
            async for batch in batches:
                if batch.relisted is not None or any(isinstance(event, Deleted) for event in batch.events):
                    break


async def observe(client: EtcdClient, prefix: str) -> AsyncGenerator[tuple[int, bytes] | None, None]:
    """The leader's ``(epoch, value)``, or None while there is none: now, and again after each change."""
    listing = await client.list(prefix)
    candidates = {kv.key: kv for kv in listing.items}
    seen: tuple[int, bytes] | None = None
    first = True
    async with aclosing(client.watch(prefix, since=listing.revision + 1)) as batches:
        while True:
            leader = next(iter(_standing(tuple(candidates.values()))), None)
            now = (leader.create_revision, leader.value) if leader else None
            if first or now != seen:
                yield now
            first, seen = False, now
            batch = await anext(batches)
            if batch.relisted is not None:
                candidates = {kv.key: kv for kv in batch.relisted.items}
            for event in batch.events:
                if isinstance(event, Deleted):
                    candidates.pop(event.key, None)
                else:
                    candidates[event.kv.key] = event.kv
