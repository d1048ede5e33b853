"""Small programs written for one rule each: what goes wrong without it is rare in random programs, or only slow."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.model import Accept, Call, Creation, Handle, Lane, Snapshot, Wait
from tests.support.nccl_sim import World
from tests.support.nccl_sim_builder import Builder
from tests.support.nccl_sim_parts import Program

SETTINGS = Settings(deadline=5.0, patience=0.005, dry=0.005)


class Case(msgspec.Struct, frozen=True):
    """``slides``: how many are needed at most. ``cut``: whether there is one, or the deadline is too short for it."""

    program: Program
    instant: int
    slides: int = 1000
    settings: Settings = SETTINGS
    cut: bool = True


def another_thread(seed: int) -> Case:
    """Rank 1 is behind, and the call it owes is held, but another thread used the communicator last."""
    build = Builder(random.Random(seed), 2, [1, 2])
    name = build.create((0, 1))
    build.hand_over(1, name, 0)
    build.wandering = 0.0
    build.collective(name)
    build.compute(1, 1e-3)
    build.hand_over(1, name, 1)
    build.add(1, 0, ("compute", 1000.0))
    for _ in range(20):
        build.collective(name)
    return Case(build.program, build.program.calls - 30, slides=0, settings=Settings(deadline=5.0, patience=0.1))


def _starving(build: Builder) -> None:
    """Ranks 0 and 1 loop. Rank 4 is behind and waits for rank 2, which is held in an operation with rank 3."""
    rng = build.rng
    loopers, waited, behind = build.create((0, 1)), build.create((2, 3)), build.create((4, 5))
    program = build.program
    program.preamble = {lane: len(tags) for lane, tags in program.expected.items()}
    program.loop = {key: len(steps) for key, steps in program.steps.items()}
    program.ahead = 500
    for _ in range(3):
        build.collective(loopers)
        build.collective(waited)
        target, thread, wait = build.message(2, 4)
        if rng.random() < 0.5:
            build.collective(waited)
        build.call(5, 0, [(Lane(behind, 1, "collective"), build.tag + 1)])
        build.add(target, thread, wait)
        build.call(4, 0, [(Lane(behind, 0, "collective"), build.tag + 1)])
        build.tag += 1


def newer_ones(seed: int) -> Case:
    """New calls that wait whole come again and again, and an old one is the one to slide."""
    build = Builder(random.Random(seed), 6, [1] * 6)
    _starving(build)
    return Case(build.program, 200 + seed % 50)


def wrong_hints(seed: int) -> Case:
    """All hints point to a rank that nobody waits for."""
    build = Builder(random.Random(seed), 6, [1] * 6)
    _starving(build)
    build.program.hints = "wrong"
    return Case(build.program, 200 + seed % 50)


def first_collectives(seed: int) -> Case:
    """Ranks are often in a communicator's first collective, where NCCL lets nobody go before all have come."""
    build = Builder(random.Random(seed), 2, [1, 1])
    for _ in range(20):
        build.collective(build.create((0, 1)))
    build.program.latency = 0.00005
    return Case(build.program, 4 + seed % 70)


def much_is_lost(seed: int) -> Case:
    """Every third message is lost, and as many come twice, the second time late."""
    build = Builder(random.Random(seed), 3, [1, 2, 1])
    names = [build.create((0, 1, 2)), build.create((0, 1)), build.create((1, 2))]
    for _ in range(40):
        build.collective(build.rng.choice(names))
        build.compute(build.rng.randrange(3), 5e-4)
    build.program.loss = 0.35
    return Case(build.program, 10 + seed % 80)


def taking_turns(seed: int) -> Case:
    """Seven pairs are behind on what their other threads used last, and each has many calls to go: all side by side."""
    build = Builder(random.Random(seed), 16, [2] * 16)
    everybody = build.create(range(16))
    pairs = [build.create((rank, rank + 1)) for rank in range(0, 16, 2)]
    build.wandering = 0.0
    for rank in range(16):
        build.hand_over(rank, everybody, 1)
        build.hand_over(rank, pairs[rank // 2], 0)
    build.collective(everybody)
    flags = [build.fresh() for _ in range(32)]
    for rank in range(16):
        build.add(rank, 1, ("post", flags[rank]))
        build.add(rank, 0, ("wait", flags[rank], rank))
    for number, name in enumerate(pairs):
        for _ in range(60):
            for rank in (2 * number, 2 * number + 1):
                if number:
                    build.add(rank, 0, ("compute", 1e-3))
            build.collective(name)
    for rank in range(16):
        build.add(rank, 0, ("post", flags[16 + rank]))
        build.add(rank, 1, ("wait", flags[16 + rank], rank))
    build.collective(everybody)
    program = build.program
    return Case(program, program.steps_of("create") + 16 + 120 + 2 + seed % 20, settings=Settings(1.5, 0.005, 0.005))


def slow_partner(seed: int) -> Case:
    """Rank 1 computes for much longer than there is patience, and rank 0, far ahead, is held all the time."""
    build = Builder(random.Random(seed), 2, [1, 1])
    name = build.create((0, 1))
    program = build.program
    program.preamble = {lane: len(tags) for lane, tags in program.expected.items()}
    program.loop = {key: len(steps) for key, steps in program.steps.items()}
    program.ahead = 1000
    build.collective(name)
    build.add(0, 0, ("compute", 0.002))
    build.add(1, 0, ("compute", 0.02))
    return Case(program, 10 + seed % 20)


def work_first(seed: int) -> Case:
    """A stream of rank 0 waits for a thread of rank 1 that has work for a stream to submit before it posts."""
    rng = random.Random(seed)
    build = Builder(rng, 2, [1, 1])
    name = build.create((0, 1))
    for _ in range(30):
        first, second = build.fresh(), build.fresh()
        build.compute(1, 5e-4)
        build.add(1, 0, ("post", first), ("stream waits", 0, first), ("post", second))
        build.add(0, 0, ("stream waits", 0, second), ("sync", 0))
    build.collective(name)
    build.program.instants_at = "streams"
    return Case(build.program, rng.randrange(40))


def creation_first(seed: int) -> Case:
    """A stream of rank 0 waits for what its other thread posts after a creation that a drain order stops."""
    build = Builder(random.Random(seed), 2, [2, 1])
    build.collective(build.create((0, 1)))
    flag = build.fresh()
    build.add(0, 1, ("stream waits", 2, flag))
    build.owner[0, "c2"] = 0
    build.create((0, 1))
    build.add(0, 0, ("post", flag))
    build.program.instants_at = "creations"
    build.program.latency = 0.00005
    return Case(build.program, 1)


def opened_meanwhile(seed: int) -> Case:
    """The gates open again while threads that have found them closed are stopped by the system."""
    build = Builder(random.Random(seed), 16, [1] * 16)
    name = build.create(range(16))
    for _ in range(20):
        build.collective(name)
        build.compute(build.rng.randrange(16), 1e-3)
    return Case(build.program, 16 + seed % 200, settings=Settings(deadline=0.0005), cut=False)


def slow_creation(seed: int) -> Case:
    """A creation that slid is still on its way when the stream that seemed to wait for it runs dry by itself."""
    build = Builder(random.Random(seed), 2, [2, 2])
    name = build.create((0, 1))
    build.collective(name)
    begin, flag = build.fresh(), build.fresh()
    build.add(0, 1, ("stream waits", 2, flag))
    build.add(1, 0, ("post", begin))
    build.add(1, 1, ("wait", begin, 1), ("compute", build.rng.uniform(0.001, 0.004)), ("post", flag))
    for rank in (0, 1):
        build.owner[rank, "c2"] = 0
    build.create((0, 1))
    build.program.instants_at = "creations"
    build.program.latency = 0.0003
    return Case(build.program, 1, settings=Settings(deadline=5.0, patience=0.0005, dry=0.0005))


def busy_stream(seed: int) -> Case:
    """A thread submits kernels faster than they run; those that it has submitted would run out."""
    build = Builder(random.Random(seed), 2, [2, 1])
    build.collective(build.create((0, 1)))
    program = build.program
    program.preamble = {lane: len(tags) for lane, tags in program.expected.items()}
    program.loop = {key: len(steps) for key, steps in program.steps.items()}
    program.ahead = 100
    flag = build.fresh()
    build.add(0, 1, ("compute", 0.003), ("post", flag))  # the GPU: each kernel takes so long
    build.add(0, 0, ("compute", 0.00005), ("stream waits", 0, flag))
    program.instants_at = "streams"
    return Case(program, 20 + seed % 20)


def pointed_to(seed: int) -> Case:
    """Rank 1 is behind and waits for rank 2, which is held; many other calls have been held for longer."""
    build = Builder(random.Random(seed), 14, [1] * 14)
    pairs = [build.create((rank, rank + 1)) for rank in range(0, 14, 2)]
    build.program.preamble = {}
    build.program.hints = "true"
    build.wandering = 0.0
    for name in pairs[2:]:
        for _ in range(20):
            build.collective(name)
    for _ in range(20):
        build.collective(pairs[1])
    target, thread, wait = build.message(2, 1)
    lanes = [Lane(pairs[0], member, "collective") for member in (0, 1)]
    build.call(0, 0, [(lanes[0], 1)])
    build.add(target, thread, wait)
    build.call(1, 0, [(lanes[1], 1)])
    return Case(build.program, 40 + seed % 20, slides=45)


def late_push(cut: type[Cut]) -> list[str]:
    """No program: rank 1 is behind, and the thread that used the communicator last is held elsewhere."""
    lanes = [Lane("c", member, "collective") for member in (0, 1)]
    other = Lane("d", 0, "collective")
    handles = [(Handle("c", 0, 2), Handle("d", 1, 2)), (Handle("c", 1, 2), Handle("d", 0, 2))]
    snapshots = {
        0: Snapshot(1, 1, 0, admitted={lanes[0]: 1}, handles=handles[0]),
        1: Snapshot(1, 1, 1, held=(Call(7, 0, {other: 1}),), handles=handles[1], users={"c": 0}),
    }
    rules = cut(Settings(deadline=10.0, pushing=0.5))
    problems = []
    for now, wanted in ((4.9, True), (5.1, False)):
        _, decision = rules.decide(msgspec.structs.replace(rules.begin(0.0), moved_at=now), snapshots, now)
        if decision != Wait({1: {lanes[1]: 1}}, push=wanted):
            problems.append(f"after {now} s: {decision}")
    return problems


def grouped_creation(cut: type[Cut]) -> list[str]:
    """No program: all members have come to c, but one makes it in a group with d, which nobody else has come to."""
    c, d = [Creation("c", member, 2) for member in (0, 1)], Creation("d", 0, 2)
    creating = [Handle(one.communicator, one.member, 2, "creating") for one in (*c, d)]
    snapshots = {
        0: Snapshot(1, 5, 0, inside=(Call(3, 0, creates=(c[0], d)),), handles=(creating[0], creating[2])),
        1: Snapshot(1, 5, 1, inside=(Call(4, 0, creates=(c[1],)),), handles=(creating[1],), undrained=("s",)),
    }
    rules = cut()
    memory = msgspec.structs.replace(rules.begin(0.0), draining=True)
    memory, _ = rules.decide(memory, snapshots, 10.0)
    memory, decision = rules.decide(memory, snapshots, 20.0)
    return [] if isinstance(decision, Wait) else [f"{decision}"]


SITUATIONS: list[Callable[[type[Cut]], list[str]]] = [late_push, grouped_creation]


def try_case(make: Callable[[int], Case], seed: int, *, world: type[World] = World, cut: type[Cut] = Cut) -> list[str]:
    """Run one; returns what is wrong."""
    case = make(seed)
    run = world(case.program, seed, [case.instant], cut=lambda lot: cut(case.settings, seed=lot))
    run.run()
    problems = run.check()
    if not run.results:
        problems.append("no attempt was made")
    problems += [f"not right: {result}" for result in run.results if isinstance(result, Accept) is not case.cut]
    slides = sum(rounds.slides for rounds in run.tried)
    if slides > case.slides:
        problems.append(f"{slides} slides where {case.slides} do")
    return problems
