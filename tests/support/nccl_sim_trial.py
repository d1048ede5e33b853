"""One random program, cut at random instants, judged. What tests and the campaign run by the thousand."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.model import Abort, Accept
from tests.support.nccl_sim import World
from tests.support.nccl_sim_programs import disordered, looping, ordered

DISORDERED = 10  #: one program in so many


class Trial(msgspec.Struct, frozen=True):
    """What came of one seed. ``problems``: empty when all is as it must be."""

    seed: int
    ordered: bool
    problems: list[str]
    attempts: int = 0
    cuts: int = 0
    aborts: int = 0
    unequal: int = 0  #: attempts whose counts were unequal when the gates began to close
    midway: int = 0  #: cuts with work of the program still to come
    slides: int = 0
    rounds: int = 0
    events: int = 0
    longest: float = 0.0  #: seconds of virtual time that the longest attempt took, rebuilding included


def trial(
    seed: int,
    *,
    world: type[World] = World,
    cut: type[Cut] = Cut,
    settings: Settings | None = None,
    deadline: float = Settings().deadline,
    is_ordered: bool | None = None,
) -> Trial:
    """Run the program of ``seed``; everything follows from the seed alone.

    ``deadline``: for programs without an end, in seconds of the simulated job. A few need more than 20.
    """
    if is_ordered is None:
        is_ordered = seed % DISORDERED != 0
    rng = random.Random(f"instants {seed}")
    brisk = is_ordered and seed % 10 == 5
    if is_ordered and seed % 2:
        program = looping(seed, brisk=brisk)
        instants = [program.last + rng.randrange(4 * program.calls) for _ in range(rng.choice((1, 1, 2)))]
        if brisk:
            settings = settings or Settings(deadline=deadline, patience=2.0, dry=2.0)
        settings = settings or Settings(deadline=deadline, patience=0.005, dry=0.005)
    elif is_ordered:
        program = ordered(seed)
        kinds = {"calls": ("call", "create", "destroy"), "creations": ("create",), "streams": ("stream waits",)}
        limit = program.steps_of(*kinds[program.instants_at])
        if program.instants_at == "creations":
            limit //= program.ranks
        instants = [rng.randrange(max(1, limit)) for _ in range(rng.choice((1, 1, 2)))]
        if not limit:
            program.instants_at, instants = "calls", [rng.randrange(program.calls)]
        if program.last:
            program.instants_at, instants = "calls", [program.last]
        settings = settings or Settings(dry=0.02)
    else:
        program = disordered(seed, length=200)
        # All others have at most come in: then some of these calls, far from all, have too.
        instants = [program.calls - program.disorder + rng.randint(10, 100)]
        settings = Settings(deadline=0.03)
    make: Callable[[int], Cut] = lambda lot: cut(settings, seed=lot)  # noqa: E731
    run = world(program, seed, instants, cut=make)
    run.run()
    problems = run.check()
    results = run.results
    for result in results:
        if is_ordered and not isinstance(result, Accept):
            problems.append(f"a program with the order was not cut: {result}")
        if not is_ordered and not isinstance(result, Abort):
            problems.append(f"a program without the order was cut: {result}")
        if not is_ordered and min(run.took, default=0.0) < settings.deadline:
            problems.append(f"aborted before the deadline: {result}")
        if isinstance(result, Abort) and not (result.behind or result.inside or result.undrained):
            problems.append(f"nothing is named: {result}")
    if not results:
        problems.append("no attempt was made")
    slides = sum(rounds.slides for rounds in run.tried)
    if brisk and slides:
        problems.append(f"{slides} slides where nobody waits but in NCCL")
    return Trial(
        seed=seed,
        ordered=is_ordered,
        problems=problems,
        attempts=len(results),
        cuts=sum(isinstance(result, Accept) for result in results),
        aborts=sum(isinstance(result, Abort) for result in results),
        unequal=sum(unequal for _, unequal in run.began),
        midway=run.midway,
        slides=slides,
        rounds=sum(rounds.round for rounds in run.tried),
        events=run.events,
        longest=max(run.took, default=0.0),
    )
