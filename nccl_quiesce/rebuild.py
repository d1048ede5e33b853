"""In which order communicators are made anew, and by whom. Pure: from what the processes say to what they are told."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from moorage.nccl_quiesce.control import Destroy, Make, Names, Process, Renewed
from moorage.nccl_quiesce.model import Plan
from moorage.nccl_quiesce.picture import Picture


class Survivors(Picture):
    """The reports of processes some of whose partners have exited.

    Who has a communicator had all of its members in processes that were making it, and a gate that was closed before
    the report shows what is being made. So a member that no process has, of a communicator that nobody is making, went
    with its process: the others have it as widows.
    """

    def unfinished(self) -> set[str]:
        return {name for name in super().unfinished() if "creating" in self.states[name]}

    def plan(self) -> Plan:
        plan = super().plan()
        whole = {name for name in plan.rebuild if len(self.ranks[name]) == self.size[name]}
        left = tuple(sorted({*plan.widowed, *plan.rebuild} - whole))
        return msgspec.structs.replace(plan, rebuild=tuple(sorted(whole)), widowed=left)


class Rebuild(msgspec.Struct, frozen=True):
    """``order``: all communicators that are to be made, in the job's one order; ``again``: creations that need fresh
    ids. ``makers``: by the name of each the process that makes its id. ``processes``: all that take part.
    """

    order: tuple[str, ...]
    again: tuple[str, ...]
    widowed: tuple[str, ...]
    makers: dict[str, int]
    attempts: dict[int, int]

    def names(self) -> dict[int, Names]:
        """For each process the ids that it makes."""
        found: dict[int, list[str]] = {}
        for name in (*self.order, *self.again):
            if name in self.makers:
                found.setdefault(self.makers[name], []).append(name)
        return {process: Names(tuple(names)) for process, names in found.items()}

    def make(self, ids: Mapping[str, bytes]) -> dict[int, Make]:
        """The same list for every process."""
        order = tuple((name, ids[name]) for name in self.order)
        again = self.renewed(ids).ids
        return {process: Make(attempt, order, again) for process, attempt in self.attempts.items()}

    def renewed(self, ids: Mapping[str, bytes]) -> Renewed:
        """What whoever comes late must know."""
        return Renewed(tuple((name, ids[name]) for name in self.again if name in self.makers))

    def destroy(self, processes: Mapping[int, Process]) -> dict[int, Destroy]:
        """What each process lets go of before: a rebuild that was broken off has made some of them already.

        Nothing has been issued since the cut, and partners may have let go of theirs: nobody waits for them.
        """
        return {
            process: Destroy(attempt, self.again, processes[process].again, self.widowed, abort=True)
            for process, attempt in self.attempts.items()
        }


def plan(processes: Mapping[int, Process]) -> Rebuild | None:
    """What must be made anew for all when some process has no communicators; None when nobody lacks any.

    The order is that of the names, so it is the same whoever asks. Processes with an open gate came later and have no
    part in it. What some member has must be made by all, also by those that the job has destroyed since the cut (they
    come, and go at once); but for what was a widow at the cut, and what has lost a process since.
    """
    part = {number: process for number, process in processes.items() if process.closed or process.torn}
    if not any(process.torn for process in part.values()):
        return None
    picture = Survivors({number: process.report for number, process in part.items()})
    had = {name for name, states in picture.states.items() if "ready" in states}
    widowed = {name for process in part.values() for name in process.widowed}
    widowed |= {name for name in had if len(picture.ranks[name]) < picture.size[name]}
    order = tuple(sorted(had - widowed))
    makers = {name: picture.ranks[name][min(picture.ranks[name])] for name in order}
    again: dict[str, int] = {}
    for number, process in sorted(part.items()):
        for name in process.again:
            again.setdefault(name, number)
    # Splits and shrinks need no id: they are made from their parent.
    makers |= {name: number for name, number in again.items() if "/" not in name}
    attempts = {number: process.report.attempt for number, process in part.items()}
    return Rebuild(order, tuple(sorted(again)), tuple(sorted(widowed)), makers, attempts)


def parts(plan: Plan, attempt: int, processes: Mapping[int, Process]) -> dict[int, Destroy]:
    """What each process is told at an accepted cut."""
    found = {}
    for number, process in processes.items():
        creating = {handle.communicator for handle in process.report.handles if handle.state == "creating"}
        own = tuple(name for name in plan.again if name in creating or name in process.again)
        found[number] = Destroy(attempt, plan.again, own, plan.widowed)
    return found


def numbered(processes: Mapping[int, Process], ranks: int) -> dict[int, int]:
    """A number in the cut for each process, by its own number: the world rank where there is one, else one behind all
    ranks. Of several processes of one rank (a server and its engine) the one with most communicators is the rank.
    """
    holders: dict[int, list[int]] = {}
    for number, process in sorted(processes.items()):
        if 0 <= process.rank < ranks:
            holders.setdefault(process.rank, []).append(number)
    found: dict[int, int] = {}
    for rank, numbers in holders.items():
        found[max(numbers, key=lambda number: (len(processes[number].report.handles), -number))] = rank
    others = [number for number in sorted(processes) if number not in found]
    return found | {number: ranks + place for place, number in enumerate(others)}
