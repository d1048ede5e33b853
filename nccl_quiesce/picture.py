"""What the reports of one round say together: who is behind, what is owed, which operations wait whole at the gates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from moorage.nccl_quiesce.model import Call, Lane, Plan, Short, Snapshot

Held = tuple[int, int]  #: (rank, ticket)


class Picture:
    """All reports of one round, read together. Pure; ``snapshots`` by rank."""

    def __init__(self, snapshots: Mapping[int, Snapshot]) -> None:
        self.snapshots = snapshots
        #: For each communicator the rank of each member, as far as members are known.
        self.ranks: dict[str, dict[int, int]] = defaultdict(dict)
        self.size: dict[str, int] = {}
        self.states: dict[str, set[str]] = defaultdict(set)
        for rank, snapshot in snapshots.items():
            for handle in snapshot.handles:
                self.ranks[handle.communicator][handle.member] = rank
                self.size[handle.communicator] = handle.size
                self.states[handle.communicator].add(handle.state)
        self.counts: dict[Lane, int] = {}
        for snapshot in snapshots.values():
            self.counts.update(self.counted(snapshot))
        self.behind = self._behind()

    def counted(self, snapshot: Snapshot) -> Mapping[Lane, int]:
        """What of a report raises needs: what was let in. What is held does not, or no gate would hold anything."""
        return snapshot.admitted

    # ---- who is behind

    def need(self) -> Iterator[tuple[Lane, int]]:
        """Every lane that something was issued for, with the count that its communicator or its partner needs.

        Collectives: the largest count among all members. Sends from i to j and receives at j from i: the larger of
        both.
        """
        largest: dict[str, int] = {}
        for lane, count in self.counts.items():
            if lane.kind == "collective":
                if count > largest.get(lane.communicator, 0):
                    largest[lane.communicator] = count
            elif count:
                yield lane.partner, count
        for communicator, count in largest.items():
            for member in self.ranks[communicator]:
                yield Lane(communicator, member, "collective"), count

    def _behind(self) -> dict[int, dict[Lane, Short]]:
        found: dict[int, dict[Lane, Short]] = {}
        counts = self.counts
        for lane, need in self.need():
            count = counts.get(lane, 0)
            if count < need and (rank := self.ranks[lane.communicator].get(lane.member)) is not None:
                found.setdefault(rank, {})[lane] = Short(rank, lane, count, need)
        return found

    # ---- creations

    def unfinished(self) -> set[str]:
        """Communicators that some members have and others are still making: these must become whole."""
        return {
            name
            for name, states in self.states.items()
            if states != {"creating"} and ("creating" in states or len(self.ranks[name]) < self.size[name])
        }

    def coming(self) -> set[str]:
        """Communicators that all members are making, none has yet, and nothing else keeps from coming through."""
        found = {
            name
            for name, states in self.states.items()
            if states == {"creating"} and len(self.ranks[name]) == self.size[name]
        }
        while kept := {name for names in self._made_together() if not names <= found for name in names & found}:
            found -= kept
        return found

    def _made_together(self) -> Iterator[set[str]]:
        """What each call that is inside creates."""
        for snapshot in self.snapshots.values():
            for call in snapshot.inside:
                if call.creates:
                    yield {creation.communicator for creation in call.creates}

    def standing(self, names: set[str] | None = None) -> set[Held]:
        """Creations that some rank is inside of, of these communicators (None: of any)."""
        return {
            (rank, call.ticket)
            for rank, snapshot in self.snapshots.items()
            for call in snapshot.inside
            if any(names is None or creation.communicator in names for creation in call.creates)
        }

    def takeable(self, call: Call) -> bool:
        """Whether a call may be inside at the cut: destroys, and creations that no member has finished."""
        if call.lanes or not (call.creates or call.destroys):
            return False
        return all(self.states.get(creation.communicator, set()) <= {"creating"} for creation in call.creates)

    def blocking(self) -> list[tuple[int, Call]]:
        """Calls inside that a cut must wait for."""
        return [
            (rank, call)
            for rank, snapshot in self.snapshots.items()
            for call in snapshot.inside
            if not self.takeable(call)
        ]

    def plan(self) -> Plan:
        """What to do with the communicators at this cut."""
        rebuild = [name for name, states in self.states.items() if states == {"ready"}]
        again = [name for name, states in self.states.items() if states == {"creating"}]
        widowed = [name for name, states in self.states.items() if {"ready", "gone"} <= states]
        return Plan(tuple(sorted(rebuild)), tuple(sorted(again)), tuple(sorted(widowed)))

    def work(self) -> set[Held]:
        """Threads that a drain order holds with work for a stream."""
        return {(rank, call.ticket) for rank, s in self.snapshots.items() for call in s.held if call.submits}

    # ---- operations that wait whole

    def whole(self) -> set[Held]:
        """Held calls whose every partner has been let in already or is held as well, in a call of which that is true.

        Letting one in makes nobody wait for a rank that is elsewhere: all that it needs stands at the gates. Of several
        operations on one lane in one call the first one counts, since a partner may issue them one by one.
        """
        found = {(rank, call.ticket): call for rank, s in self.snapshots.items() for call in s.held}
        while dropped := [held for held, reach in self._reach(found) if not reach]:
            for held in dropped:
                del found[held]
        return set(found)

    def _reach(self, held: Mapping[Held, Call]) -> Iterator[tuple[Held, bool]]:
        """For each held call: would all its partners have come to it if exactly ``held`` were let in?"""
        reach = dict(self.counts)
        firsts: dict[Held, list[tuple[Lane, int]]] = {}
        comers: dict[str, set[int]] = {name: set(ranks) for name, ranks in self.ranks.items()}
        for key, call in held.items():  # in the order of tickets within each rank
            counts = firsts[key] = []
            for lane, number in call.lanes.items():
                before = reach.get(lane, 0)
                reach[lane] = before + number
                counts.append((lane, before + 1))
            for creation in call.creates:
                comers.setdefault(creation.communicator, set()).add(creation.member)
        least: dict[str, int] = {}
        for key, call in held.items():
            fine = all(len(comers[c.communicator]) >= c.size for c in call.creates)
            for lane, count in firsts[key]:
                if lane.kind == "collective":
                    name = lane.communicator
                    if name not in least:
                        known = self.ranks[name]
                        members = [reach.get(Lane(name, member, "collective"), 0) for member in known]
                        least[name] = min(members) if len(known) == self.size[name] else 0
                    fine = fine and least[name] >= count
                else:
                    fine = fine and reach.get(lane.partner, 0) >= count
            yield key, fine
