"""The audit trail: who asked for what, allowed or refused. Records of etcd, apart from what happens to jobs.

Written beside the calls and not by them: a call does not wait for its record. Everything is in the coordinator's log
as well, so that what etcd could not take is not lost.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import op
from moorage.barrier.client import EtcdClient
from moorage.barrier.election import Leadership
from moorage.barrier.kv import Put
from moorage.errors import MoorageError
from moorage.records import Event, Keys
from moorage.roles import Attempt

log = structlog.get_logger(__name__)

KEPT_DAYS = 90
_BATCH = 50
_WAITING = 2000  # more are only logged: a flood of refused calls must not fill etcd
_DAY = 86400.0

failpoints.declare("coordinator.audit.before", "coordinator.audit.after")


def event_of(attempt: Attempt) -> Event:
    """The record of one call. Pure."""
    identity = attempt.identity
    what = f"{attempt.method} of job {attempt.job}" if attempt.job else attempt.method
    said = f"did {what}" if attempt.allowed else f"was refused {what}: {attempt.reason}"
    return Event(
        time=attempt.time,
        kind="audit.allowed" if attempt.allowed else "audit.refused",
        sentence=f"{identity} {said}.",
        job=attempt.job,
        owner=attempt.owner,
        trace=attempt.trace,
        data={
            "principal": identity.principal,
            "role": identity.role,
            "serial": f"{identity.serial:x}",
            "method": attempt.method,
            "peer": attempt.peer,
        },
    )


def day_of(seconds: float) -> str:
    """The folder of a moment's records: they are removed day by day. Pure."""
    return time.strftime("%Y%m%d", time.gmtime(seconds))


class Audit:
    """The trail while this coordinator leads."""

    def __init__(self, etcd: EtcdClient, keys: Keys, leadership: Leadership) -> None:
        self._etcd = etcd
        self._keys = keys
        self._leadership = leadership
        self._waiting: asyncio.Queue[Event] = asyncio.Queue(_WAITING)
        self._numbers = itertools.count()

    def put(self, attempt: Attempt) -> None:
        """Note a call. Never waits, never fails."""
        try:
            self._waiting.put_nowait(event_of(attempt))
        except asyncio.QueueFull:
            log.error("audit record not kept", method=attempt.method, caller=str(attempt.identity))

    async def run(self) -> None:
        """Write what is noted, until cancelled."""
        await self._forget()
        today = day_of(time.time())
        while True:
            events = [await self._waiting.get()]
            while len(events) < _BATCH and not self._waiting.empty():
                events.append(self._waiting.get_nowait())
            await failpoints.hit("coordinator.audit.before")
            await self._write(events)
            await failpoints.hit("coordinator.audit.after")
            if (now := day_of(time.time())) != today:
                today = now
                await self._forget()

    async def _write(self, events: Iterable[Event]) -> None:
        ops = [
            op.put(f"{self._keys.audit}{day_of(event.time)}/{self._key(event)}", msgspec.json.encode(event))
            for event in events
        ]
        try:
            await self._etcd.txn([self._leadership.compare()], ops)
        except MoorageError as error:
            # Keys are its own: a record that was written all the same is no harm, and the log has it.
            log.error("audit records not kept", count=len(ops), error=str(error))

    def _key(self, event: Event) -> str:
        return f"{int(event.time * 1e9):020d}-{self._leadership.epoch:x}-{next(self._numbers):06d}"

    async def _forget(self) -> None:
        """Remove the days that are older than `KEPT_DAYS`."""
        oldest = day_of(time.time() - KEPT_DAYS * _DAY)
        try:
            while items := (await self._etcd.list(self._keys.audit, keys_only=True, limit=1)).items:
                day = items[0].key.removeprefix(self._keys.audit).partition("/")[0]
                if day >= oldest:
                    return
                await self._etcd.delete_prefix(f"{self._keys.audit}{day}/")
        except MoorageError as error:
            log.warning("old audit records stay", error=str(error))

    async def read(self, job: str = "", *, follow: bool = False) -> AsyncIterator[Event]:
        """The kept records, oldest first (``job``: about this one only); with ``follow`` new ones for ever."""
        listing = await self._etcd.list(self._keys.audit)
        for kv in listing.items:
            event = msgspec.json.decode(kv.value, type=Event)
            if not job or event.job == job:
                yield event
        if not follow:
            return
        async with aclosing(self._etcd.watch(self._keys.audit, since=listing.revision + 1)) as batches:
            async for batch in batches:
                for put in batch.events:
                    if isinstance(put, Put):
                        event = msgspec.json.decode(put.kv.value, type=Event)
                        if not job or event.job == job:
                            yield event
