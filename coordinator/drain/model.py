"""Nodes, jobs and plans as plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from moorage.coordinator.capacity import Need

Homeless = Literal["refuse", "park", "leave"]
#: What became of a job of a drain.
MoveState = Literal["waiting", "moving", "moved", "parked", "ended", "failed", "left"]
SETTLED = frozenset({"moved", "parked", "ended", "failed", "left"})
DrainPhase = Literal["planned", "running", "cancelling", "done", "incomplete", "cancelled", "timed-out"]
OVER = frozenset({"done", "incomplete", "cancelled", "timed-out"})


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as the drain's planner sees it. ``has``: all that pods can take of it."""

    node: str
    live: bool = True
    ready: bool = True
    cordoned: bool = False
    has: Need
    driver: str = ""
    labels: dict[str, str] = {}


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has pods. ``need``: of one pod. ``allowed``: the only nodes that it may run on; empty: any.

    ``ends``: it is about to end by itself. ``fixed``: why it cannot be moved at all; empty: it can.
    """

    job: str
    name: str
    seats: tuple[str, ...]
    need: Need = Need()
    allowed: tuple[str, ...] = ()
    ends: bool = False
    fixed: str = ""


#: Whether a job can be restored on a node: empty, or the reason why not. `moorage.compat` gives the real one.
Fits = Callable[[JobView, NodeView], str]


def fits_anywhere(job: JobView, node: NodeView) -> str:
    """For fleets of which nothing else is known."""
    return ""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One job: the nodes of pod 0, 1, … before and, as planned, after."""

    job: str
    name: str
    wave: int  # from 1
    source: tuple[str, ...]
    target: tuple[str, ...]


class Stuck(msgspec.Struct, frozen=True, kw_only=True):
    """A job that has no other place: why, and what can be done about it."""

    job: str
    name: str
    wave: int
    source: tuple[str, ...]
    reason: str
    choices: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """``waves``: the nodes of each. ``ending``: names of jobs that are waited for, since they end by themselves."""

    waves: tuple[tuple[str, ...], ...]
    moves: tuple[Move, ...]
    stuck: tuple[Stuck, ...] = ()
    ending: tuple[str, ...] = ()
