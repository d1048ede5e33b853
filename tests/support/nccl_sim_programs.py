"""Random programs for the simulated job: with one global order of atomic operations, and such that break that order."""

from __future__ import annotations

import random

from moorage.nccl_quiesce.model import Lane
from tests.support.nccl_sim_builder import Builder, hash_of
from tests.support.nccl_sim_parts import Op, Program, Step

KINDS = {
    "collective": 40,
    "pair": 12,
    "exchange": 12,
    "both": 6,
    "message": 14,
    "barrier": 3,
    "sync": 3,
    "stream": 5,
    "create": 4,
    "destroy": 1,
    "compute": 20,
    "capture": 3,
}


def _builder(rng: random.Random) -> Builder:
    ranks = min(rng.randint(2, 16), rng.randint(2, 16))
    threaded = rng.random() < 0.5
    threads = [rng.choice((1, 1, 2, 3)) if threaded else 1 for _ in range(ranks)]
    build = Builder(rng, ranks, threads)
    program = build.program
    program.depth = rng.choice((1, 2, 4, 16, 1024))
    program.hints = rng.choice(("none", "true", "false"))
    program.loss = rng.choice((0.0, 0.0, 0.0, 0.05))
    program.latency = rng.choice((0.00005, 0.0002, 0.001))
    program.meeting_destroys = rng.random() < 0.3
    build.wandering = rng.choice((0.0, 0.05, 0.3))
    return build


def _weights(rng: random.Random) -> dict[str, float]:
    """Most programs are a bit of everything, some are full of a few things."""
    weights: dict[str, float] = dict(KINDS)
    for _ in range(rng.choice((0, 0, 1, 2))):
        weights[rng.choice(list(weights))] *= 10
    return weights


def ordered(seed: int, *, size: float = 1.0) -> Program:
    """A random program that has the order. ``size`` scales its length."""
    rng = random.Random(seed)
    build = _builder(rng)
    mean = rng.choice((2e-5, 1e-4, 1e-3))
    if rng.random() < 0.5:
        build.slow = [rng.choice((1.0, 1.0, 5.0, 50.0)) for _ in range(build.program.ranks)]
    for _ in range(rng.randint(1, 3)):
        _new(build)
    _body(build, int(rng.randint(10, 60) * size), _weights(rng), mean, 0.05)
    program = build.program
    program.instants_at = rng.choice(("calls", "calls", "calls", "creations", "streams"))
    if rng.random() < 0.1:
        _never_comes(build)
    return program


def _never_comes(build: Builder) -> None:
    """One rank computes for longer than any deadline, while all others wait for it in a creation or destroy."""
    rng, program = build.rng, build.program
    program.meeting_destroys = True
    name = build.create(range(program.ranks))
    build.collective(name)
    absent = rng.randrange(program.ranks)
    for thread in range(build.threads[absent]):
        build.add(absent, thread, ("compute", 10000.0))
    program.last = program.calls + program.ranks - 1
    if rng.random() < 0.5:
        build.destroy(name)
    else:
        build.create(range(program.ranks))


def looping(seed: int, *, brisk: bool = False) -> Program:
    """A program that has the order and no end: only a cut in the midst of it is one. It ends after the last attempt.

    ``brisk``: ranks have one thread and never wait for each other but in NCCL.
    """
    rng = random.Random(seed)
    build = _builder(rng)
    if brisk:
        build = Builder(rng, build.program.ranks, [1] * build.program.ranks)
    program = build.program
    program.ahead = rng.choice((1, 2, 5, 25))
    mean = rng.choice((2e-5, 1e-4))
    if rng.random() < 0.5:
        build.slow = [rng.choice((1.0, 1.0, 5.0, 100.0)) for _ in range(program.ranks)]
    for _ in range(rng.randint(1, 4)):
        _new(build)
    weights = _weights(rng) | {"create": 0, "destroy": 0}
    if chatty := not brisk and rng.random() < 0.2:
        for _ in range(program.ranks):
            build.create(rng.sample(range(program.ranks), 2))
        weights["message"] = 200
    if brisk:  # nobody begins before all communicators stand
        name = build.create(range(program.ranks))
        build.collective(name)
        for rank in range(program.ranks):
            build.add(rank, 0, ("sync", 0), ("sync", 1))
        program.last = program.calls
    program.preamble = {lane: len(tags) for lane, tags in program.expected.items()}
    program.loop = {key: len(steps) for key, steps in program.steps.items()}
    if brisk:
        weights |= {"message": 0, "barrier": 0, "stream": 0}
    owners = dict(build.owner)
    build.collective(rng.choice(list(build.members)))
    _body(build, rng.randint(30, 100) if chatty else rng.randint(5, 30), weights, mean, 0.0)
    for (rank, name), thread in owners.items():  # each lap begins with the same owners
        build.hand_over(rank, name, thread)
    for rank, thread in program.steps:
        if len(program.steps[rank, thread]) > program.loop[rank, thread]:
            build.add(rank, thread, ("compute", mean))
    return program


def _body(build: Builder, length: int, weights: dict[str, float], mean: float, pauses: float) -> None:
    rng, program, threads = build.rng, build.program, build.threads
    ranks = program.ranks
    kinds, shares = list(weights), list(weights.values())
    waits: list[tuple[int, int, Step]] = []
    last: list[tuple[int, int, Step]] = []
    lagging = rng.random() < 0.4
    for _ in range(length):
        kind = rng.choices(kinds, shares)[0]
        names = list(build.members)
        name = rng.choice(names)
        rank = rng.randrange(ranks)
        if kind == "collective":
            build.collective(name, rng.choice((1, 1, 1, 2, 3)))
        elif kind == "pair":
            _exchange(build, name, 1)
        elif kind == "exchange":
            _exchange(build, name, rng.randint(2, 6))
        elif kind == "both":
            other = rng.choice(names)
            if other != name:
                build.both(name, other)
        elif kind == "message":
            waits.append(build.message(rank, rng.randrange(ranks)))
        elif kind == "barrier":
            build.barrier(rng.sample(range(ranks), rng.randint(2, ranks)))
        elif kind == "sync":
            thread = rng.randrange(threads[rank])
            build.add(rank, thread, ("sync", 2 * thread + rng.randrange(2)))
        elif kind == "stream":
            if rng.random() < 0.5:  # the message is late
                build.compute(rank, 0.002 / build.slow[rank])
            target, thread, (_, flag, _) = build.message(rank, rng.randrange(ranks))
            stream = 2 * thread + rng.randrange(2)
            if program.loop:
                # A thread that only has streams wait for other ranks, lap after lap, would always be ahead of them:
                # there is no instant at which its stream is dry. So it has a call before, and waits for the stream.
                if not any(step[0] == "call" for step in program.steps[target, thread][program.loop[target, thread] :]):
                    continue
                last.append((target, thread, ("sync", stream)))
            build.add(target, thread, ("stream waits", stream, flag))
        elif kind == "create":
            if (lot := rng.random()) < 0.5:
                _new(build)
            elif lot < 0.75:
                _derived(build, name)
            else:
                build.create_together(*(rng.sample(range(ranks), rng.randint(2, ranks)) for _ in range(2)))
        elif kind == "destroy":
            if len(names) > 1:
                build.destroy(name)
        elif kind == "capture":
            for captured in {rank, rng.randrange(ranks)} & set(build.members[name]):
                member = build.members[name].index(captured)
                op = Op(Lane(name, member, "collective"), 0, 0)
                build.add(captured, build.thread(captured, name), ("capture", (op,) * rng.randint(1, 3)))
        else:
            build.compute(rank, mean * (100 if rng.random() < pauses else 1))
        rng.shuffle(waits)
        while waits and rng.random() < (0.1 if lagging else 0.5):
            target, thread, step = waits.pop()
            build.add(target, thread, step)
    for target, thread, step in waits + last:
        build.add(target, thread, step)


def _new(build: Builder) -> None:
    rng, ranks = build.rng, build.program.ranks
    if rng.random() < 0.4:
        chosen = list(range(ranks))
    else:
        chosen = rng.sample(range(ranks), rng.randint(2, ranks))
        if rng.random() < 0.1:
            chosen.append(rng.choice(chosen))
    build.create(chosen)


def _derived(build: Builder, parent: str) -> None:
    """Split (every member in some part), shrink (some leave) or grow (some come)."""
    rng = build.rng
    members = list(dict.fromkeys(build.members[parent]))
    kind = rng.choice(("split", "shrink", "grow"))
    if kind == "split":
        rng.shuffle(members)
        middle = rng.randint(1, len(members))
        for part in (members[:middle], members[middle:]):
            if part:
                build.create(part, parent=parent)
    elif kind == "shrink" and len(members) > 1:
        build.create(rng.sample(members, rng.randint(1, len(members) - 1)), parent=parent)
    else:
        strangers = [rank for rank in range(build.program.ranks) if rank not in members]
        for rank in strangers:
            build.thread(rank, parent)
        build.create(members + strangers[: rng.randint(0, len(strangers))], parent=parent)


def _exchange(build: Builder, name: str, number: int) -> None:
    rng, size = build.rng, len(build.members[name])
    if size < 2:
        return
    if number > 1 and rng.random() < 0.3:  # a ring
        build.exchange(name, [(member, (member + 1) % size) for member in range(size)])
        return
    pairs = [tuple(rng.sample(range(size), 2)) for _ in range(number)]
    build.exchange(name, [(a, b) for a, b in pairs], times=rng.choice((1, 1, 2)))


def disordered(seed: int, *, length: int = 4000) -> Program:
    """A program without the order: from early on until its last but one operation some rank is always ahead.

    Some random operations of other ranks and threads run beside it. The first threads of ranks 0 and 1 do nothing else.
    """
    rng = random.Random(seed)
    ranks = rng.randint(2, 8)
    build = Builder(rng, ranks, [2] * ranks)
    program = build.program
    program.depth = rng.choice((4, 1024))
    program.hints = rng.choice(("none", "true", "false"))
    build.wandering = 0.0
    name = build.create(range(ranks))
    for rank in range(ranks):
        build.hand_over(rank, name, 1)
    pair = build.create((0, 1))
    other = build.create((0, 1))
    for rank in (0, 1):
        for one in (pair, other):
            build.hand_over(rank, one, 0)
    # Connections are made in order, or the first calls would wait for each other in NCCL too.
    for one in (pair, other):
        build.collective(one)
        build.exchange(one, [(0, 1)])
    before = program.calls
    STYLES[rng.randrange(len(STYLES))](build, pair, other, length)
    program.disorder = program.calls - before
    for _ in range(rng.randint(0, 30)):
        build.collective(name)
        build.compute(rng.randrange(ranks), 1e-4)
    return program


def _mine(build: Builder, rank: int, lane: Lane, tag: int) -> None:
    """On a stream of its own for each communicator, so the fake's streams cannot wait for each other."""
    build.program.expected[lane].append(tag)
    stream = 10 + hash_of(lane.communicator) % 7
    build.add(rank, 0, ("call", (Op(lane, tag, stream),), False), ("compute", build.rng.random() * 1e-4))


def staggered_by_messages(build: Builder, pair: str, other: str, length: int) -> None:
    """Rank 0 issues its operation number i + 1 before it says that rank 1 may issue number i."""
    for index in range(length):
        _mine(build, 0, Lane(pair, 0, "collective"), index + 1)
        build.add(0, 0, ("post", 100000 + index))
    build.add(0, 0, ("post", 100000 + length))
    for index in range(length):
        build.add(1, 0, ("wait", 100001 + index, 0))
        _mine(build, 1, Lane(pair, 1, "collective"), index + 1)


def crossed(build: Builder, pair: str, other: str, length: int) -> None:
    """Rank 0 is always one operation ahead on one communicator, rank 1 on the other."""
    tag = build.tag
    for rank, first, second in ((0, pair, other), (1, other, pair)):
        _mine(build, rank, Lane(first, rank, "collective"), tag + 1)
        for index in range(tag + 1, tag + length):
            _mine(build, rank, Lane(first, rank, "collective"), index + 1)
            _mine(build, rank, Lane(second, rank, "collective"), index)
        _mine(build, rank, Lane(second, rank, "collective"), tag + length)


def staggered_sends(build: Builder, pair: str, other: str, length: int) -> None:
    """As the first, with sends and receives."""
    for index in range(length):
        _mine(build, 0, Lane(pair, 0, "send", 1), index + 1)
        build.add(0, 0, ("post", 100000 + index))
    build.add(0, 0, ("post", 100000 + length))
    for index in range(length):
        build.add(1, 0, ("wait", 100001 + index, 0))
        _mine(build, 1, Lane(pair, 1, "receive", 0), index + 1)


STYLES = (staggered_by_messages, crossed, staggered_sends)
