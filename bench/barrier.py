"""How fast the barrier is, against what etcd and gRPC do bare on the same machine in the same minutes.

    python -m bench.barrier [--rounds N] [--pods N]          (from the root of the checkout)

Starts an etcd of its own, with fsync, in a temporary folder. Measurements of the barrier and of its limit take turns,
so that a busy machine slows both. Writes bench/results/barrier.json; exit code 1 when a target is missed.

* votes: `Attempts.vote`, many at once, against the same transactions sent through a bare gRPC stub.
* round: one attempt from its start to the moment when every pod's worker knows the outcome. Every worker has its own
  connection and its own watch, as on a cluster, but all of them share this one process and its one core. The limit is
  what etcd takes for the same writes alone, through bare stubs.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc.aio
import msgspec

from bench.report import Report, Target, spread, versions
from moorage.barrier import clock, cmp, op, wire
from moorage.barrier.client import EtcdClient
from moorage.barrier.etcdpb import POOL
from moorage.barrier.twophase import Attempts, decide
from moorage.records import AttemptStart, IncarnationRecord, Keys, Outcome, Vote
from moorage.runtime import programs
from tests.support.etcd import Etcd

JOB = "bench"
DEADLINE = 120.0
BLOCK = 100  # votes between two changes of turns


async def at_once(calls: Iterable[Callable[[], Awaitable[Any]]], width: int) -> float:
    """Make all calls, ``width`` at a time; returns the seconds taken."""
    queue = iter(list(calls))

    async def lane() -> None:
        for call in queue:
            await call()

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(width)))
    return time.perf_counter() - began


class Bench:
    """One etcd, one job, attempts numbered upwards."""

    def __init__(self, etcd: Etcd, client: EtcdClient, stub: Any) -> None:
        self.etcd, self.client, self.stub = etcd, client, stub
        self.keys = Keys("bench")
        self.attempt = 0
        self.fence = [cmp.exists(self.keys.incarnation(JOB))]

    async def prepare(self) -> None:
        record = msgspec.json.encode(IncarnationRecord(incarnation=1, placement=["a"]))
        await self.client.put(self.keys.incarnation(JOB), record)

    async def begin(self, attempts: Attempts, pods: int) -> AttemptStart:
        self.attempt += 1
        start = AttemptStart(attempt=self.attempt, incarnation=1, pods=pods, kind="resume", deadline_seconds=DEADLINE)
        await attempts.start(start, fence=self.fence)
        return start

    def vote_record(self, pod: int) -> Vote:
        return Vote(pod=pod, incarnation=1, attempt=self.attempt, bytes_total=1 << 30, bytes_new=1 << 20)

    async def votes(self, count: int, width: int) -> tuple[float, float]:
        """Votes per second through a bare stub, and through `Attempts.vote`.

        In small blocks by turns, so that both meet the same load of the machine. The bare ones are the very same
        transactions, put together in the same way, with no more done about them.
        """
        attempts = Attempts(self.client, self.keys, JOB)
        await self.begin(attempts, 2 * count)
        start = await self.client.get(self.keys.start(JOB, self.attempt))
        assert start is not None

        async def bare(pod: int) -> None:
            key = self.keys.vote(JOB, self.attempt, "captured", pod)
            outcome = self.keys.outcome(JOB, self.attempt)
            compare = [cmp.absent(key), cmp.mod_revision(start.key, start.mod_revision), cmp.absent(outcome)]
            value = msgspec.json.encode(self.vote_record(pod))
            request = wire.txn(compare, [op.put(key, value)], [op.get(key), op.get(outcome)])
            assert (await self.stub.Txn(request)).succeeded

        async def ours(pod: int) -> None:
            assert await attempts.vote("captured", self.vote_record(pod))

        taken = [0.0, 0.0]
        for first in range(0, 2 * count, 2 * BLOCK):
            for turn, cast in enumerate((bare, ours)):
                pods = range(first + turn * BLOCK, first + (turn + 1) * BLOCK)
                taken[turn] += await at_once([functools.partial(cast, pod) for pod in pods], width)
        return count / taken[0], count / taken[1]

    async def bare_round(self, pods: int) -> float:
        """Seconds that the writes of one round take alone: start, votes at once, outcome."""

        async def put(key: str) -> None:
            await self.stub.Txn(wire.txn([cmp.absent(key)], [op.put(key, b"x" * 150)], []))

        self.attempt += 1
        keys = self.keys
        began = time.perf_counter()
        await put(keys.start(JOB, self.attempt))
        await asyncio.gather(*(put(keys.vote(JOB, self.attempt, "captured", pod)) for pod in range(pods)))
        await put(keys.outcome(JOB, self.attempt))
        return time.perf_counter() - began

    async def round(self, workers: list[EtcdClient]) -> tuple[float, float]:
        """One whole round; returns its seconds, and those from the outcome's write to the last worker's knowing."""
        attempts = Attempts(self.client, self.keys, JOB)
        began = time.perf_counter()
        start = await self.begin(attempts, len(workers))
        told: list[float] = []

        async def worker(pod: int, client: EtcdClient) -> None:
            mine = Attempts(client, self.keys, JOB, by=f"node-{pod}")
            waiting = asyncio.create_task(mine.await_outcome(self.attempt, deadline=clock.now() + DEADLINE))
            assert await mine.vote("captured", self.vote_record(pod))
            assert (await waiting).kind == "resume"
            told.append(time.perf_counter())

        working = asyncio.gather(*(worker(pod, client) for pod, client in enumerate(workers)))
        async with aclosing(attempts.watch_votes(self.attempt, "captured")) as rounds:
            async for votes in rounds:
                decision = decide(start, votes, outcome=None, past_deadline=False, lost=set())
                if decision.action == "conclude":
                    break
        outcome = Outcome(kind="resume", incarnation=1, attempt=self.attempt)
        concluded = time.perf_counter()
        await attempts.conclude(outcome, fence=self.fence)
        await working
        return max(told) - began, max(told) - concluded


async def measure(rounds: int, pods: int, count: int, width: int) -> Report:
    with Etcd(durable=True) as etcd:
        target = etcd.endpoints[0].partition("://")[2]
        async with etcd.client() as client, grpc.aio.insecure_channel(target) as channel:
            bench = Bench(etcd, client, POOL.stub("etcdserverpb.KV")(channel))
            await bench.prepare()
            workers = [etcd.client() for _ in range(pods)]
            await asyncio.gather(*(worker.get("/moorage/") for worker in workers))
            columns: tuple[list[float], ...] = ([], [], [], [], [])
            for turn in range(-1, rounds):  # the first turn warms up
                row = (
                    *await bench.votes(count, width),
                    await bench.bare_round(pods),
                    *await bench.round(workers),
                )
                if turn >= 0:
                    for measured, value in zip(columns, row, strict=True):
                        measured.append(value)
            await asyncio.gather(*(worker.close() for worker in workers))
    bare_votes, votes, bare_rounds, whole, telling = columns
    shares = [ours / bare for ours, bare in zip(votes, bare_votes, strict=True)]
    rounds_taken, telling_taken, share = spread(whole), spread(telling), spread(shares)
    figures = {
        "votes_per_second": spread(votes),
        "bare_transactions_per_second": spread(bare_votes),
        "votes_share_of_bare": share,
        "round_seconds": rounds_taken,
        "round_writes_alone_seconds": spread(bare_rounds),
        "outcome_to_last_worker_seconds": telling_taken,
        "pods": pods,
        "votes_at_once": width,
        "rounds": rounds,
    }
    etcd_version = programs.text(programs.version("etcd", programs.find("etcd")))
    return Report(
        bench="barrier",
        figures=figures,
        versions={**versions("grpcio", "protobuf", "msgspec"), "etcd": etcd_version},
        targets=[
            Target("votes, share of bare transactions", share["median"], "", ">=", 0.8),
            Target(f"a round of {pods} pods", rounds_taken["median"], "s", "<=", 0.5),
            Target("outcome known everywhere", telling_taken["median"], "s", "<=", 0.1),
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the barrier.")
    parser.add_argument("--rounds", type=int, default=11, help="measured turns")
    parser.add_argument("--pods", type=int, default=64, help="pods of a round")
    parser.add_argument("--votes", type=int, default=1500, help="votes in each turn")
    parser.add_argument("--at-once", type=int, default=64, help="votes in flight")
    arguments = parser.parse_args()
    report = asyncio.run(measure(arguments.rounds, arguments.pods, arguments.votes, arguments.at_once))
    report.show()
    print(f"written: {report.write()}")
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
