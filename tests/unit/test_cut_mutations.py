"""Every rule of the cut, the gates and their conversation is needed: with any one taken away the tests fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from moorage.nccl_quiesce.cut import Cut
from tests.support import nccl_sim_cases as cases
from tests.support import nccl_sim_mutant_gates as gates
from tests.support import nccl_sim_mutants as rules
from tests.support.nccl_sim import World
from tests.support.nccl_sim_trial import trial

Mutant: TypeAlias = type[Cut] | type[World]

#: Where a mutant dies that random programs seldom or never meet.
WRITTEN: dict[Mutant, Callable[..., Any]] = {
    gates.StreamsFillAgain: cases.busy_stream,
    gates.Grudging: cases.opened_meanwhile,
    gates.LateReports: cases.much_is_lost,
    rules.InsideIsFine: cases.first_collectives,
    gates.NothingOwed: cases.another_thread,
    rules.PushedForEver: cases.late_push,
    rules.CreationsStandForEver: cases.creation_first,
    rules.AnyCreationSlides: cases.grouped_creation,
    rules.ThawedIsFine: cases.slow_creation,
    rules.WorkIsHeldForEver: cases.work_first,
    rules.WorkSlidesLikeCalls: cases.busy_stream,
    rules.AnySlides: cases.slow_partner,
    rules.NoGrowth: cases.slow_partner,
    rules.OneSlides: cases.taking_turns,
    rules.NewestSlides: cases.newer_ones,
    rules.OnlyHints: cases.wrong_hints,
    rules.NoHints: cases.pointed_to,
}
PROGRAMS = range(1, 151)  #: all of these are cut as they must be when nothing is taken away (test_cut_programs.py)
CASES = range(80)
MOST_EVENTS = 100_000


def dies(mutant: Mutant) -> bool:
    """Whether anything goes wrong."""
    world = mutant if issubclass(mutant, World) else World
    cut = mutant if issubclass(mutant, Cut) else Cut
    # A world of its own, since no program of these needs half as many events.
    world = type(world.__name__, (world,), {"most_events": MOST_EVENTS})
    written = WRITTEN.get(mutant)
    if written in cases.SITUATIONS:
        return bool(written(cut))
    if written is not None:
        return any(cases.try_case(written, seed, world=world, cut=cut) for seed in CASES)
    return any(trial(seed, world=world, cut=cut, deadline=20.0).problems for seed in PROGRAMS)


@pytest.mark.parametrize("mutant", [*gates.WORLDS, *rules.CUTS], ids=lambda mutant: mutant.__name__)
def test_taking_a_rule_away_is_noticed(mutant: Mutant) -> None:
    assert dies(mutant)


@pytest.mark.parametrize("written", dict.fromkeys(WRITTEN.values()), ids=lambda written: written.__name__)
def test_where_nothing_is_taken_away_nothing_is_noticed(written: Callable[..., Any]) -> None:
    """The same cases with the same bounds, so that it is the rule that makes the difference."""
    world = type("Bounded", (World,), {"most_events": MOST_EVENTS})
    if written in cases.SITUATIONS:
        assert written(Cut) == []
    else:
        assert not any(cases.try_case(written, seed, world=world) for seed in CASES)


def test_every_mutant_is_tried() -> None:
    for module, listed, base in ((gates, gates.WORLDS, World), (rules, rules.CUTS, Cut)):
        found = {thing for thing in vars(module).values() if isinstance(thing, type) and issubclass(thing, base)}
        assert found - {base} == set(listed)
        assert len(set(listed)) == len(listed)
