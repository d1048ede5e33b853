"""When the rehearsed run is disturbed, and how. Pure: the same seed gives the same instants."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from moorage.rehearse.spec import Rehearsal

#: ``checkpoint``: the job runs on. ``back``: go back to the newest checkpoint, so that steps are done twice.
#: ``move``: a checkpoint, and on from it at once, on other nodes where there are any.
Action = Literal["checkpoint", "back", "move"]


class Disturbance(msgspec.Struct, frozen=True, kw_only=True):
    """``at``: the part of the undisturbed run's time after which it comes."""

    at: float
    action: Action


def disturbances(plan: Rehearsal) -> list[Disturbance]:
    """In order of time. Every restore is a way back or a move; nothing goes back before there is a checkpoint."""
    chance = random.Random(plan.seed)
    count = plan.checkpoints + plan.restores
    # One in each part of the time, anywhere within it: no two fall together.
    width = (plan.end - plan.begin) / count
    moments = [plan.begin + width * (number + chance.uniform(0.1, 0.9)) for number in range(count)]
    kinds = ["checkpoint"] * plan.checkpoints + ["restore"] * plan.restores
    chance.shuffle(kinds)
    found: list[Disturbance] = []
    for moment, kind in zip(moments, kinds, strict=True):
        back = bool(found) and chance.random() < 0.5
        action: Action = "checkpoint" if kind == "checkpoint" else ("back" if back else "move")
        found.append(Disturbance(at=round(moment, 4), action=action))
    return found
