"""One process that passes every write of the barrier: it leads, runs an attempt to its end, and aborts another.

Run again after it died anywhere, it comes to the same end. ``python -m tests.support.barrier_scenario ENDPOINT CLUSTER
[--renew]``, from the root.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec

from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.barrier.election import campaign
from moorage.barrier.kv import Compare
from moorage.barrier.session import Session
from moorage.barrier.twophase import Attempts, decide
from moorage.errors import Conflict, NotFound
from moorage.records import AttemptStart, IncarnationRecord, Keys, Outcome, Vote

JOB, PODS = "j", 2


async def scenario(endpoint: str, cluster: str, *, renew: bool = False) -> None:
    """See above. With ``renew`` it also waits for its session to be renewed twice."""
    keys = Keys(cluster)
    renewals = asyncio.Semaphore(0)
    async with (
        EtcdClient([endpoint]) as client,
        Session.open(client, 2, lambda deadline: renewals.release()) as session,
    ):
        leader = await campaign(client, session, keys.leader, b"me")
        record = msgspec.json.encode(IncarnationRecord(incarnation=1, placement=["a", "b"]))
        await client.txn([cmp.absent(keys.incarnation(JOB))], [op.put(keys.incarnation(JOB), record)])
        attempts = Attempts(client, keys, JOB, by="me")
        # Deleted when both attempts are through, so that a second run can tell the end from the beginning.
        if await client.get(keys.state(JOB)) is None:
            await _first(attempts, [leader.compare()], keys)
            await _second(attempts, [leader.compare()])
            await client.put(keys.state(JOB), b"done")
        for _ in range(3 if renew else 0):
            await renewals.acquire()
        await leader.resign()


async def _first(attempts: Attempts, fence: list[Compare], keys: Keys) -> None:
    start = AttemptStart(attempt=1, incarnation=1, pods=PODS, kind="resume", deadline_seconds=60)
    await attempts.start(start, fence=fence)
    for pod in range(PODS):
        await attempts.vote("captured", Vote(pod=pod, incarnation=1, attempt=1))
    votes = await attempts.votes(1, "captured")
    decision = decide(start, votes, outcome=await attempts.outcome(1), past_deadline=False, lost=set())
    assert decision.kind == "resume", decision
    also = [op.put(keys.latest(JOB), b"1")]
    await attempts.conclude(Outcome(kind="resume", incarnation=1, attempt=1), fence=fence, also=also)
    for pod in range(PODS):
        await attempts.vote("persisted", Vote(pod=pod, incarnation=1, attempt=1))
    await attempts.forget(1)


async def _second(attempts: Attempts, fence: list[Compare]) -> None:
    start = AttemptStart(attempt=2, incarnation=1, pods=PODS, kind="stop", deadline_seconds=60)
    with contextlib.suppress(Conflict):
        await attempts.start(start, fence=fence)
    with contextlib.suppress(NotFound):
        await attempts.abort(2, 1, "enough", "me")


if __name__ == "__main__":
    asyncio.run(scenario(sys.argv[1], sys.argv[2], renew="--renew" in sys.argv))
