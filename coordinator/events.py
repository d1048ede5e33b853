"""Reading the story of jobs from etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from moorage.barrier.kv import Put
from moorage.records import Event

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader


async def read(leader: Leader, job: Job | None, *, follow: bool) -> AsyncIterator[Event]:
    """The kept events of one job, or of all, oldest first; with ``follow`` new ones until the job is over."""
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
    if not follow or (job.state.over and told + 1 >= job.state.said):
        return
    async with aclosing(leader.etcd.watch(prefix, since=listing.revision + 1)) as batches:
        async for batch in batches:
            puts = [event.kv for event in batch.events if isinstance(event, Put)]
            for kv in batch.relisted.items if batch.relisted else puts:
                number = int(kv.key.removeprefix(prefix))
                if number > told:
                    told = number
                    yield _decode(kv.value)
            if job.state.over and told + 1 >= job.state.said:
                return


async def _all(leader: Leader, *, follow: bool) -> AsyncIterator[Event]:
    found: list[Event] = []
    revision = 0
    for name in sorted(leader.jobs):
        listing = await leader.etcd.list(leader.keys.events(name))
        revision = revision or listing.revision
        found += [_decode(kv.value) for kv in listing.items]
    newest = 0.0
    for event in sorted(found, key=lambda event: event.time):
        newest = event.time
        yield event
    if not follow:
        return
    revision = revision or (await leader.etcd.list(leader.keys.names, limit=1)).revision
    async with aclosing(leader.etcd.watch(leader.keys.jobs, since=revision + 1)) as batches:
        async for batch in batches:
            puts = [event.kv for event in batch.events if isinstance(event, Put)]
            for kv in batch.relisted.items if batch.relisted else puts:
                if "/events/" in kv.key and (event := _decode(kv.value)).time > newest:
                    yield event


def _decode(value: bytes) -> Event:
    return msgspec.json.decode(value, type=Event)
