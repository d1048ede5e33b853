"""What prune does to packs and records: pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

WASTE_LIMIT = 0.4


class PackView(NamedTuple):
    """A pack as prune sees it: ``used`` bytes of it are live chunks that lie in no better place."""

    name: str
    size: int
    modified: float
    used: int
    condemned: bool


class PackPlan(NamedTuple):
    """``garbage`` is condemned at once, ``repack`` after its live chunks have been copied out."""

    garbage: list[PackView]
    repack: list[PackView]


def plan_packs(packs: Iterable[PackView], *, protect_after: float, owners: Collection[str]) -> PackPlan:
    """Which packs to condemn.

    Left alone: what is condemned already, packs written after ``protect_after``, and packs of a writer in ``owners``
    (lease ids of 24 hex digits, with which the packs' names begin): its index object may be still to come.
    """
    garbage, repack = [], []
    for pack in packs:
        if pack.condemned or pack.modified > protect_after or pack.name[:24] in owners:
            continue
        if not pack.used:
            garbage.append(pack)
        elif pack.size - pack.used > WASTE_LIMIT * pack.size:
            repack.append(pack)
    return PackPlan(garbage, repack)


class RecordView(NamedTuple):
    """A condemnation: by which generation, of what, and which leases were alive afterwards (None: not known).

    ``age`` is in seconds since those leases were written down.
    """

    name: str
    generation: int
    objects: frozenset[str]
    leases: frozenset[str] | None
    age: float


def deletable(
    records: Iterable[RecordView], *, generation: int, active: Collection[str], settle: float, needed: Collection[str]
) -> list[RecordView]:
    """The records whose packs or manifests may be deleted now.

    All of: condemned by an earlier generation; every lease that was alive then is gone; other hosts' listings have
    settled; nothing of it is ``needed`` (a pack that holds a live chunk which has no other place, a live manifest).
    """
    return [
        record
        for record in records
        if record.generation < generation
        and record.leases is not None
        and record.leases.isdisjoint(active)
        and record.age >= settle
        and record.objects.isdisjoint(needed)
    ]
