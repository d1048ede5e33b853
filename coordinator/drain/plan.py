"""Where every job of some nodes goes when these are taken out of service. Pure; fast for hundreds of nodes.

All nodes of the drain are given up from the start, so every job moves once, off all of them at a time, in the first
wave that has one of its nodes. Its pods on other nodes stay where they are. A job moves as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from moorage.coordinator.capacity import NOTHING, Need
from moorage.coordinator.drain.model import Fits, JobView, Move, NodeView, Plan, Stuck, fits_anywhere
from moorage.errors import NotFound, UsageError

_NAMED = 3


def plan(
    nodes: Iterable[NodeView],
    jobs: Iterable[JobView],
    leaving: Sequence[str],
    *,
    parallel: int = 1,
    fits: Fits = fits_anywhere,
    wanted: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Plan the drain of ``leaving``, ``parallel`` nodes at a time, in the order given.

    ``wanted``: for some jobs (by id) the seats of an earlier plan, kept where they still can be had. What has no place
    is in ``stuck``, each with its reason. Raises `NotFound` for a node that is not known, `UsageError`.
    """
    known = {view.node: view for view in nodes}
    leaving = tuple(dict.fromkeys(leaving))
    if missing := [node for node in leaving if node not in known]:
        raise NotFound(f"no node {', '.join(missing)}", "moorage nodes lists all of them")
    if not leaving:
        raise UsageError("no node is chosen", "name nodes, or choose them with -l SELECTOR")
    if parallel < 1:
        raise UsageError(f"--parallel {parallel} is too small", "the least is 1")
    waves = tuple(tuple(leaving[at : at + parallel]) for at in range(0, len(leaving), parallel))
    wave_of = {node: number for number, wave in enumerate(waves, 1) for node in wave}
    all_jobs = sorted(jobs, key=lambda job: job.job)
    concerned = [job for job in all_jobs if any(seat in wave_of for seat in job.seats)]
    packing = _Packing(known, all_jobs, set(leaving), fits)
    found = packing.pack([job for job in concerned if not job.ends], wave_of, wanted or {})
    moves, stuck = [], []
    for job in concerned:
        wave = min(wave_of[seat] for seat in job.seats if seat in wave_of)
        target = found.get(job.job)
        if job.ends:
            continue
        if target is None:
            reason, choices = packing.why(job)
            stuck.append(Stuck(job=job.job, name=job.name, wave=wave, source=job.seats, reason=reason, choices=choices))
        else:
            moves.append(Move(job=job.job, name=job.name, wave=wave, source=job.seats, target=target))
    return Plan(
        waves=waves,
        moves=tuple(sorted(moves, key=lambda move: (move.wave, move.name, move.job))),
        stuck=tuple(sorted(stuck, key=lambda one: (one.wave, one.name, one.job))),
        ending=tuple(job.name for job in concerned if job.ends),
    )


class _Packing:
    """Room on the nodes that stay, and what was given away of it."""

    def __init__(self, known: Mapping[str, NodeView], jobs: Sequence[JobView], leaving: set[str], fits: Fits) -> None:
        self._known = known
        self._leaving = leaving
        self._fits = fits
        self._targets = sorted(
            name for name, v in known.items() if v.live and v.ready and not v.cordoned and name not in leaving
        )
        self._room = {name: view.has for name, view in known.items()}
        self._pods = dict.fromkeys(known, 0)
        for job in jobs:
            for seat in job.seats:
                if seat in self._room:
                    self._room[seat] -= job.need
                    self._pods[seat] += 1
        self._possible: dict[str, list[str]] = {}
        self._placed: dict[str, tuple[JobView, list[str]]] = {}

    def pack(
        self, jobs: Sequence[JobView], wave_of: Mapping[str, int], wanted: Mapping[str, Sequence[str]]
    ) -> dict[str, tuple[str, ...]]:
        """The seats of each job that has a place."""
        for job in jobs:
            self._possible[job.job] = [] if job.fixed else self._candidates(job)
        left: list[JobView] = []
        for job in jobs:  # what was promised before comes first
            if not self._take(job, wanted.get(job.job, ())):
                left.append(job)
        # Who has the fewest nodes to choose from, and among those the largest, chooses first.
        left.sort(key=lambda job: (len(self._possible[job.job]), *_size(job), job.job))
        homeless = [job for job in left if not self._place(job)]
        for job in homeless:
            self._place_by_shifting(job)
        return {name: tuple(seats) for name, (_, seats) in self._placed.items()}

    def _candidates(self, job: JobView) -> list[str]:
        return [
            name
            for name in self._targets
            if (not job.allowed or name in job.allowed)
            and job.need.fits(self._known[name].has)
            and not self._fits(job, self._known[name])
        ]

    def _moving(self, job: JobView) -> list[int]:
        return [pod for pod, seat in enumerate(job.seats) if seat in self._leaving]

    def _take(self, job: JobView, seats: Sequence[str]) -> bool:
        if len(seats) != len(job.seats) or job.fixed:
            return False
        moving = self._moving(job)
        need: dict[str, Need] = {}
        for pod in moving:
            need[seats[pod]] = need.get(seats[pod], NOTHING) + job.need
        possible = set(self._possible[job.job])
        if any(node not in possible or not need[node].fits(self._room[node]) for node in need):
            return False
        if any(seats[pod] != seat for pod, seat in enumerate(job.seats) if pod not in moving):
            return False
        for pod in moving:
            self._give(job, seats[pod])
        self._placed[job.job] = job, list(seats)
        return True

    def _give(self, job: JobView, node: str) -> None:
        self._room[node] -= job.need
        self._pods[node] += 1

    def _give_back(self, job: JobView, node: str) -> None:
        self._room[node] += job.need
        self._pods[node] -= 1

    def _place(self, job: JobView) -> bool:
        """Give every pod that must leave a node; all or nothing."""
        seats = list(job.seats)
        given: list[str] = []
        mine: dict[str, int] = {}
        for seat in job.seats:
            mine[seat] = mine.get(seat, 0) + 1
        for pod in self._moving(job):
            fitting = [name for name in self._possible[job.job] if job.need.fits(self._room[name])]
            if not fitting:
                for node in given:
                    self._give_back(job, node)
                return False
            node = min(fitting, key=lambda name: self._rank(job, name, mine))
            self._give(job, node)
            given.append(node)
            mine[node] = mine.get(node, 0) + 1
            seats[pod] = node
        self._placed[job.job] = job, seats
        return True

    def _rank(self, job: JobView, name: str, mine: Mapping[str, int]) -> tuple[int, int, int, str]:
        # GPUs are kept together, so that large jobs find room; where none are needed, pods are spread.
        spare = self._room[name].gpus - job.need.gpus if job.need.gpus else 0
        return spare, mine.get(name, 0), self._pods[name], name

    def _place_by_shifting(self, job: JobView) -> bool:
        """Give ``job`` the place of another one of the drain that can go elsewhere."""
        possible = set(self._possible[job.job])
        for other, seats in list(self._placed.values()):
            if possible.isdisjoint(seats[pod] for pod in self._moving(other)):
                continue
            for pod in self._moving(other):
                self._give_back(other, seats[pod])
            del self._placed[other.job]
            if self._place(job):
                if self._place(other):
                    return True
                for pod in self._moving(job):
                    self._give_back(job, self._placed[job.job][1][pod])
                del self._placed[job.job]
            for pod in self._moving(other):
                self._give(other, seats[pod])
            self._placed[other.job] = other, seats
        return False

    def why(self, job: JobView) -> tuple[str, tuple[str, ...]]:
        """Why a job has no place, and what can be done."""
        park = f"moorage park {job.name} (it waits in the store until moorage restore {job.name})"
        stop = f"moorage stop {job.name} --checkpoint"
        if job.fixed:
            return job.fixed, (stop, "wait until it has ended")
        if not self._targets:
            return "no other node is in service", ("add a node, or uncordon one", park, stop)
        pool = self._targets
        if job.allowed:
            pool = [name for name in self._targets if name in job.allowed]
            if not pool:
                only = ", ".join(job.allowed)
                stays = "it does not stay in service" if len(job.allowed) == 1 else "none of them stays in service"
                choices = ("leave one of these nodes out of the drain", park, stop)
                return f"it may run on {only} only, and {stays}", choices
        told = [f"{name}: {self._lack(job, name)}" for name in pool]
        more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        reason = f"no node has room for it ({'; '.join(told[:_NAMED])}{more})"
        return reason, ("add a node, or uncordon one", park, stop)

    def _lack(self, job: JobView, name: str) -> str:
        if misfit := self._fits(job, self._known[name]):
            return misfit
        room, pods = self._room[name], 0
        while job.need.fits(room) and pods < len(job.seats):
            room, pods = room - job.need, pods + 1
        lack = job.need.short(room)
        return f"room for {pods} of {len(self._moving(job))} pods, then {lack}" if pods else lack


def _size(job: JobView) -> tuple[float, ...]:
    """Larger first."""
    pods = len(job.seats)
    return (-job.need.gpus * pods, -job.need.memory * pods, -job.need.cpus * pods, -pods)
