"""The independent checker: reads what a simulated job has logged, and knows nothing of gates, needs or streams."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from moorage.nccl_quiesce.model import Lane


def judge(log: list[tuple[Any, ...]]) -> list[str]:
    """Read a log and find what was half done at a cut; empty when nothing was."""
    found: list[str] = []
    issued: dict[Lane, int] = defaultdict(int)
    done: dict[Lane, int] = defaultdict(int)
    made: dict[str, int] = defaultdict(int)
    size: dict[str, int] = {}
    closed = False
    for entry in log:
        kind = entry[0]
        if kind == "issue":
            issued[entry[2]] += 1
            if closed:
                found.append(f"{entry[2]} was issued by rank {entry[1]} after the cut")
        elif kind == "done":
            done[entry[1]] += 1
        elif kind == "created":
            made[entry[2]] += 1
            size[entry[2]] = entry[3]
            if closed:
                found.append(f"{entry[2]} was finished after the cut")
        elif kind == "rebuilt":
            closed = False
        elif kind == "accept":
            closed = True
            counts: dict[str, set[int]] = defaultdict(set)
            members: dict[str, set[int]] = defaultdict(set)
            for lane, count in issued.items():
                if count != done[lane]:
                    found.append(f"cut: {lane} has {count} issued and {done[lane]} done")
                if lane.kind == "collective":
                    counts[lane.communicator].add(count)
                    members[lane.communicator].add(lane.member)
                elif issued.get(lane.partner, 0) != count:
                    found.append(f"cut: {lane} has {count}, its partner {issued.get(lane.partner, 0)}")
            found += [
                f"cut: {name} is made at {made[name]} of {size[name]}" for name in made if made[name] != size[name]
            ]
            for name, found_counts in counts.items():
                if len(found_counts) > 1 or len(members[name]) != size[name]:
                    found.append(f"cut: collectives of {name} are unequal: {found_counts} at {len(members[name])}")
    return found
