"""What is to be done about a job, given how Ray and moorage see it. Pure: observations in, one action out."""

from __future__ import annotations

from typing import Literal

import msgspec

from moorage.ray.options import FailureConfig

Wanted = Literal["running", "parked", "stopped"]
Doing = Literal["nothing", "end", "rejoin", "evacuate", "recover", "give-up"]


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """One bundle of the placement group. ``ray_node``: its id; ``node``: what moorage calls it.

    ``preempted``: Ray has announced that the node goes away, or said that as the reason of its death; ``deadline``:
    when, in seconds since the epoch, 0 if that was not said. ``joined``: its supervisor is there. ``lost``: moorage has
    lost the node.
    """

    ray_node: str
    node: str
    alive: bool = True
    preempted: bool = False
    deadline: float = 0.0
    joined: bool = True
    lost: bool = False


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What was used up of the two budgets."""

    failures: int = 0
    preemptions: int = 0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The job and its bundles at one moment. ``stranded``: it is parked because a way back failed, not by request."""

    phase: str
    over: bool
    reason: str = ""
    bundles: tuple[Bundle, ...] = ()
    wanted: Wanted = "running"
    stranded: bool = False


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """``bundles``: indexes of those that it is about. ``deadline``: as in `Bundle`. ``why``: a part of a sentence."""

    do: Doing
    why: str = ""
    bundles: tuple[int, ...] = ()
    deadline: float = 0.0
    preemption: bool = False


NOTHING = Action(do="nothing")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How a job stands, as ``ray.get(job.progress())`` gives it.

    ``phase``: moorage's, or ``placing`` while bundles are looked for. ``nodes``: of the bundles. ``metrics``: the
    newest report of rank 0. ``heartbeat``: when the newest checkpoint was committed, in seconds since the epoch.
    """

    job: str
    phase: str
    reason: str
    nodes: list[str]
    incarnation: int
    failures: int
    preemptions: int
    latest_checkpoint: str
    heartbeat: float
    metrics: dict[str, object]
    reports: int


def decide(seen: Seen, spent: Spent, limits: FailureConfig) -> Action:
    """The next thing to do. A job that ended by itself is never touched; one that fails is brought back on new bundles
    while there is a budget for it; one whose bundles go away is moved while it still runs."""
    gone = tuple(index for index, bundle in enumerate(seen.bundles) if bundle.preempted or not bundle.alive)
    preempted = any(seen.bundles[index].preempted for index in gone)
    if seen.over and (seen.phase != "failed" or seen.wanted != "running"):
        return Action(do="end", why=seen.reason)
    if seen.wanted != "running":
        return NOTHING
    if seen.phase == "failed" or (seen.phase == "parked" and seen.stranded):
        return _within(Action(do="recover", why=seen.reason, bundles=gone, preemption=preempted), spent, limits)
    if seen.phase not in ("running", "checkpointing") or any(bundle.lost for bundle in seen.bundles):
        return NOTHING  # moorage is about to say that the job has failed
    if gone:
        deadlines = [seen.bundles[index].deadline for index in gone if seen.bundles[index].deadline]
        leaving = ", ".join(dict.fromkeys(seen.bundles[index].node for index in gone))
        why = f"Ray takes {leaving} away" if preempted else f"Ray has lost {leaving}"
        action = Action(
            do="evacuate", why=why, bundles=gone, deadline=min(deadlines, default=0.0), preemption=preempted
        )
        return _within(action, spent, limits)
    lone = tuple(index for index, bundle in enumerate(seen.bundles) if not bundle.joined)
    if lone:
        where = ", ".join(dict.fromkeys(seen.bundles[index].node for index in lone))
        return Action(do="rejoin", why=f"the supervisor on {where} died", bundles=lone)
    return NOTHING


def spend(spent: Spent, action: Action) -> Spent:
    """The budgets after ``action``."""
    if action.do not in ("evacuate", "recover"):
        return spent
    if action.preemption:
        return msgspec.structs.replace(spent, preemptions=spent.preemptions + 1)
    return msgspec.structs.replace(spent, failures=spent.failures + 1)


def _within(action: Action, spent: Spent, limits: FailureConfig) -> Action:
    limit, used, name = (
        (limits.max_preemptions, spent.preemptions, "max_preemptions")
        if action.preemption
        else (limits.max_failures, spent.failures, "max_failures")
    )
    if limit < 0 or used < limit:
        return action
    return msgspec.structs.replace(action, do="give-up", why=f"{action.why.rstrip('.')}; {name}={limit} is used up")
