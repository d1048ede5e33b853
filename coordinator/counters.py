"""Numbers that are allocated once in the cluster: VNIs of incarnations and slots of addresses."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from moorage import failpoints
from moorage.barrier import cmp, op

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

failpoints.declare(*(f"coordinator.counter.{name}.{side}" for name in ("vni", "slot") for side in ("before", "after")))

VNI_MAX = (1 << 24) - 1
#: ext0 addresses are 100.64.0.0/11; some at the end stay free for gateways.
SLOT_MAX = (1 << 21) - 1024


def next_range(last: int, count: int, taken: Iterable[tuple[int, int]], limit: int) -> int:
    """The first of ``count`` numbers up to ``limit`` after ``last``, outside ``taken`` (pairs of first and count)."""
    busy = sorted((first, first + size) for first, size in taken)
    start = last + 1
    for _ in range(2 * len(busy) + 2):
        if start + count - 1 > limit:
            start = 1
        clash = next((end for first, end in busy if first < start + count and start < end), None)
        if clash is None:
            return start
        start = clash
    return start


async def vni(leader: Leader) -> int:
    """A VNI for one incarnation. Two clusters on the same hosts begin at different numbers. Raises `Unavailable`."""
    begin = zlib.crc32(leader.keys.cluster.encode()) % VNI_MAX
    return await _allocate(leader, "vni", begin, 1, [], VNI_MAX)


async def slot(leader: Leader, pods: int) -> int:
    """The first of ``pods`` slots that no job that is not over holds. Raises `Unavailable`."""
    taken = [(job.state.slot, job.state.pods) for job in leader.jobs.values() if job.state.slot and not job.state.over]
    return await _allocate(leader, "slot", 0, pods, taken, SLOT_MAX)


async def _allocate(leader: Leader, name: str, begin: int, count: int, taken: list[tuple[int, int]], limit: int) -> int:
    key = leader.keys.counter(name)
    while True:
        kv = await leader.etcd.get(key)
        last = int(kv.value) if kv else begin
        first = next_range(last, count, taken, limit)
        await failpoints.hit(f"coordinator.counter.{name}.before")
        value = str(first + count - 1).encode()
        fence = [leader.leadership.compare(), cmp.mod_revision(key, kv.mod_revision if kv else 0)]
        result = await leader.etcd.txn(fence, [op.put(key, value)])
        await failpoints.hit(f"coordinator.counter.{name}.after")
        if result.succeeded:
            return first
        await leader.verify()
