"""What the protocol of the cut costs by itself, with as many simulated ranks as a large job has.

    python -m bench.nccl_quiesce [--ranks N] [--times N]          (from the root of the checkout)

The coordinator's real code (`driver.run`, `Rounds`, `Cut`) and a real `Gate` for each rank, all in one process on one
core, with every order and report encoded and decoded; no network, no GPU, no NCCL. A rank trains with tensor, pipeline
and data parallelism, step by step; its thread issues asynchronously, as threads do whose GPU is behind, and is ahead of
or behind others by up to a step when the gates close. Measured: from the request to the decision, and from the opening
order to the last confirmation. Writes bench/results/nccl_quiesce.json; exit code 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator

import msgspec

from bench.report import Report, Target, spread, versions
from moorage.nccl_quiesce import driver
from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Abort, Creation, Lane, Order, Snapshot
from moorage.nccl_quiesce.rounds import Rounds

TENSOR, PIPELINE = 8, 4
MICRO_BATCHES, LAYERS, BUCKETS = 4, 2, 4
TARGET = 2.0  #: seconds


class Layout:
    """Which communicators a rank is in, as member of what number, and what it issues in a step."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.data = ranks // (TENSOR * PIPELINE)

    def creations(self, rank: int) -> list[Creation]:
        tensor, stage, replica = self.place(rank)
        return [
            Creation("world", rank, self.ranks),
            Creation(f"tensor {stage} {replica}", tensor, TENSOR),
            Creation(f"pipeline {tensor} {replica}", stage, PIPELINE),
            Creation(f"data {tensor} {stage}", replica, self.data),
        ]

    def place(self, rank: int) -> tuple[int, int, int]:
        return rank % TENSOR, rank // TENSOR % PIPELINE, rank // (TENSOR * PIPELINE)

    def step(self, rank: int) -> list[tuple[int, dict[Lane, int]]]:
        """The calls of one step, in order, each with its thread: forward through the stages, and back."""
        stage = self.place(rank)[1]
        _, tensor, pipeline, data = ((c.communicator, c.member) for c in self.creations(rank))
        calls: list[tuple[int, dict[Lane, int]]] = []
        for _ in range(MICRO_BATCHES):
            for thread, direction in ((0, 1), (1, -1)):
                before, after = stage - direction, stage + direction
                if 0 <= before < PIPELINE:
                    calls.append((thread, {Lane(*pipeline, "receive", before): 1}))
                calls += [(thread, {Lane(*tensor, "collective"): 1})] * (2 * LAYERS)
                if 0 <= after < PIPELINE:
                    calls.append((thread, {Lane(*pipeline, "send", after): 1}))
        calls += [(1, {Lane(*data, "collective"): 1})] * BUCKETS
        calls.append((0, {Lane("world", rank, "collective"): 1}))
        return calls


class SimulatedRank:
    """A gate, and one or two threads that issue call after call, in turns, and are held where the gate is closed."""

    def __init__(self, layout: Layout, rank: int, ahead: int, threads: int) -> None:
        self.threads = threads
        self.gate = Gate(rank, self.let_in)
        for creation in layout.creations(rank):
            ticket = self.gate.enter(0, {}, (creation,))
            self.gate.settle(ticket, self.gate.look())
            self.gate.leave(ticket)
        self.calls = layout.step(rank)
        self.at = 0
        for _ in range(ahead):
            self.issue()

    def issue(self) -> bool:
        """The next call; False: it is held."""
        thread, lanes = self.calls[self.at % len(self.calls)]
        ticket = self.gate.enter(thread if self.threads > 1 else 0, lanes)
        if not self.gate.settle(ticket, self.gate.look()):
            return False
        self.at += 1
        self.gate.leave(ticket)
        return True

    def let_in(self, ticket: int) -> None:
        self.at += 1
        self.gate.leave(ticket)
        if self.gate.phase != "open":
            self.go_on()

    def go_on(self) -> None:
        """Call after call until one is held."""
        while self.issue():
            pass


class Loopback:
    """A transport without a network: orders and reports are encoded and decoded, and handed over."""

    def __init__(self, ranks: list[SimulatedRank]) -> None:
        self.ranks = ranks
        self.encoder = msgspec.msgpack.Encoder()
        self.orders = msgspec.msgpack.Decoder(Order)
        self.reports = msgspec.msgpack.Decoder(Snapshot)
        self.bytes = 0

    async def exchange(self, rank: int, order: Order) -> Snapshot | None:
        sent = self.encoder.encode(order)
        report = self.ranks[rank].gate.obey(self.orders.decode(sent), tuple)
        if order.phase != "open" and not self.ranks[rank].gate.held:
            self.ranks[rank].go_on()  # its thread comes to the gate, just too late for this report
        answer = self.encoder.encode(report)
        self.bytes += len(sent) + len(answer)
        return self.reports.decode(answer)


def attempt(layout: Layout, seed: int, skew: int, threads: int = 1) -> dict[str, float]:
    """One attempt at ranks whose threads are up to ``skew`` calls apart; times in seconds."""
    rng = random.Random(seed)
    ranks = [SimulatedRank(layout, rank, rng.randrange(skew + 1), threads) for rank in range(layout.ranks)]
    before = sum(rank.at for rank in ranks)
    transport = Loopback(ranks)
    rounds = Rounds(range(layout.ranks), attempt=1, cut=Cut(Settings(), seed=seed))

    def check() -> None:
        issued = {lane: count for rank in ranks for lane, count in rank.gate.admitted.items()}
        collectives: dict[str, set[int]] = {}
        for lane, count in issued.items():
            if lane.kind == "collective":
                collectives.setdefault(lane.communicator, set()).add(count)
            else:
                assert issued.get(lane.partner) == count, f"{lane}: {count}, its partner {issued.get(lane.partner)}"
        unequal = {name: counts for name, counts in collectives.items() if len(counts) > 1}
        assert not unequal, f"collectives are unequal: {unequal}"

    async def run() -> dict[str, float]:
        began, used = time.perf_counter(), time.process_time()
        result = await driver.run(rounds, transport)
        cut, cpu = time.perf_counter(), time.process_time()
        if isinstance(result, Abort):
            raise SystemExit(f"seed {seed}: {result.reason}")
        check()
        told = rounds.round
        await driver.release(rounds, transport)
        return {
            "cut_seconds": cut - began,
            "cut_cpu_seconds": cpu - used,
            "open_seconds": time.perf_counter() - cut,
            "rounds": told,
            "let_in": sum(rank.at for rank in ranks) - before,
            "slides": rounds.slides,
            "bytes_per_rank_and_round": transport.bytes / layout.ranks / rounds.round,
        }

    found = asyncio.run(run())
    return found


def spreads(runs: list[dict[str, float]]) -> Iterator[tuple[str, dict[str, float]]]:
    for name in runs[0]:
        yield name, spread(run[name] for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the protocol of the cut alone.")
    parser.add_argument("--ranks", type=int, default=1024, help=f"a multiple of {TENSOR * PIPELINE}")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1, help="2: another one issues what belongs to the way back")
    arguments = parser.parse_args()
    layout = Layout(arguments.ranks)
    step = max(len(layout.step(rank)) for rank in range(layout.ranks))
    runs = []
    for seed in range(arguments.times):
        runs.append(attempt(layout, seed, step, arguments.threads))
        print(f"{seed + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in runs[-1].items()), file=sys.stderr)
    times = dict(spreads(runs))
    report = Report(
        bench="nccl_quiesce",
        figures={
            "protocol": {
                "ranks": layout.ranks,
                "threads": arguments.threads,
                "times": len(runs),
                "calls_apart_at_most": step,
                **times,
            }
        },
        versions=versions("msgspec"),
        targets=[
            Target(f"protocol alone, {layout.ranks} ranks, median", times["cut_seconds"]["median"], "s", "<=", TARGET),
            Target(f"protocol alone, {layout.ranks} ranks, worst", times["cut_seconds"]["max"], "s", "<=", TARGET),
        ],
    )
    report.show()
    print(f"written: {report.write()}")
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
