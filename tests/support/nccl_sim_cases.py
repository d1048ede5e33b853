"""Small programs written for one rule each: what goes wrong without it is rare in random programs, or only slow."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.model import Accept, Lane
from tests.support.nccl_sim import World
from tests.support.nccl_sim_builder import Builder
from tests.support.nccl_sim_parts import Program

SETTINGS = Settings(deadline=5.0, patience=0.005, dry=0.005)


class Case(msgspec.Struct, frozen=True):
    """``slides``: how many are needed at most."""

    program: Program
    instant: int
    slides: int = 1000
    settings: Settings = SETTINGS


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
    build.add(0, 0, ("compute", 0.0003), ("stream waits", 0, flag))
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


CASES: list[Callable[[int], Case]] = [
    another_thread,
    newer_ones,
    wrong_hints,
    pointed_to,
    work_first,
    busy_stream,
    slow_creation,
]


def try_case(make: Callable[[int], Case], seed: int, *, world: type[World] = World, cut: type[Cut] = Cut) -> list[str]:
    """Run one; returns what is wrong."""
    case = make(seed)
    run = world(case.program, seed, [case.instant], cut=lambda lot: cut(case.settings, seed=lot))
    run.run()
    problems = run.check()
    if not run.results:
        problems.append("no attempt was made")
    problems += [f"not cut: {result}" for result in run.results if not isinstance(result, Accept)]
    slides = sum(rounds.slides for rounds in run.tried)
    if slides > case.slides:
        problems.append(f"{slides} slides where {case.slides} do")
    return problems
