"""The parts of a simulated job: programs, threads, ranks, streams, operations."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from moorage.nccl_quiesce.model import Lane

if TYPE_CHECKING:
    from tests.support.nccl_sim import World

Step: TypeAlias = tuple[Any, ...]
LAP = 1_000_000  #: tags and flags of a lap are those of the first one, shifted


class Op(NamedTuple):
    """One part of an operation. ``tag``: the same in all its parts, so a wrong partner is seen."""

    lane: Lane
    tag: int
    stream: int


class Program:
    """What the threads of a job do. ``steps``: by (rank, thread); ``expected``: the tags of each lane, in order."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.steps: dict[tuple[int, int], list[Step]] = {}
        self.expected: dict[Lane, list[int]] = defaultdict(list)
        self.depth = 1024  #: of a launch queue, in kernels
        self.hints = "none"  #: or "true", "false" (true ones, and others that are not), "wrong" (only those)
        self.loss = 0.0  #: share of control messages that are lost, and as many are doubled
        self.latency = 0.0002  #: seconds, mean of a control message
        self.meeting_destroys = False
        self.instants_at = "calls"  #: what instants count: "calls", "creations" or "streams" (waits of streams)
        self.loop: dict[tuple[int, int], int] = {}  #: where each thread's loop begins, when it has one
        self.preamble: dict[Lane, int] = {}  #: how many of ``expected`` come before the loop
        self.ahead = 2  #: how many laps a thread may be ahead of others
        self.last = 0  #: after how many calls some rank stays away for good
        self.disorder = 0  #: how many calls are not in the order

    @property
    def calls(self) -> int:
        """How many calls the gates will see."""
        return self.steps_of("call", "create", "destroy")

    def steps_of(self, *kinds: str) -> int:
        return sum(step[0] in kinds for steps in self.steps.values() for step in steps)


class Thread:
    """A thread of a rank, and where it stands."""

    def __init__(self, rank: Rank, number: int, steps: list[Step]) -> None:
        self.rank, self.number, self.steps = rank, number, steps
        self.at = self.iteration = 0
        self.state = "runs"
        self.ticket = 0
        self.parts: list[tuple[Op, ...]] = []  #: what is left of the step's calls
        self.waits_for: Callable[[], tuple[int, ...]] | None = None
        self.blocks: set[Any] = set()
        self.group: dict[int, list[tuple[Match, Lane]]] = {}
        self.graph = False
        self.life = 0

    def __repr__(self) -> str:
        step = self.steps[self.at] if self.at < len(self.steps) else "end"
        return f"rank {self.rank.number} thread {self.number} {self.state} at {self.at}: {step}"


class Match:
    """One operation in the fake: its parts find each other here."""

    __slots__ = ("came", "eager", "sent", "size", "tag")

    def __init__(self, size: int, tag: int, eager: bool) -> None:
        self.size, self.tag, self.eager = size, tag, eager
        self.came: list[tuple[Kernel, Lane]] = []
        self.sent = False


class Kernel:
    """An entry of a stream: operations, or (``flag``) a wait for the host."""

    __slots__ = ("flag", "left", "matches", "rank", "stream")

    def __init__(self, rank: Rank, stream: int, matches: list[tuple[Match, Lane]], flag: int = -1) -> None:
        self.rank, self.stream = rank, stream
        self.matches, self.flag = matches, flag
        self.left = len(matches)


class Stream:
    """Entries run one after the other."""

    def __init__(self) -> None:
        self.queue: deque[Kernel] = deque()
        self.wanting_room: list[Thread] = []
        self.syncing: list[Thread] = []


class Rank:
    """One process: its gate, its threads, its streams."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.gate = world.make_gate(number, self.let_in, self.thawed)
        self.threads: list[Thread] = []
        self.streams: dict[int, Stream] = defaultdict(Stream)
        self.by_ticket: dict[int, Thread] = {}

    def let_in(self, ticket: int) -> None:
        thread = self.by_ticket[ticket]
        go_on = self.world.step if thread.state == "stopped" else self.world.begin
        self.world.later(0.0, go_on, thread)

    def thawed(self) -> None:
        for thread in self.threads:
            if thread.state == "created, frozen":
                self.world.later(0.0, self.world.created, thread, thread.life)
            elif thread.state == "again" and self.gate.phase == "open":
                self.world.later(0.0, self.world.step, thread)

    def undrained(self) -> tuple[str, ...]:
        return tuple(str(number) for number, stream in self.streams.items() if stream.queue)

    def waits_for(self) -> tuple[int, ...]:
        program = self.world.program
        if program.hints == "none":
            return ()
        found = {rank for thread in self.threads if thread.waits_for is not None for rank in thread.waits_for()}
        if program.hints == "wrong":
            return (0,) if self.number else ()
        if program.hints == "false":
            found |= {0, (self.number * 7 + 1) % program.ranks}
        return tuple(sorted(found - {self.number}))

    def over(self) -> bool:
        return all(thread.state == "ended" for thread in self.threads) and not self.undrained()
