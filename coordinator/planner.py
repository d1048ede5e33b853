"""Placement: which node each pod of a job goes to. Pure: the state of the nodes comes in, names go out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from moorage.coordinator.capacity import UNBOUNDED, Need
from moorage.errors import Incompatible, NoCapacity, NotFound


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A node as placement sees it. ``pods``, ``…_used``: of all other jobs. ``slots`` 0: any number of pods.

    ``cordoned``: nothing new goes there.
    """

    node: str
    ready: bool = True
    other_store: bool = False  # it opened another store than the coordinator
    cordoned: bool = False
    gpus: int = 0
    gpus_used: int = 0
    pods: int = 0
    slots: int = 0
    cpus: float = UNBOUNDED
    cpus_used: float = 0.0
    memory: int = UNBOUNDED
    memory_used: int = 0

    @property
    def room(self) -> Need:
        """What is left for the job that is placed."""
        return Need(
            pods=(self.slots or UNBOUNDED) - self.pods,
            gpus=self.gpus - self.gpus_used,
            cpus=self.cpus - self.cpus_used,
            memory=self.memory - self.memory_used,
        )


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be placed. ``on``: only these nodes, as asked for now; ``allowed``: only these, by the job's spec.

    ``exclude``: nodes that have just failed. ``prefer``: where pod 0, 1, … ran last, taken when all
    else is equal. ``seats``: the node of each pod as a drain planned it, taken if that can be. ``misfits``: (pod, node)
    and why that pod's checkpoint cannot be restored there.
    """

    pods: int
    gpus_per_pod: int = 0
    cpus_per_pod: float = 0.0
    memory_per_pod: int = 0
    on: Sequence[str] = ()
    allowed: Sequence[str] = ()
    exclude: Sequence[str] = ()
    prefer: Sequence[str] = ()
    seats: Sequence[str] = ()
    misfits: Mapping[tuple[int, str], str] = {}

    @property
    def need(self) -> Need:
        """Of one pod."""
        return Need(gpus=self.gpus_per_pod, cpus=self.cpus_per_pod, memory=self.memory_per_pod)


def place(wish: Wish, places: Iterable[Place]) -> list[str]:
    """The node of each pod. ``places``: the live nodes.

    Spreads pods over the nodes with the fewest pods; several pods share a node when there are fewer nodes than pods, or
    too few GPUs elsewhere. Every pod gets ``gpus_per_pod`` GPUs of its node for itself.

    Raises `NotFound` for a named node that is not there, `Incompatible` when the checkpoint does not fit a node that is
    named now, or none of those that are left, and `NoCapacity` with the reason when there is no placement.
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
    for node in dict.fromkeys(wish.on):
        if why := _unfit(wish, node):
            raise Incompatible(f"the checkpoint does not fit node {node}: {why}", _COMPAT.format(node=node))
    usable = [live[node] for node in named] if named else sorted(live.values(), key=lambda p: p.node)
    usable = _sift(wish, usable)
    return _as_planned(wish, usable) or _spread(wish, usable)


def _as_planned(wish: Wish, places: list[Place]) -> list[str]:
    """The seats that were planned; empty if there are none, or one of them cannot be had."""
    free = {p.node: p.room for p in places}
    for pod, node in enumerate(wish.seats):
        if node not in free or (pod, node) in wish.misfits or not wish.need.fits(free[node]):
            return []
        free[node] -= wish.need
    return list(wish.seats) if len(wish.seats) == wish.pods else []


def _sift(wish: Wish, places: list[Place]) -> list[Place]:
    if not places:
        raise NoCapacity("no node is live", "start a worker: moorage worker")
    same = [p for p in places if not p.other_store]
    if not same:
        raise NoCapacity(
            f"{_nodes([p.node for p in places])} opened another store than the coordinator: what is saved there would "
            "be lost with its host",
            "name one shared folder or S3 bucket as `store` in the settings of all of them",
        )
    places = same
    ready = [p for p in places if p.ready]
    if not ready:
        raise NoCapacity(
            f"{_nodes([p.node for p in places])} cannot run pods",
            f"what they lack says: moorage doctor --node {places[0].node}",
        )
    in_service = [p for p in ready if not p.cordoned]
    if not in_service:
        are = "is" if len(ready) == 1 else "are"
        raise NoCapacity(f"{_nodes([p.node for p in ready])} {are} cordoned", "moorage uncordon NODE")
    ready = in_service
    fresh = [p for p in ready if p.node not in wish.exclude]
    if not fresh:
        raise NoCapacity(
            f"no node is left: {_nodes([p.node for p in ready])} failed", "moorage events says why each one failed"
        )
    fitting = [p for p in fresh if not _unfit(wish, p.node)]
    if not fitting:
        told = "; ".join(f"{p.node}: {_unfit(wish, p.node)}" for p in fresh)
        raise Incompatible(f"the checkpoint fits no node that is left ({told})", _COMPAT.format(node="NODE"))
    return fitting


#: What to do about a checkpoint that does not fit.
_COMPAT = "`moorage compat CHECKPOINT {node}` prints every rule; --if-incompatible cold-start begins from nothing"


def _unfit(wish: Wish, node: str) -> str:
    """Why no pod at all can be restored on the node; empty if one can."""
    why = [wish.misfits.get((pod, node), "") for pod in range(wish.pods)]
    return why[0] if all(why) else ""


def _spread(wish: Wish, places: list[Place]) -> list[str]:
    order = {p.node: index for index, p in enumerate(places)}
    pods = {p.node: p.pods for p in places}
    mine = dict.fromkeys(pods, 0)
    free = {p.node: p.room for p in places}
    need = wish.need
    chosen: list[str] = []
    for pod in range(wish.pods):
        room = [node for node in order if need.fits(free[node])]
        fits = [node for node in room if (pod, node) not in wish.misfits]
        if room and not fits:
            told = "; ".join(f"{node}: {wish.misfits[pod, node]}" for node in room)
            raise Incompatible(f"pod {pod} fits no node that is left ({told})", _COMPAT.format(node="NODE"))
        if not fits:
            raise _no_room(wish, places, free, len(chosen))
        last = wish.prefer[pod] if pod < len(wish.prefer) else ""
        node = min(fits, key=lambda n: (mine[n], mine[n] + pods[n], n != last, order[n]))
        chosen.append(node)
        mine[node] += 1
        free[node] -= need
    return _kept(chosen, wish.prefer)


def _kept(chosen: list[str], prefer: Sequence[str]) -> list[str]:
    """The same nodes, dealt out so that as many pods as possible stay where they were: their files are there."""
    left = list(chosen)
    seats = [""] * len(chosen)
    for pod, node in enumerate(prefer[: len(chosen)]):
        if node in left:
            left.remove(node)
            seats[pod] = node
    return [node or left.pop(0) for node in seats]


def _no_room(wish: Wish, places: list[Place], free: Mapping[str, Need], placed: int) -> NoCapacity:
    """``free``: the room that is left beside the ``placed`` pods that have found theirs."""
    nodes = _nodes([p.node for p in places])
    need = wish.need
    if need.gpus and all(need.gpus > room.gpus for room in free.values()):
        have = sum(max(0, p.gpus - p.gpus_used) for p in places)
        return NoCapacity(
            f"{wish.pods} pods with {wish.gpus_per_pod} GPUs each do not fit on {nodes}: "
            f"{have} GPUs are free there, and no pod can be split",
            "ask for fewer GPUs, or wait until others have ended",
        )
    lacks = "; ".join(f"{node}: {need.short(room)}" for node, room in list(free.items())[:4])
    what = f"{wish.pods} pods do" if wish.pods != 1 else "the pod does"
    beside = f": {placed} of them do, and then there is no room" if placed else ""
    return NoCapacity(f"{what} not fit on {nodes}{beside} ({lacks})", "ask for less, or wait until others have ended")


def _nodes(names: Sequence[str]) -> str:
    return f"node{'s' if len(names) != 1 else ''} {', '.join(names)}"
