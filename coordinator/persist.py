"""Writing a job's state: one etcd transaction with all that belongs to it, fenced by leadership and by what was read.

A transition's failpoints (`machine.table.failpoint`) are hit before and after its write, so a test can kill the
coordinator on either side of each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.election import Leadership
from moorage.barrier.kv import Compare, KeyValue, Op
from moorage.barrier.twophase import Attempts
from moorage.coordinator.machine.instructions import Commit, Conclude, CreateStart, Instruction, Raise, Say
from moorage.coordinator.machine.state import JobState, encode
from moorage.coordinator.machine.table import NOTE, failpoint
from moorage.errors import Conflict, Fenced, MoorageError, NotFound, Unavailable
from moorage.records import Event, Keys, Outcome

log = structlog.get_logger(__name__)

#: How many events of a job are kept.
KEPT_EVENTS = 1000


class LeadershipLost(Exception):
    """Somebody else leads: this coordinator must not write or order anything any more."""


class OutcomeExists(Exception):
    """The attempt has another outcome already, so nothing was written."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(f"outcome {outcome.kind} of attempt {outcome.attempt} stands")
        self.outcome = outcome


class GenerationMoved(Exception):
    """A prune began since the manifest was confirmed, so nothing was committed."""


class Persistence:
    """Writes the state of one job. ``revision`` is the mod revision of the state that was written or read last."""

    def __init__(self, etcd: EtcdClient, keys: Keys, leadership: Leadership, job: str, revision: int) -> None:
        self._etcd = etcd
        self._keys = keys
        self._leadership = leadership
        self._job = job
        self.revision = revision
        self.attempts = Attempts(etcd, keys, job, by="coordinator")

    async def create(self, state: JobState, spec: bytes, found: Sequence[Instruction], name: KeyValue | None) -> None:
        """Write a new job and take its name; ``name`` is what the name's key holds now.

        Raises `Conflict` when the name was taken meanwhile.
        """
        name_key = self._keys.name(state.name)
        compare = [
            self._leadership.compare(),
            cmp.mod_revision(self._keys.state(self._job), 0),
            cmp.mod_revision(name_key, name.mod_revision if name else 0),
        ]
        ops: list[Op] = [op.put(self._keys.spec(self._job), spec), op.put(name_key, self._job.encode())]
        ops += self._ops(None, state, found)
        await self._hit(found, "before")
        result = await self._etcd.txn(compare, ops, [op.get(self._leadership.key)])
        if not result.succeeded:
            self._check_leader(result.gets[0])
            raise Conflict(f"the name {state.name} was taken just now", "try again")
        self.revision = result.revision
        await self._hit(found, "after")

    async def write(self, old: JobState, new: JobState, found: Sequence[Instruction]) -> None:
        """Write ``new`` over ``old`` with all records of ``found``; when it returns, it is written.

        While etcd is away this goes on trying until the leadership is lost. Raises `LeadershipLost`, `OutcomeExists`,
        `GenerationMoved`.
        """
        await self._hit(found, "before")
        while True:
            try:
                await self._once(old, new, found)
                break
            except (Unavailable, Fenced, NotFound, Conflict) as error:
                log.info("state not written", job=self._job, phase=new.phase, error=str(error))
                if await self._look(old, new, found):
                    break
        await self._hit(found, "after")

    async def _once(self, old: JobState, new: JobState, found: Sequence[Instruction]) -> None:
        if self._leadership.lost.is_set():
            raise LeadershipLost
        fence = self._fence(found)
        ops = self._ops(old, new, found)
        for record in found:
            if isinstance(record, CreateStart):
                generation = await read_generation(self._etcd, self._keys)
                start = msgspec.structs.replace(record.start, store_generation=generation)
                await self.attempts.start(start, fence=fence, also=ops)
                await self._reread(new)
                return
            if isinstance(record, Conclude):
                stands = await self.attempts.conclude(record.outcome, fence=fence, also=ops)
                if stands != record.outcome:
                    raise OutcomeExists(stands)
                await self._reread(new)
                return
        result = await self._etcd.txn(fence, ops)
        if not result.succeeded:
            raise Fenced(f"the state of job {self._job} was not written")
        self.revision = result.revision

    async def _reread(self, new: JobState) -> None:
        kv = await self._etcd.get(self._keys.state(self._job))
        if kv is None or kv.value != encode(new):
            raise Fenced(f"the state of job {self._job} is not what was written")
        self.revision = kv.mod_revision

    async def _look(self, old: JobState, new: JobState, found: Sequence[Instruction]) -> bool:
        """After a failure: True when it is written after all; False to try again."""
        while True:
            if self._leadership.lost.is_set():
                raise LeadershipLost
            try:
                leader = await self._etcd.get(self._leadership.key)
                state = await self._etcd.get(self._keys.state(self._job))
                generation = await read_generation(self._etcd, self._keys)
                break
            except Unavailable as error:
                log.info("etcd is away", job=self._job, error=str(error))
                await asyncio.sleep(0.3)
        self._check_leader(leader)
        if state is not None and state.value == encode(new):
            self.revision = state.mod_revision
            return True
        if state is None or state.mod_revision != self.revision:
            # Only a leader writes it, so there is or was another one.
            log.error("the state was written by another coordinator", job=self._job)
            raise LeadershipLost
        if any(isinstance(record, Commit) and record.generation != generation for record in found):
            raise GenerationMoved
        for record in found:
            if isinstance(record, Conclude):
                stands = await self.attempts.outcome(record.outcome.attempt)
                if stands is not None and stands != record.outcome:
                    raise OutcomeExists(stands)
        await asyncio.sleep(0.1)
        return False

    def _check_leader(self, leader: KeyValue | None) -> None:
        if leader is None or leader.create_revision != self._leadership.epoch:
            raise LeadershipLost

    def _fence(self, found: Sequence[Instruction]) -> list[Compare]:
        fence = [self._leadership.compare(), cmp.mod_revision(self._keys.state(self._job), self.revision)]
        for record in found:
            if isinstance(record, Commit):
                fence.append(cmp.absent(self._keys.checkpoint(self._job, record.checkpoint.checkpoint)))
                fence.append(compare_generation(self._keys, record.generation))
                if not any(isinstance(other, Conclude) for other in found):
                    fence.append(cmp.exists(self._keys.outcome(self._job, record.checkpoint.attempt)))
        return fence

    def _ops(self, old: JobState | None, new: JobState, found: Sequence[Instruction]) -> list[Op]:
        ops: list[Op] = [op.put(self._keys.state(self._job), encode(new))]
        number = old.said if old else 0
        for record in found:
            if isinstance(record, Say) and not record.minor:
                ops.append(op.put(self._event_key(number), msgspec.json.encode(self._event(new, record))))
                if number >= KEPT_EVENTS:
                    ops.append(op.delete(self._event_key(number - KEPT_EVENTS)))
                number += 1
            elif isinstance(record, Raise):
                ops.append(op.put(self._keys.incarnation(self._job), msgspec.json.encode(record.record)))
            elif isinstance(record, Commit):
                name = record.checkpoint.checkpoint
                ops.append(op.put(self._keys.checkpoint(self._job, name), msgspec.json.encode(record.checkpoint)))
                ops.append(op.put(self._keys.latest(self._job), name.encode()))
        return ops

    def _event_key(self, number: int) -> str:
        return f"{self._keys.events(self._job)}{number:010d}"

    @staticmethod
    def _event(state: JobState, say: Say) -> Event:
        return Event(
            time=time.time(),
            kind=say.kind,
            sentence=say.sentence,
            job=state.job,
            owner=state.owner,
            trace=state.trace,
            incarnation=say.incarnation,
            attempt=say.attempt,
            node=say.node,
            data=say.data,
        )

    @staticmethod
    async def _hit(found: Sequence[Instruction], side: str) -> None:
        if not failpoints.enabled():
            return
        moves = [failpoint(r.start, r.finish) for r in found if isinstance(r, Say) and r.start]
        for stem in moves or [NOTE]:
            await failpoints.hit(f"{stem}.{side}")


async def read_generation(etcd: EtcdClient, keys: Keys) -> int:
    """The store's prune generation. Raises `Unavailable`."""
    kv = await etcd.get(keys.store_generation)
    if kv is None:
        return 0
    try:
        return int(kv.value)
    except ValueError:
        raise MoorageError(f"etcd key {keys.store_generation} holds {kv.value!r}, not a number") from None


def compare_generation(keys: Keys, generation: int) -> Compare:
    """The condition that the prune generation is still ``generation``."""
    key = keys.store_generation
    return cmp.value(key, str(generation).encode()) if generation else cmp.absent(key)
