"""Random programs at random instants: every one with the order is cut, every other is not, and goes on. All by seed."""

from __future__ import annotations

import random

import pytest

from moorage.nccl_quiesce.model import Lane
from tests.support.nccl_sim import World
from tests.support.nccl_sim_builder import Builder
from tests.support.nccl_sim_judge import judge
from tests.support.nccl_sim_parts import Program
from tests.support.nccl_sim_programs import looping, ordered
from tests.support.nccl_sim_trial import DISORDERED, trial

PROGRAMS, PART = 2000, 250
SEEDS = range(1, PROGRAMS + 1)


@pytest.mark.parametrize("first", SEEDS[::PART])
def test_programs_with_the_order_are_cut_and_others_abort_and_go_on(first: int) -> None:
    trials = [trial(seed) for seed in range(first, first + PART)]
    wrong = {found.seed: found.problems for found in trials if found.problems}
    assert not wrong, f"{len(wrong)} of {PART} programs: {dict(list(wrong.items())[:5])}"
    # What the programs are for: cuts in the midst of work, at instants when counts were unequal, slides.
    others = PART // DISORDERED
    assert sum(found.aborts for found in trials) == sum(not found.ordered for found in trials) == others
    assert sum(found.cuts for found in trials) >= PART - others
    assert sum(found.midway for found in trials) > 0.8 * PART
    assert sum(found.unequal for found in trials) > 0.6 * PART
    assert sum(found.slides > 0 for found in trials if found.ordered) > 0.02 * PART


def test_programs_are_of_all_kinds() -> None:
    programs = [make(seed) for seed in range(1, 100) for make in (ordered, looping)]
    assert {program.ranks for program in programs} >= {2, 3, 5, 8, 13, 15}
    threads = [sum(rank == 0 for rank, _ in program.steps) for program in programs]
    assert {1, 2, 3} <= set(threads)
    steps = [step for program in programs for steps in program.steps.values() for step in steps]
    kinds = {step[0] for step in steps}
    assert kinds >= {
        "call",
        "create",
        "destroy",
        "post",
        "wait",
        "barrier",
        "sync",
        "stream waits",
        "compute",
        "capture",
    }
    calls = [step for step in steps if step[0] == "call"]
    assert any(step[2] and len(step[1]) > 1 for step in calls), "graphs"
    assert any(len({op.lane.communicator for op in step[1]}) > 1 for step in calls), "groups over communicators"
    assert any({"send", "receive"} <= {op.lane.kind for op in step[1]} for step in calls), "exchanges"
    assert any(len({c.communicator for c in step[1]}) > 1 for step in steps if step[0] == "create"), "grouped creation"
    assert {program.hints for program in programs} == {"none", "true", "false"}
    assert any(program.loss for program in programs)


# ---- the fake and the checker do see what is wrong


def collectives(seed: int = 1) -> Program:
    build = Builder(random.Random(seed), 3, [1] * 3)
    name = build.create(range(3))
    for _ in range(5):
        build.collective(name)
    return build.program


def test_a_collective_that_one_rank_misses_hangs_the_others() -> None:
    program = collectives()
    del program.steps[1, 0][-1]
    run = World(program, 1, []).run()
    assert any(problem.startswith("hangs: streams") and "rank 0" in problem for problem in run.problems)
    assert World(collectives(), 1, []).run().check() == []


def test_a_full_launch_queue_and_a_first_collective_block_their_caller() -> None:
    for missing, depth in ((-1, 1), (1, 1024)):
        program = collectives()
        program.depth = depth
        for rank in (1, 2):
            del program.steps[rank, 0][missing:]
        run = World(program, 1, []).run()
        assert any(problem.startswith("hangs: rank 0 thread 0 inside") for problem in run.problems) == (depth == 1024)
        assert any(problem.startswith("hangs: streams") for problem in run.problems) == (depth == 1)


ONE, TWO = (Lane("c", member, "collective") for member in (0, 1))
SEND, RECEIVE = Lane("c", 0, "send", 1), Lane("c", 1, "receive", 0)
MADE = [("created", 0, "c", 2), ("created", 1, "c", 2)]
BOTH = [("issue", 0, ONE), ("issue", 1, TWO), ("done", ONE), ("done", TWO)]


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        ([*MADE, *BOTH, ("accept",), ("rebuilt",), *BOTH], ""),
        ([*MADE, *BOTH[:2], ("accept",)], "2 issued"),
        ([*MADE, *BOTH, ("issue", 0, ONE), ("done", ONE), ("accept",)], "unequal"),
        ([*MADE, ("issue", 0, ONE), ("done", ONE), ("accept",)], "unequal"),
        ([*MADE, ("issue", 0, SEND), ("done", SEND), ("accept",)], "its partner 0"),
        ([*MADE, ("issue", 1, RECEIVE), ("accept",)], "1 issued and 0 done"),
        ([MADE[0], ("accept",)], "made at 1 of 2"),
        ([*MADE, ("accept",), ("issue", 0, ONE)], "after the cut"),
        ([MADE[0], ("accept",), MADE[1]], "after the cut"),
    ],
)
def test_the_checker_finds_what_is_half_done(log: list[tuple[object, ...]], wrong: str) -> None:
    found = judge(log)
    if wrong == "2 issued":
        assert len([problem for problem in found if "1 issued and 0 done" in problem]) == 2
    else:
        assert (found == []) if not wrong else any(wrong in problem for problem in found)
