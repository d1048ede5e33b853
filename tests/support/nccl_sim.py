"""A job in virtual time: simulated ranks with threads, streams and a fake NCCL whose operations wait for partners.

Deterministic (one seed, one heap of events) and without a clock: a wrong cut is not a wrong value but a hang, or an
entry in the log that `judge` finds. What the fake does as NCCL does:

* an operation starts when all its parts stand at the head of their streams, and until then blocks these streams;
* the first collective of a communicator and the first message between two members block the caller until all came;
* a full launch queue blocks the caller; a creation blocks until all members came; so does a destroy, if the program
  says so;
* a group is launched as a whole at its end.

After a cut every communicator is made anew: counts, connections and streams of the fake begin again.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from moorage.nccl_quiesce.cut import Cut
from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Abort, Accept, Creation, Lane
from moorage.nccl_quiesce.rounds import Pace
from tests.support.nccl_sim_attempt import Attempts
from tests.support.nccl_sim_judge import judge
from tests.support.nccl_sim_parts import LAP, Kernel, Op, Program, Rank, Step, Thread


class World(Attempts):
    """One run. ``instants``: numbers of calls after which an attempt begins. Overridden in part by the mutations."""

    gate: type[Gate] = Gate
    most_events = 1_000_000

    def __init__(
        self,
        program: Program,
        seed: int,
        instants: list[int],
        *,
        cut: Callable[[int], Cut] = lambda seed: Cut(seed=seed),
        pace: Pace | None = None,
    ) -> None:
        super().__init__(cut, pace or Pace(again=20 * program.latency), instants)
        self.program, self.random = program, random.Random(seed)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.number = self.entered = self.submitted = self.events = 0
        self.interrupted: Thread | None = None
        self.waiting: dict[int, list[Thread]] = defaultdict(list)
        self.looping = sum(start < len(program.steps[key]) for key, start in program.loop.items())
        self.lapped: set[Thread] = set()
        self.ended: dict[int, int] = defaultdict(int)
        self.barriers: dict[int, set[int]] = defaultdict(set)
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
            if self.now > until or self.events > self.most_events:
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
                if self.program.instants_at == "streams" and thread is not self.interrupted:
                    self.submitted += 1
                    self.instant(self.submitted, thread)
                    if thread is self.interrupted:  # it comes while the attempt is under way
                        self.later(self.random.random() * 10 * self.program.latency, self.step, thread)
                        return
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
        if self.program.instants_at == "calls":
            self.instant(self.entered, thread)
        step = thread.steps[thread.at]
        creates = self.creations_of(step) if step[0] == "create" else ()
        lanes = self.lanes_of(thread) if thread.parts else {}
        thread.ticket = thread.rank.gate.enter(thread.number, lanes, creates, destroys=step[0] == "destroy")
        thread.rank.by_ticket[thread.ticket] = thread
        self.later(self.random.random() * 1e-5, self.look, thread)

    def instant(self, number: int, thread: Thread | None = None) -> None:
        """Begin an attempt if its time has come; a thread that is just calling may be interrupted at the gate."""
        if self.instants and self.rounds is None and number >= self.instants[-1]:
            self.instants.pop()
            self.interrupted = thread
            self.later(self.random.random() * 3e-4, self.attempt)

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
        if self.random.random() < (0.5 if thread is self.interrupted else 0.02):  # the system runs something else
            self.interrupted = None
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
                    if self.program.instants_at == "creations":
                        self.instant(len(self.sizes))
                    self.sizes[creation.communicator] = len(came)
                    for other in dict.fromkeys(came.values()):
                        self.later(self.random.random() * 3e-3, self.created, other, other.life)
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
                thread.state = "between"
                self.later(1e-6, self.enter, thread)
                return
        thread.at += 1
        thread.state = "runs"
        self.later(self.random.random() * 1e-5, self.step, thread)

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
        """What came of each attempt."""
        return [rounds.result for rounds in self.tried]
