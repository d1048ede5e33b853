"""The two-phase barrier in etcd: start, votes, and one outcome for each attempt.

Safety rests on etcd's transactions alone, never on who is alive or what time it is:

* ``outcome`` is created, never changed, so an attempt has at most one, and all who look see the same.
* ``resume`` and ``stop`` are created by one transaction that compares the leader's key (the caller's ``fence``), the
  job's incarnation and the attempt's start. ``abort`` compares only the start: everyone may abort, at any time.
* A vote is created, never changed, so a doubled or late vote finds its place taken or its attempt closed.
* An attempt's keys are removed in one transaction, and only when it has an outcome.

Every key belongs to one pod, and no transaction has more operations when there are more pods.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import clock, cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.decision import Decision, Step, Tally, decide, tally
from moorage.barrier.kv import Compare, Deleted, KeyValue, Op
from moorage.errors import Conflict, Fenced, MoorageError, NotFound, Unavailable
from moorage.records import AttemptStart, IncarnationRecord, Keys, Outcome, Vote

__all__ = ["Attempts", "Decision", "Tally", "decide", "tally"]

log = structlog.get_logger(__name__)

failpoints.declare(
    *(
        f"barrier.{step}.{side}"
        for step in ("start", "vote.captured", "vote.persisted", "outcome", "abort", "forget")
        for side in ("before", "after")
    )
)

_KEPT = 8  # start records kept in memory

A = TypeVar("A")
T = TypeVar("T")


def _decode(kv: KeyValue, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(kv.value, type=kind)
    except msgspec.DecodeError as error:
        raise MoorageError(f"etcd key {kv.key} does not hold a {kind.__name__}: {error}") from error


class Attempts:
    """The attempts of one job. ``by`` names this process in outcomes that it creates itself (a node's name).

    Start records never change, so each is read from etcd once and kept.
    """

    def __init__(self, client: EtcdClient, keys: Keys, job: str, *, by: str = "") -> None:
        self._client = client
        self._keys = keys
        self._job = job
        self._by = by
        self._starts: dict[int, tuple[AttemptStart, int]] = {}

    async def start(self, start: AttemptStart, *, fence: Sequence[Compare], also: Sequence[Op] = ()) -> None:
        """Create an attempt, together with ``also``.

        Raises `Fenced` when ``fence`` fails or the job's incarnation is not ``start.incarnation``, `Conflict` when the
        attempt's number is taken by another record.
        """
        key, inc_key = self._keys.start(self._job, start.attempt), self._keys.incarnation(self._job)
        value = msgspec.json.encode(start)
        while True:
            incarnation = await self._client.get(inc_key)
            self._check_incarnation(incarnation, start.incarnation)
            assert incarnation is not None
            compare = [*fence, cmp.absent(key), cmp.mod_revision(inc_key, incarnation.mod_revision)]
            await failpoints.hit("barrier.start.before")
            result = await self._client.txn(compare, [op.put(key, value), *also], [op.get(key), op.get(inc_key)])
            await failpoints.hit("barrier.start.after")
            if result.succeeded:
                return
            found, now = result.gets
            if found is not None:
                if found.value == value:
                    return
                raise Conflict(f"attempt {start.attempt} of job {self._job} exists already")
            if now is not None and now.mod_revision == incarnation.mod_revision:
                raise Fenced(f"attempt {start.attempt} of job {self._job} not started: no longer the leader")

    async def vote(self, step: Step, vote: Vote) -> bool:
        """Cast a pod's vote; returns whether exactly this vote stands. Casting it again is harmless.

        False: another vote of this pod stands, the attempt is of another incarnation or gone, or its outcome is
        settled (any outcome for ``captured``, an abort for ``persisted``).
        """
        key = self._keys.vote(self._job, vote.attempt, step, vote.pod)
        outcome_key = self._keys.outcome(self._job, vote.attempt)
        value = msgspec.json.encode(vote)
        started = await self._read_start(vote.attempt)
        if started is None or started[0].incarnation != vote.incarnation or vote.pod >= started[0].pods:
            return False
        compare = [cmp.absent(key), cmp.mod_revision(self._keys.start(self._job, vote.attempt), started[1])]
        settled = cmp.absent(outcome_key)
        while True:
            await failpoints.hit(f"barrier.vote.{step}.before")
            result = await self._client.txn(
                [*compare, settled], [op.put(key, value)], [op.get(key), op.get(outcome_key)]
            )
            await failpoints.hit(f"barrier.vote.{step}.after")
            if result.succeeded:
                return True
            found, outcome = result.gets
            if found is not None:
                return found.value == value
            if step == "captured" or outcome is None or _decode(outcome, Outcome).kind == "abort":
                return False
            if settled == (settled := cmp.create_revision(outcome_key, outcome.create_revision)):
                return False  # the attempt was forgotten

    async def votes(self, attempt: int, step: Step) -> dict[int, Vote]:
        """The votes of one step, by the pod under which they are filed."""
        listing = await self._client.list(self._votes_prefix(attempt, step))
        return dict(self._filed(kv) for kv in listing.items)

    async def watch_votes(self, attempt: int, step: Step) -> AsyncGenerator[dict[int, Vote], None]:
        """The votes of one step: now, and again after each change. Never ends by itself."""
        prefix = self._votes_prefix(attempt, step)
        listing = await self._client.list(prefix)
        votes = dict(self._filed(kv) for kv in listing.items)
        yield dict(votes)
        async with aclosing(self._client.watch(prefix, since=listing.revision + 1)) as batches:
            async for batch in batches:
                if batch.relisted is not None:
                    votes = dict(self._filed(kv) for kv in batch.relisted.items)
                for event in batch.events:
                    if isinstance(event, Deleted):
                        votes.pop(int(event.key.rpartition("/")[2]), None)
                    else:
                        votes.update([self._filed(event.kv)])
                yield dict(votes)

    async def conclude(self, outcome: Outcome, *, fence: Sequence[Compare], also: Sequence[Op] = ()) -> Outcome:
        """Create the outcome of an attempt, together with ``also``; returns the one that stands.

        If that is another one than ``outcome``, ``also`` was not written. Raises `Fenced` when ``fence`` fails or the
        job's incarnation is no longer the attempt's, `NotFound` when the attempt was never started or is forgotten.
        """
        attempt = outcome.attempt
        key, start_key = self._keys.outcome(self._job, attempt), self._keys.start(self._job, attempt)
        inc_key = self._keys.incarnation(self._job)
        while True:
            found, started, incarnation = await self._snapshot(key, start_key, inc_key)
            if found is not None:
                return _decode(found, Outcome)
            self._check_start(started, attempt, outcome.incarnation)
            self._check_incarnation(incarnation, outcome.incarnation)
            assert started is not None
            assert incarnation is not None
            compare = [
                *fence,
                cmp.absent(key),
                cmp.mod_revision(start_key, started.mod_revision),
                cmp.mod_revision(inc_key, incarnation.mod_revision),
            ]
            await failpoints.hit("barrier.outcome.before")
            result = await self._client.txn(
                compare,
                [op.put(key, msgspec.json.encode(outcome)), *also],
                list(map(op.get, (key, start_key, inc_key))),
            )
            await failpoints.hit("barrier.outcome.after")
            if result.succeeded:
                return outcome
            found, started_now, now = result.gets
            if found is None and started_now == started and now == incarnation:
                raise Fenced(f"attempt {attempt} of job {self._job} not concluded: no longer the leader")

    async def abort(self, attempt: int, incarnation: int, reason: str, by: str) -> Outcome:
        """Create the outcome ``abort``, as anyone may; returns the outcome that stands.

        Raises `NotFound` when the attempt was never started or is forgotten, `Fenced` when it has another incarnation.
        """
        key, start_key = self._keys.outcome(self._job, attempt), self._keys.start(self._job, attempt)
        outcome = Outcome(kind="abort", incarnation=incarnation, attempt=attempt, reason=reason, by=by)
        found, started = await self._snapshot(key, start_key)
        if found is not None:
            return _decode(found, Outcome)
        self._check_start(started, attempt, incarnation)
        assert started is not None
        await failpoints.hit("barrier.abort.before")
        result = await self._client.txn(
            [cmp.absent(key), cmp.mod_revision(start_key, started.mod_revision)],
            [op.put(key, msgspec.json.encode(outcome))],
            [op.get(key)],
        )
        await failpoints.hit("barrier.abort.after")
        if result.succeeded:
            return outcome
        if result.gets[0] is None:
            raise NotFound(f"job {self._job} has no attempt {attempt}")
        return _decode(result.gets[0], Outcome)

    async def outcome(self, attempt: int) -> Outcome | None:
        """The outcome that stands, if any."""
        found = await self._client.get(self._keys.outcome(self._job, attempt))
        return None if found is None else _decode(found, Outcome)

    async def await_outcome(self, attempt: int, *, deadline: float) -> Outcome:
        """Wait for the outcome. At ``deadline`` (`clock.now` seconds) create ``abort``; returns what then stands.

        A worker may act only on an outcome that it has read, so while etcd is away this goes on trying, past the
        deadline, until it is cancelled. Raises `NotFound` when the attempt was never started or is forgotten.
        """
        started = await self._patiently(attempt, self._read_start)
        if started is None:
            raise NotFound(f"job {self._job} has no attempt {attempt}")
        watcher = asyncio.ensure_future(self._watch_outcome(attempt))
        timer = asyncio.ensure_future(clock.sleep_until(deadline))
        try:
            await asyncio.wait({watcher, timer}, return_when=asyncio.FIRST_COMPLETED)
            if watcher.done():
                return watcher.result()
        finally:
            watcher.cancel()
            timer.cancel()
            await asyncio.gather(watcher, timer, return_exceptions=True)
        reason = f"no outcome within {started[0].deadline_seconds:g} s"

        async def give_up(attempt: int) -> Outcome:
            return await self.abort(attempt, started[0].incarnation, reason, self._by)

        return await self._patiently(attempt, give_up)

    async def forget(self, attempt: int) -> None:
        """Remove an attempt's keys, all in one transaction; nothing happens if it is forgotten already.

        Raises `Conflict` when it has no outcome: pods may be frozen for it.
        """
        key, start_key = self._keys.outcome(self._job, attempt), self._keys.start(self._job, attempt)
        found, started = await self._snapshot(key, start_key)
        if found is None and started is None:
            return
        if found is None:
            raise Conflict(f"attempt {attempt} of job {self._job} has no outcome yet")
        await failpoints.hit("barrier.forget.before")
        await self._client.txn(
            [cmp.create_revision(key, found.create_revision)],
            [op.delete_prefix(self._keys.attempt(self._job, attempt))],
        )
        await failpoints.hit("barrier.forget.after")
        self._starts.pop(attempt, None)

    # -- what the above stand on

    def _votes_prefix(self, attempt: int, step: Step) -> str:
        return self._keys.vote(self._job, attempt, step, 0).rpartition("/")[0] + "/"

    @staticmethod
    def _filed(kv: KeyValue) -> tuple[int, Vote]:
        return int(kv.key.rpartition("/")[2]), _decode(kv, Vote)

    async def _snapshot(self, *keys: str) -> tuple[KeyValue | None, ...]:
        return (await self._client.txn([], list(map(op.get, keys)))).gets

    async def _read_start(self, attempt: int) -> tuple[AttemptStart, int] | None:
        if attempt not in self._starts:
            found = await self._client.get(self._keys.start(self._job, attempt))
            if found is None:
                return None
            self._starts[attempt] = (_decode(found, AttemptStart), found.mod_revision)
            while len(self._starts) > _KEPT:
                del self._starts[min(self._starts)]
        return self._starts[attempt]

    async def _watch_outcome(self, attempt: int) -> Outcome:
        key = self._keys.outcome(self._job, attempt)
        listing = await self._patiently(key, self._client.list)
        for kv in listing.items:
            return _decode(kv, Outcome)
        async with aclosing(self._client.watch(key, since=listing.revision + 1)) as batches:
            async for batch in batches:
                for event in batch.events:
                    if not isinstance(event, Deleted):
                        return _decode(event.kv, Outcome)
                for kv in batch.relisted.items if batch.relisted else ():
                    return _decode(kv, Outcome)
        raise AssertionError("a watch does not end")

    @staticmethod
    async def _patiently(argument: A, ask: Callable[[A], Awaitable[T]]) -> T:
        """Ask until etcd answers."""
        while True:
            try:
                return await ask(argument)
            except Unavailable as error:
                log.warning("waiting for etcd", error=str(error))
                await asyncio.sleep(0.5)

    def _check_start(self, started: KeyValue | None, attempt: int, incarnation: int) -> None:
        if started is None:
            raise NotFound(f"job {self._job} has no attempt {attempt}")
        if (record := _decode(started, AttemptStart)).incarnation != incarnation:
            raise Fenced(
                f"attempt {attempt} of job {self._job} is of incarnation {record.incarnation}, not {incarnation}"
            )

    def _check_incarnation(self, found: KeyValue | None, incarnation: int) -> None:
        if found is None:
            raise Fenced(f"job {self._job} has no incarnation: it was never placed or has been removed")
        if (record := _decode(found, IncarnationRecord)).incarnation != incarnation:
            raise Fenced(f"job {self._job} is at incarnation {record.incarnation}, not {incarnation}")
