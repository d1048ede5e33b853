"""Reading the story of jobs from etcd."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from moorage.barrier.kv import KeyValue, Put, WatchBatch
from moorage.records import Event

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

#: So long a job that failed is waited for, where somebody else than moorage brings it back.
_KEPT_SECONDS = 30.0


async def read(leader: Leader, job: Job | None, *, follow: bool) -> AsyncIterator[Event]:
    """The kept events of one job, or of all, oldest first; with ``follow`` new ones until the job is over. One that has
    failed is waited for if somebody keeps it."""
    if job is None:
        async for event in _all(leader, follow=follow):
            yield event
        return
    prefix = leader.keys.events(job.id)
    listing = await leader.etcd.list(prefix)
    told = -1
    for kv in listing.items:
        told = int(kv.key.removeprefix(prefix))
        yield _decode(kv.value)
    if not follow:
        return
    async with aclosing(leader.etcd.watch(prefix, since=listing.revision + 1)) as batches:
        coming: asyncio.Future[WatchBatch] | None = None
        try:
            while True:
                # Etcd may show the last event before this coordinator knows that its write succeeded, and so before the
                # job is over here: what ends the stream may be either of the two.
                seen = job.changed.rung
                patience = _patience(job, told)
                if patience is not None and patience <= 0:
                    return
                coming = coming or asyncio.ensure_future(anext(batches))
                if not await _first(coming, job, seen, patience):
                    continue
                batch, coming = coming.result(), None
                for kv in _written(batch):
                    number = int(kv.key.removeprefix(prefix))
                    if number > told:
                        told = number
                        yield _decode(kv.value)
        finally:
            if coming is not None:  # a generator that still runs cannot be closed
                coming.cancel()
                await asyncio.wait([coming])


def _patience(job: Job, told: int) -> float | None:
    """For how many seconds more is to come; None: until the job is over. One that has failed may be brought back by
    whoever keeps it, which is the same story."""
    state = job.state
    if not state.over or told + 1 < state.said:
        return None
    if state.phase != "failed" or not state.policy.keeper:
        return 0.0
    return state.ended + _KEPT_SECONDS - time.time()


async def _first(coming: asyncio.Future[WatchBatch], job: Job, seen: int, seconds: float | None) -> bool:
    """Wait for the next batch, the next change of the job or the end of the time; whether it was the batch."""
    changed = asyncio.create_task(job.changed.wait(seen))
    either: set[asyncio.Future[Any]] = {coming, changed}
    try:
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return coming.done()
    finally:
        changed.cancel()
        await asyncio.wait([changed])


def _written(batch: WatchBatch) -> Iterable[KeyValue]:
    if batch.relisted is not None:
        return batch.relisted.items
    return [event.kv for event in batch.events if isinstance(event, Put)]


def _place(kv: KeyValue) -> tuple[str, int]:
    folder, _, number = kv.key.rpartition("/")
    return folder, int(number)


async def _all(leader: Leader, *, follow: bool) -> AsyncIterator[Event]:
    found: list[Event] = []
    told: dict[str, int] = {}
    revision = 0
    for name in sorted(leader.jobs):
        listing = await leader.etcd.list(leader.keys.events(name))
        revision = revision or listing.revision
        found += [_decode(kv.value) for kv in listing.items]
        told |= dict(map(_place, listing.items))
    for event in sorted(found, key=lambda event: event.time):
        yield event
    if not follow:
        return
    revision = revision or (await leader.etcd.list(leader.keys.names, limit=1)).revision
    async with aclosing(leader.etcd.watch(leader.keys.jobs, since=revision + 1)) as batches:
        async for batch in batches:
            for kv in _written(batch):
                if "/events/" not in kv.key:
                    continue
                # By number: of two jobs' events the one that is written later may bear the earlier time.
                folder, number = _place(kv)
                if number > told.get(folder, -1):
                    told[folder] = number
                    yield _decode(kv.value)


def _decode(value: bytes) -> Event:
    return msgspec.json.decode(value, type=Event)
