"""A job in virtual time: simulated ranks with threads, streams and a fake NCCL whose operations truly wait for
partners.

Deterministic (one seed, one heap of events) and without a clock: a wrong cut is not a wrong value but a hang, or an
entry
in the log that `judge` finds. What the fake does as NCCL does:

* an operation starts when all its parts stand at the head of their streams, and until then blocks these streams;
* the first collective of a communicator and the first message between two members block the caller until all came;
* a full launch queue blocks the caller; a creation blocks until all members came; so does a destroy, if the program
says;
* a group is launched as a whole at its end.

After a cut every communicator is made anew: counts, connections and streams of the fake begin again.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from moorage.nccl_quiesce.cut import Cut
from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Abort, Accept, Creation, Lane, Order, Plan, Snapshot
from moorage.nccl_quiesce.rounds import Outgoing, Pace, Rounds

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
        self.hints = "none"  #: or "true", or "false" (true ones, and others that are not)
        self.loss = 0.0  #: share of control messages that are lost, and as many are doubled
        self.latency = 0.0002  #: seconds, mean of a control message
        self.meeting_destroys = False
        self.loop: dict[tuple[int, int], int] = {}  #: where each thread's loop begins, when it has one
        self.preamble: dict[Lane, int] = {}  #: how many of ``expected`` come before the loop
        self.ahead = 2  #: how many laps a thread may be ahead of others
        self.disorder = 0  #: how many calls are not in the order

    @property
    def calls(self) -> int:
        """How many calls the gates will see."""
        return sum(step[0] in ("call", "create", "destroy") for steps in self.steps.values() for step in steps)


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

    def wet(self) -> tuple[int, ...]:
        return tuple({number // 2 for number, stream in self.streams.items() if stream.queue and number < 10})

    def waits_for(self) -> tuple[int, ...]:
        program = self.world.program
        if program.hints == "none":
            return ()
        found = {rank for thread in self.threads if thread.waits_for is not None for rank in thread.waits_for()}
        if program.hints == "false":
            found |= {0, (self.number * 7 + 1) % program.ranks}
        return tuple(sorted(found - {self.number}))

    def over(self) -> bool:
        return all(thread.state == "ended" for thread in self.threads) and not self.undrained()


class World:
    """One run. ``instants``: numbers of calls after which an attempt begins. Overridden in part by the mutations."""

    gate: type[Gate] = Gate

    def __init__(
        self,
        program: Program,
        seed: int,
        instants: list[int],
        *,
        cut: Callable[[int], Cut] = lambda seed: Cut(seed=seed),
        pace: Pace | None = None,
    ) -> None:
        self.program, self.random = program, random.Random(seed)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = self.entered = self.attempts = self.events = 0
        self.midway = 0  #: cuts that were not just the program's end
        self.log: list[tuple[Any, ...]] = []
        self.problems: list[str] = []
        self.make_cut, self.pace = cut, pace or Pace(again=20 * program.latency)
        self.instants = sorted(instants, reverse=True)
        self.rounds: Rounds | None = None
        self.tried: list[Rounds] = []
        self.began: list[tuple[float, bool]] = []  #: per attempt: when it began, whether counts were unequal then
        self.took: list[float] = []  #: per attempt: seconds until all gates were open again
        self.rebuilding = False
        self.counts: dict[Lane, int] = defaultdict(int)
        self.matches: dict[tuple[Any, ...], Match] = {}
        self.connections: dict[tuple[Any, ...], tuple[set[int], list[Thread]]] = {}
        self.connected: set[tuple[Any, ...]] = set()
        self.creating: dict[str, dict[int, Thread]] = defaultdict(dict)
        self.destroying: dict[str, list[Thread]] = defaultdict(list)
        self.gone: dict[str, int] = defaultdict(int)
        self.torn: set[str] = set()  #: destroyed by some members when a cut came
        self.sizes: dict[str, int] = {}
        self.flags: set[int] = set()
        self.waiting: dict[int, list[Thread]] = defaultdict(list)
        self.gated: dict[int, list[tuple[Rank, int]]] = defaultdict(list)
        self.limit = float("inf")  #: after which lap loops end
        self.looping = sum(start < len(program.steps[key]) for key, start in program.loop.items())
        self.lapped: set[Thread] = set()
        self.ended: dict[int, int] = defaultdict(int)
        self.lapping: dict[int, list[Thread]] = defaultdict(list)
        self.barriers: dict[int, set[int]] = defaultdict(set)
        self.tags: dict[Lane, list[int]] = defaultdict(list)
        self.ranks = [Rank(self, number) for number in range(program.ranks)]
        for (rank, number), steps in sorted(program.steps.items()):
            thread = Thread(self.ranks[rank], number, steps)
            self.ranks[rank].threads.append(thread)
            self.later(0.0, self.step, thread)

    def make_gate(self, number: int, let_in: Callable[[int], None], thawed: Callable[[], None]) -> Gate:
        return self.gate(number, let_in, thawed)

    # ---- time

    def later(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        self.number += 1
        heapq.heappush(self.heap, (self.now + delay, self.number, call, arguments))

    def run(self, until: float = 1e6) -> World:
        heap = self.heap
        while heap:
            self.now, _, call, arguments = heapq.heappop(heap)
            self.events += 1
            if self.now > until or self.events > 1_000_000:
                self.problems.append(f"not over after {self.now} s and {self.events} events")
                break
            call(*arguments)
        for rank in self.ranks:
            for thread in rank.threads:
                if thread.state != "ended":
                    self.problems.append(f"hangs: {thread}")
            if rank.undrained():
                self.problems.append(f"hangs: streams {rank.undrained()} of rank {rank.number}")
        return self

    # ---- threads

    def step(self, thread: Thread) -> None:
        """Go on with the thread's program until it must wait for something."""
        rank, steps = thread.rank, thread.steps
        thread.state, thread.waits_for = "runs", None
        shift = thread.iteration * LAP
        while thread.at < len(steps) or self.laps(thread):
            if thread.state != "runs":
                return
            step = steps[thread.at]
            kind = step[0]
            if kind == "compute":
                thread.at += 1
                self.later(step[1], self.step, thread)
                return
            if kind == "call":
                thread.parts = self.calls_of(step)
                thread.graph = step[2]
                self.enter(thread)
                return
            if kind in ("create", "destroy"):
                self.enter(thread)
                return
            if kind == "capture":
                if self.capture(thread, step):
                    return
            elif kind == "post":
                self.post(step[1] + shift)
            elif kind == "wait":
                if step[1] + shift not in self.flags:
                    self.waiting[step[1] + shift].append(thread)
                    thread.state, thread.waits_for = "waits", lambda poster=step[2]: (poster,)
                    return
            elif kind == "barrier":
                number, ranks = step[1] + shift, step[2]
                came = self.barriers[number]
                came.add(rank.number)
                if len(came) < len(ranks):
                    self.waiting[-number].append(thread)
                    thread.state, thread.waits_for = "waits", lambda ranks=ranks, came=came: (*(ranks - came),)
                    thread.at += 1
                    return
                self._wake(self.waiting.pop(-number, []))
            elif kind == "sync":
                stream = rank.streams[step[1]]
                if stream.queue:
                    stream.syncing.append(thread)
                    thread.state = "syncs"
                    thread.at += 1
                    return
            else:
                assert kind == "stream waits"
                if self.stops(thread):
                    return
                self.enqueue(Kernel(rank, step[1], [], step[2] + shift))
            thread.at += 1
        thread.state = "ended"
        rank.gate.exited = rank.over()

    def laps(self, thread: Thread) -> bool:
        """At the end of its steps a thread begins them again, from where the loop begins, until the limit is set.

        A thread may be a few laps ahead of others, not more: it waits (``laps``) for all to have ended an earlier lap.
        """
        start = self.program.loop.get((thread.rank.number, thread.number))
        if start is None or start == len(thread.steps):
            return False
        if thread not in self.lapped:
            self.lapped.add(thread)
            self.ended[thread.iteration] += 1
            if self.ended[thread.iteration] == self.looping:
                self._wake(self.lapping.pop(thread.iteration, []))
        if thread.iteration >= self.limit:
            return False
        earlier = thread.iteration - self.program.ahead
        if earlier >= 0 and self.ended[earlier] < self.looping:
            self.lapping[earlier].append(thread)
            thread.state = "laps"
            return True
        self.lapped.discard(thread)
        thread.iteration += 1
        thread.at = start
        thread.state = "next"
        self.later(self.random.random() * 1e-5, self.step, thread)
        return True

    def stops(self, thread: Thread) -> bool:
        """Whether work for a stream must wait."""
        ticket = thread.rank.gate.submit(thread.number)
        if ticket is None:
            return False
        thread.rank.by_ticket[ticket] = thread
        thread.state = "stopped"
        return True

    def _wake(self, threads: list[Thread]) -> None:
        for thread in threads:
            self.later(self.random.random() * 2e-5, self.step, thread)

    def post(self, flag: int) -> None:
        self.flags.add(flag)
        self._wake(self.waiting.pop(flag, []))
        for rank, stream in self.gated.pop(flag, []):
            self.later(1e-6, self.pop, rank, stream)

    def calls_of(self, step: Step) -> list[tuple[Op, ...]]:
        """What the gate sees of one step: a group is one call."""
        return [step[1]]

    def capture(self, thread: Thread, step: Step) -> bool:
        """Calls under capture pass by: nothing is issued, nothing counted. True: the thread waits."""
        return False

    # ---- a call: enter, look, begin, done

    def enter(self, thread: Thread) -> None:
        self.entered += 1
        if self.instants and self.rounds is None and self.entered >= self.instants[-1]:
            self.instants.pop()
            self.later(self.random.random() * 3e-4, self.attempt)
        step = thread.steps[thread.at]
        creates = self.creations_of(step) if step[0] == "create" else ()
        lanes = self.lanes_of(thread) if thread.parts else {}
        thread.ticket = thread.rank.gate.enter(thread.number, lanes, creates, destroys=step[0] == "destroy")
        thread.rank.by_ticket[thread.ticket] = thread
        self.later(self.random.random() * 1e-5, self.look, thread)

    def lanes_of(self, thread: Thread) -> dict[Lane, int]:
        lanes: dict[Lane, int] = {}
        for op in thread.parts[0]:
            lanes[op.lane] = lanes.get(op.lane, 0) + 1
        return lanes

    def creations_of(self, step: Step) -> tuple[Creation, ...]:
        creations: tuple[Creation, ...] = step[1]
        return creations

    def look(self, thread: Thread) -> None:
        was_open = thread.rank.gate.look()
        if self.random.random() < 0.02:  # the system runs something else meanwhile
            self.later(self.random.random() * 0.01, self.settle, thread, was_open)
        else:
            self.settle(thread, was_open)

    def settle(self, thread: Thread, was_open: bool) -> None:
        if thread.rank.gate.settle(thread.ticket, was_open):
            self.begin(thread)
        else:
            thread.state = "held"

    def begin(self, thread: Thread) -> None:
        """The gate let it in: hand it to NCCL."""
        step = thread.steps[thread.at]
        thread.state = "inside"
        if step[0] == "create":
            for creation in step[1]:
                self.log.append(("create", thread.rank.number, creation.communicator))
                came = self.creating[creation.communicator]
                came[creation.member] = thread
                if len(came) == creation.size:
                    self.sizes[creation.communicator] = len(came)
                    for other in dict.fromkeys(came.values()):
                        self.later(self.random.random() * 1e-3, self.created, other, other.life)
        elif step[0] == "destroy":
            name = step[1]
            for member in step[2]:
                thread.rank.gate.destroy(name, member)
                self.gone[name] += 1
            self.destroying[name].append(thread)
            if not self.program.meeting_destroys or name in self.torn or self.gone[name] == self.sizes[name]:
                for other in self.destroying.pop(name):
                    self.done(other)
        else:
            last = len(thread.parts) == 1
            self.issue(thread, thread.parts[0])
            if last:
                self.launch(thread)
            else:
                self.done(thread)

    def created(self, thread: Thread, life: int) -> None:
        """NCCL is done with a creation: unless things stand still, the job gets its communicators."""
        if life != thread.life or thread.state not in ("inside", "created, frozen"):
            return
        creations = thread.steps[thread.at][1]
        if any(len(self.creating[c.communicator]) < c.size for c in creations):
            return
        if thread.rank.gate.stands(thread.ticket):
            thread.state = "created, frozen"
            return
        thread.state = "inside"
        for creation in creations:
            self.log.append(("created", thread.rank.number, creation.communicator, creation.size))
        self.done(thread)

    def done(self, thread: Thread) -> None:
        thread.rank.gate.leave(thread.ticket)
        thread.life += 1
        if thread.parts:
            thread.parts.pop(0)
            if thread.parts:
                self.later(1e-6, self.enter, thread)
                return
        thread.at += 1
        thread.state = "runs"
        self.later(self.random.random() * 1e-5, self.step, thread)

    # ---- the fake NCCL

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
                    self.later(self.random.expovariate(1e4), self.connect, pair)

    def connect(self, pair: tuple[Any, ...]) -> None:
        self.connected.add(pair)
        for thread in self.connections[pair][1]:
            thread.blocks.discard(pair)
            self.launch(thread)

    def launch(self, thread: Thread) -> None:
        """At the end of a call or outermost group: everything goes to the streams, as soon as that is possible."""
        if thread.blocks or not thread.group:
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

    # ---- the attempt

    def attempt(self) -> None:
        if self.rounds is not None:
            return
        self.attempts += 1
        cut = self.make_cut(self.random.randrange(1 << 30))
        self.rounds = Rounds(range(self.program.ranks), attempt=self.attempts, cut=cut, pace=self.pace)
        self.tried.append(self.rounds)
        self.began.append((self.now, self._unequal()))
        self._send(self.rounds.start(self.now))

    def _unequal(self) -> bool:
        pairs: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        for lane, count in self.counts.items():
            if lane.kind == "collective":
                pairs[(lane.communicator,)].add(count)
            else:
                pairs[(lane.communicator, *sorted((lane.member, lane.peer)), lane.kind == "send")].add(count)
        return any(len(counts) > 1 for counts in pairs.values())

    def _send(self, outgoing: Outgoing) -> None:
        rounds = self.rounds
        assert rounds is not None
        for rank, order in outgoing:
            for delay in self._deliveries():
                self.later(delay, self._deliver, rounds, rank, order)
        if rounds.wake < 1e9:
            self.later(max(0.0, rounds.wake - self.now) + 1e-9, self._tick, rounds)
        if isinstance(rounds.result, Accept) and not self.rebuilding:
            self.log.append(("accept",))
            self.midway += any(thread.state != "ended" for rank in self.ranks for thread in rank.threads)
            self.rebuilding = True
            self.teardown(rounds.result.plan)
            self.later(0.001, self.rebuilt, rounds)
        if rounds.released:
            self.took.append(self.now - self.began[-1][0])
            self.rounds = None
            self.rebuilding = False
            if not self.instants:
                self.limit = max(thread.iteration for rank in self.ranks for thread in rank.threads)
                self._wake([thread for threads in self.lapping.values() for thread in threads])
                self.lapping.clear()

    def _deliveries(self) -> list[float]:
        lot, latency = self.random.random, self.program.latency
        first = latency * (0.5 + lot())
        if not self.program.loss:
            return [first]
        if lot() < self.program.loss:
            return []
        return [first, first + lot() * 20 * latency] if lot() < self.program.loss else [first]

    def _deliver(self, rounds: Rounds, number: int, order: Order) -> None:
        rank = self.ranks[number]
        report = rank.gate.obey(order, rank.undrained)
        if report is not None:
            if report.held or report.inside or rank.gate.phase == "drain" or self.program.hints != "none":
                report = rank.gate.report(report.undrained, rank.wet(), rank.waits_for())
            for delay in self._deliveries():
                self.later(delay, self._report, rounds, report)

    def _report(self, rounds: Rounds, report: Snapshot) -> None:
        if rounds is self.rounds:
            wake = rounds.wake
            outgoing = rounds.receive(report, self.now)
            if outgoing or rounds.wake != wake or rounds.result is not None:
                self._send(outgoing)

    def _tick(self, rounds: Rounds) -> None:
        if rounds is self.rounds and not rounds.released and self.now >= rounds.wake:
            self._send(rounds.tick(self.now))

    def teardown(self, plan: Plan) -> None:
        """Destroy every communicator on all ranks at once; the checks are the fake's own."""
        for rank in self.ranks:
            if rank.undrained():
                self.problems.append(f"teardown hangs: streams {rank.undrained()} of rank {rank.number}")
            for thread in rank.threads:
                step = thread.steps[thread.at] if thread.at < len(thread.steps) else ("end",)
                if thread.state in ("inside", "created, frozen") and step[0] == "create":
                    names = {creation.communicator for creation in step[1]}
                    if names <= set(plan.again):
                        rank.gate.take_back(thread.ticket)
                        thread.life += 1
                        thread.state = "again"
                    else:
                        self.problems.append(f"teardown: {thread} is half made")
                elif thread.state == "inside" and step[0] != "destroy":
                    self.problems.append(f"teardown hangs: {thread}")
        for name in plan.again:
            self.creating.pop(name, None)
        self.torn.update(self.gone)
        for threads in self.destroying.values():
            for thread in threads:
                self.done(thread)
        self.destroying.clear()
        self.counts.clear()
        self.matches.clear()
        self.connections.clear()
        self.connected.clear()

    def rebuilt(self, rounds: Rounds) -> None:
        self.log.append(("rebuilt",))
        self._send(rounds.release(self.now))

    # ---- afterwards

    def check(self) -> list[str]:
        """All that is wrong with this run; empty when it is fine."""
        found = self.problems + judge(self.log)
        laps = max(thread.iteration for rank in self.ranks for thread in rank.threads)
        for lane, tags in self.program.expected.items():
            start = self.program.preamble.get(lane, 0) if self.program.loop else len(tags)
            tags = tags + [tag + lap * LAP for lap in range(1, laps + 1) for tag in tags[start:]]
            if self.tags[lane] != tags:
                found.append(f"{lane}: {len(self.tags[lane])} operations, not the {len(tags)} of the program")
        return found

    @property
    def results(self) -> list[Accept | Abort | None]:
        return [rounds.result for rounds in self.tried]


def judge(log: list[tuple[Any, ...]]) -> list[str]:
    """Read a log and find what was half done at a cut. Knows nothing of gates, needs or streams."""
    found: list[str] = []
    issued: dict[Lane, int] = defaultdict(int)
    done: dict[Lane, int] = defaultdict(int)
    made: dict[str, int] = defaultdict(int)
    size: dict[str, int] = {}
    closed = False
    for entry in log:
        kind = entry[0]
        if kind == "issue":
            issued[entry[2]] += 1
            if closed:
                found.append(f"{entry[2]} was issued by rank {entry[1]} after the cut")
        elif kind == "done":
            done[entry[1]] += 1
        elif kind == "created":
            made[entry[2]] += 1
            size[entry[2]] = entry[3]
            if closed:
                found.append(f"{entry[2]} was finished after the cut")
        elif kind == "rebuilt":
            closed = False
        elif kind == "accept":
            closed = True
            counts: dict[str, set[int]] = defaultdict(set)
            members: dict[str, set[int]] = defaultdict(set)
            for lane, count in issued.items():
                if count != done[lane]:
                    found.append(f"cut: {lane} has {count} issued and {done[lane]} done")
                if lane.kind == "collective":
                    counts[lane.communicator].add(count)
                    members[lane.communicator].add(lane.member)
                elif issued.get(lane.partner, 0) != count:
                    found.append(f"cut: {lane} has {count}, its partner {issued.get(lane.partner, 0)}")
            found += [
                f"cut: {name} is made at {made[name]} of {size[name]}" for name in made if made[name] != size[name]
            ]
            for name, found_counts in counts.items():
                if len(found_counts) > 1 or len(members[name]) != size[name]:
                    found.append(f"cut: collectives of {name} are unequal: {found_counts} at {len(members[name])}")
    return found
