"""Writes programs for the simulated job, operation by operation."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from moorage.nccl_quiesce.model import Creation, Lane
from tests.support.nccl_sim_parts import Op, Program, Step


class Builder:
    """Writes a program operation by operation: each one is put down at all its members before the next one begins.

    So the order of writing is the order that the cut asks for. Messages between threads are posted before they are
    waited for. Where a communicator passes from one thread of a rank to another, a message between the two keeps the
    order.
    """

    def __init__(self, rng: random.Random, ranks: int, threads: Sequence[int]) -> None:
        self.rng = rng
        self.program = Program(ranks)
        self.threads = threads
        for rank in range(ranks):
            for thread in range(threads[rank]):
                self.program.steps[rank, thread] = []
        self.members: dict[str, tuple[int, ...]] = {}  #: the rank of each member
        self.owner: dict[tuple[int, str], int] = {}
        self.names = self.tag = self.flag = 0
        self.slow = [1.0] * ranks
        self.wandering = 0.1  #: how often a communicator changes its thread
        self.captures: dict[int, int] = {}

    # ---- steps

    def add(self, rank: int, thread: int, *steps: Step) -> None:
        self.program.steps[rank, thread].extend(steps)

    def thread(self, rank: int, name: str, *, wander: bool = True) -> int:
        """The thread that uses a communicator next."""
        owner = self.owner.get((rank, name))
        if owner is None:
            owner = self.owner[rank, name] = self.rng.randrange(self.threads[rank])
        elif wander and self.threads[rank] > 1 and self.rng.random() < self.wandering:
            self.hand_over(rank, name, self.rng.randrange(self.threads[rank]))
        return self.owner[rank, name]

    def hand_over(self, rank: int, name: str, to: int) -> None:
        owner = self.owner.get((rank, name), to)
        if owner != to:
            flag = self.fresh()
            self.add(rank, owner, ("post", flag))
            self.add(rank, to, ("wait", flag, rank))
        self.owner[rank, name] = to

    def fresh(self) -> int:
        self.flag += 1
        return self.flag

    def call(self, rank: int, thread: int, lanes: Iterable[tuple[Lane, int]], *, graph: bool = False) -> None:
        """One call with these (lane, tag) parts. Streams belong to threads, so each has the program's order."""
        ops = []
        for lane, tag in lanes:
            ops.append(Op(lane, tag, 2 * thread + (hash_of(lane.communicator) & 1)))
            self.program.expected[lane].append(tag)
        self.add(rank, thread, ("call", tuple(ops), graph))

    # ---- operations

    def create(self, ranks: Sequence[int], *, parent: str = "") -> str:
        """Make a communicator; ``ranks`` in the order of members, a rank may be there twice."""
        self.names += 1
        name = f"c{self.names}"
        self.members[name] = tuple(ranks)
        for rank in dict.fromkeys(ranks):
            thread = self.thread(rank, parent) if parent else self.thread(rank, name)
            self.owner[rank, name] = thread
            mine = [Creation(name, member, len(ranks)) for member, at in enumerate(ranks) if at == rank]
            # The last: how many members the parent has, for those who count a shrink wrongly.
            self.add(rank, thread, ("create", tuple(mine), len(self.members.get(parent, ()))))
        return name

    def create_together(self, *groups: Sequence[int]) -> None:
        """Several communicators at once: a rank that is in more than one of them makes these in one group."""
        creations: dict[int, list[Creation]] = {}
        for ranks in groups:
            self.names += 1
            name = f"c{self.names}"
            self.members[name] = tuple(ranks)
            for member, rank in enumerate(ranks):
                creations.setdefault(rank, []).append(Creation(name, member, len(ranks)))
        for rank, mine in creations.items():
            thread = self.rng.randrange(self.threads[rank])
            for creation in mine:
                self.owner[rank, creation.communicator] = thread
            self.add(rank, thread, ("create", tuple(mine), 0))

    def collective(self, name: str, times: int = 1) -> None:
        """The same collectives at all members, at some as a graph, at others one by one."""
        tags = range(self.tag + 1, self.tag + times + 1)
        self.tag += times
        for rank, members in self.places(name):
            thread = self.thread(rank, name)
            parts = [[(Lane(name, member, "collective"), tag) for member in members] for tag in tags]
            if times > 1 and self.rng.random() < 0.5:
                self.call(rank, thread, [part for group in parts for part in group], graph=len(members) == 1)
            else:
                for group in parts:
                    self.call(rank, thread, group)

    def places(self, name: str) -> list[tuple[int, list[int]]]:
        found: dict[int, list[int]] = {}
        for member, rank in enumerate(self.members[name]):
            found.setdefault(rank, []).append(member)
        places = list(found.items())
        self.rng.shuffle(places)
        return places

    def both(self, first: str, second: str) -> None:
        """Two collectives in one group where a rank is in both communicators."""
        self.tag += 1
        tag = self.tag
        others = dict(self.places(second))
        for rank, members in self.places(first):
            thread = self.thread(rank, first)
            parts = [(Lane(first, member, "collective"), tag) for member in members]
            if rank in others:
                self.hand_over(rank, second, thread)
                parts += [(Lane(second, member, "collective"), tag) for member in others.pop(rank)]
            self.call(rank, thread, parts)
        for rank, members in others.items():
            self.call(
                rank, self.thread(rank, second), [(Lane(second, member, "collective"), tag) for member in members]
            )

    def exchange(self, name: str, pairs: Iterable[tuple[int, int]], *, times: int = 1) -> None:
        """Sends and receives between members; each rank has all its parts in one group, or some one by one."""
        parts: dict[int, list[tuple[Lane, int]]] = {}
        ranks = self.members[name]
        for source, target in pairs:
            if ranks[source] == ranks[target]:
                continue
            for _ in range(times):
                self.tag += 1
                parts.setdefault(ranks[source], []).append((Lane(name, source, "send", target), self.tag))
                parts.setdefault(ranks[target], []).append((Lane(name, target, "receive", source), self.tag))
        for rank, mine in parts.items():
            thread = self.thread(rank, name)
            # One after the other is an order only if it cannot close a ring: one partner, one direction.
            if len({lane for lane, _ in mine}) == 1 and self.rng.random() < 0.5:
                for part in mine:
                    self.call(rank, thread, [part])
            else:
                self.call(rank, thread, mine)

    def message(self, source: int, target: int) -> tuple[int, int, Step]:
        """Post now; returns where to put the wait, and the wait."""
        flag = self.fresh()
        self.add(source, self.rng.randrange(self.threads[source]), ("post", flag))
        return target, self.rng.randrange(self.threads[target]), ("wait", flag, source)

    def barrier(self, ranks: Sequence[int]) -> None:
        number = self.fresh()
        for rank in ranks:
            self.add(rank, self.rng.randrange(self.threads[rank]), ("barrier", number, frozenset(ranks)))

    def destroy(self, name: str) -> None:
        for rank, members in self.places(name):
            thread = self.thread(rank, name, wander=False)
            self.add(rank, thread, ("sync", 2 * thread), ("sync", 2 * thread + 1))
            self.add(rank, thread, ("destroy", name, tuple(members)))
        del self.members[name]

    def compute(self, rank: int, mean: float) -> None:
        seconds = self.rng.expovariate(1 / mean) * self.slow[rank]
        self.add(rank, self.rng.randrange(self.threads[rank]), ("compute", seconds))


def hash_of(name: str) -> int:
    """Same in every process, unlike hash()."""
    return sum(map(ord, name))
