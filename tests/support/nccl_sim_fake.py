"""The fake NCCL of a simulated job: its operations truly wait for their partners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moorage.nccl_quiesce.model import Lane
from tests.support.nccl_sim_parts import LAP, Kernel, Match, Op, Rank, Thread

if TYPE_CHECKING:
    import random

    from tests.support.nccl_sim_parts import Program


class Nccl:
    """What is in the hands of NCCL and of the streams. `World` has the rest."""

    program: Program
    random: random.Random
    now: float
    ranks: list[Rank]
    later: Callable[..., None]
    done: Callable[[Thread], None]
    _wake: Callable[[list[Thread]], None]

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.problems: list[str] = []
        self.creating: dict[str, dict[int, Thread]] = defaultdict(dict)
        self.destroying: dict[str, list[Thread]] = defaultdict(list)
        self.gone: dict[str, int] = defaultdict(int)
        self.torn: set[str] = set()  #: destroyed by some members when a cut came
        self.counts: dict[Lane, int] = defaultdict(int)
        self.matches: dict[tuple[Any, ...], Match] = {}
        self.connections: dict[tuple[Any, ...], tuple[set[int], list[Thread]]] = {}
        self.connected: set[tuple[Any, ...]] = set()
        self.sizes: dict[str, int] = {}
        self.flags: set[int] = set()
        self.gated: dict[int, list[tuple[Rank, int]]] = defaultdict(list)
        self.tags: dict[Lane, list[int]] = defaultdict(list)

    def issue(self, thread: Thread, ops: tuple[Op, ...]) -> None:
        shift = thread.iteration * LAP
        for op in ops:
            lane, tag = op.lane, op.tag + shift
            index = self.counts[lane]
            self.counts[lane] = index + 1
            self.tags[lane].append(tag)
            self.log.append(("issue", thread.rank.number, lane))
            if lane.kind == "collective":
                pair: tuple[Any, ...] = (lane.communicator,)
                size, eager = self.sizes[lane.communicator], False
            else:
                ends = (lane.member, lane.peer) if lane.kind == "send" else (lane.peer, lane.member)
                # A small message is gone before anybody receives it.
                pair, size, eager = (lane.communicator, *ends), 2, op.tag % 3 == 0
            match = self.matches.get((*pair, index))
            if match is None:
                match = self.matches[(*pair, index)] = Match(size, tag, eager)
            if match.tag != tag:
                self.problems.append(f"{lane} number {index}: {tag} met {match.tag}")
            thread.group.setdefault(op.stream, []).append((match, lane))
            if pair in self.connected:
                continue
            came, waiting = self.connections.setdefault(pair, (set(), []))
            thread.blocks.add(pair)
            waiting.append(thread)
            if lane.member not in came:
                came.add(lane.member)
                if len(came) == size:
                    slow = 0.005 if self.random.random() < 0.1 else 1e-4
                    self.later(self.random.random() * slow, self.connect, pair)

    def connect(self, pair: tuple[Any, ...]) -> None:
        if pair not in self.connections:  # torn down in the midst of it, which `teardown` has told
            return
        self.connected.add(pair)
        for thread in self.connections[pair][1]:
            thread.blocks.discard(pair)
            self.launch(thread)

    def launch(self, thread: Thread) -> None:
        """At the end of a call or outermost group: everything goes to the streams, as soon as that is possible."""
        if thread.blocks or not thread.group or len(thread.parts) > 1 or thread.state != "inside":
            return
        streams = thread.rank.streams
        for number in thread.group:
            if len(streams[number].queue) >= self.program.depth:
                streams[number].wanting_room.append(thread)
                return
        for number, matches in thread.group.items():
            # A group is one kernel, a graph has one for each operation.
            for kernel in [[match] for match in matches] if thread.graph else [matches]:
                self.enqueue(Kernel(thread.rank, number, kernel))
        thread.group = {}
        self.done(thread)

    def enqueue(self, kernel: Kernel) -> None:
        queue = kernel.rank.streams[kernel.stream].queue
        queue.append(kernel)
        if len(queue) == 1:
            self.head(kernel)

    def head(self, kernel: Kernel) -> None:
        """The first entry of a stream begins."""
        if kernel.flag >= 0:
            if kernel.flag in self.flags:
                self.later(1e-6, self.pop, kernel.rank, kernel.stream)
            else:
                self.gated[kernel.flag].append((kernel.rank, kernel.stream))
            return
        for match, lane in kernel.matches:
            if match.eager and lane.kind == "send":
                match.sent = True
                self.part_done(kernel, lane)
            else:
                match.came.append((kernel, lane))
            if len(match.came) + match.sent == match.size:
                for other, part in match.came:
                    self.part_done(other, part)

    def part_done(self, kernel: Kernel, lane: Lane) -> None:
        self.log.append(("done", lane))
        kernel.left -= 1
        if not kernel.left:
            self.later(1e-5 + self.random.random() * 5e-5, self.pop, kernel.rank, kernel.stream)

    def pop(self, rank: Rank, number: int) -> None:
        stream = rank.streams[number]
        stream.queue.popleft()
        if stream.queue:
            self.head(stream.queue[0])
        else:
            self._wake(stream.syncing)
            stream.syncing = []
            rank.gate.exited = rank.over()
        waiting, stream.wanting_room = stream.wanting_room, []
        for thread in waiting:
            self.launch(thread)
