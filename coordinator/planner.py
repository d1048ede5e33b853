"""Placement: which node each pod of a job goes to. Pure: the state of the nodes comes in, names go out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from moorage.errors import NoCapacity, NotFound


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A node as placement sees it. ``pods`` and ``gpus_used``: of all other jobs."""

    node: str
    ready: bool = True
    gpus: int = 0
    gpus_used: int = 0
    pods: int = 0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. ``on``: only these nodes, as asked for now; ``allowed``: only these, by the job's spec.

    ``exclude``: nodes that have just failed. ``prefer``: where pod 0, 1, … ran last, taken when all
    else is equal.
    """

    pods: int
    gpus_per_pod: int = 0
    on: Sequence[str] = ()
    allowed: Sequence[str] = ()
    exclude: Sequence[str] = ()
    prefer: Sequence[str] = ()


def place(wish: Wish, places: Iterable[Place]) -> list[str]:
    """The node of each pod. ``places``: the live nodes.

    Spreads pods over the nodes with the fewest pods; several pods share a node when there are fewer nodes than pods, or
    too few GPUs elsewhere. Every pod gets ``gpus_per_pod`` GPUs of its node for itself.

    Raises `NotFound` for a named node that is not there, `NoCapacity` with the reason when there is no placement.
    """
    live = {p.node: p for p in places}
    named = tuple(dict.fromkeys(wish.on or wish.allowed))
    if missing := [node for node in named if node not in live]:
        raise NotFound(
            f"{_nodes(missing)} {'is' if len(missing) == 1 else 'are'} not there",
            "moorage nodes lists the nodes that are live",
        )
    if wish.on and wish.allowed and (outside := [node for node in wish.on if node not in wish.allowed]):
        raise NoCapacity(
            f"the job may run on {', '.join(wish.allowed)} only, not on {', '.join(outside)}",
            "choose among the nodes that it was submitted with",
        )
    usable = [live[node] for node in named] if named else sorted(live.values(), key=lambda p: p.node)
    usable = _sift(wish, usable)
    return _spread(wish, usable)


def _sift(wish: Wish, places: list[Place]) -> list[Place]:
    if not places:
        raise NoCapacity("no node is live", "start a worker: moorage worker")
    ready = [p for p in places if p.ready]
    if not ready:
        raise NoCapacity(
            f"{_nodes([p.node for p in places])} cannot run pods", "moorage doctor on the node says what it lacks"
        )
    fresh = [p for p in ready if p.node not in wish.exclude]
    if not fresh:
        raise NoCapacity(
            f"no node is left: {_nodes([p.node for p in ready])} failed", "moorage events says why each one failed"
        )
    return fresh


def _spread(wish: Wish, places: list[Place]) -> list[str]:
    order = {p.node: index for index, p in enumerate(places)}
    pods = {p.node: p.pods for p in places}
    mine = dict.fromkeys(pods, 0)
    free = {p.node: p.gpus - p.gpus_used for p in places}
    chosen: list[str] = []
    for pod in range(wish.pods):
        fits = [node for node in order if free[node] >= wish.gpus_per_pod]
        if not fits:
            have = sum(max(0, p.gpus - p.gpus_used) for p in places)
            raise NoCapacity(
                f"{wish.pods} pods with {wish.gpus_per_pod} GPUs each do not fit on {_nodes(list(order))}: "
                f"{have} GPUs are free there, and no pod can be split",
                "ask for fewer GPUs, or wait until others have ended",
            )
        last = wish.prefer[pod] if pod < len(wish.prefer) else ""
        node = min(fits, key=lambda n: (mine[n], mine[n] + pods[n], n != last, order[n]))
        chosen.append(node)
        mine[node] += 1
        free[node] -= wish.gpus_per_pod
    return chosen


def loads(placements: Mapping[str, tuple[Sequence[str], int]], *, without: str = "") -> dict[str, tuple[int, int]]:
    """Pods and GPUs in use by node. ``placements``: of each job the nodes of its pods, and its GPUs per pod."""
    used: dict[str, tuple[int, int]] = {}
    for job, (nodes, gpus) in placements.items():
        if job == without:
            continue
        for node in nodes:
            count, taken = used.get(node, (0, 0))
            used[node] = (count + 1, taken + gpus)
    return used


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) != 1 else ''} {', '.join(names)}"
