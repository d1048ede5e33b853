"""The part of the API that operators use: nodes, cordons, drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

from moorage import rpc
from moorage.coordinator import views, views_drain
from moorage.coordinator.drain import fleet
from moorage.coordinator.drain.drains import Drain, records
from moorage.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader


class FleetService:
    """Mixed into the servicer, which says who leads."""

    def _leading(self) -> Leader:
        raise NotImplementedError

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesReply:
        leader = self._leading()
        return self._nodes(leader, sorted(leader.nodes.known))

    @staticmethod
    def _nodes(leader: Leader, names: Iterable[str]) -> pb.ListNodesReply:
        placed: dict[str, dict[str, int]] = {}
        for job in leader.jobs.values():
            for seat in job.state.seats:
                counts = placed.setdefault(seat.node, {})
                counts[job.id] = counts.get(job.id, 0) + 1
        return pb.ListNodesReply(
            nodes=[
                views.node_message(
                    leader.nodes.known[name],
                    live=name in leader.nodes.live,
                    same_store=not leader.other_store(leader.nodes.known[name]),
                    jobs=placed.get(name, {}),
                    cordon=leader.cordons.get(name),
                )
                for name in names
                if name in leader.nodes.known
            ]
        )

    async def Cordon(self, request: pb.CordonRequest, context: Any) -> pb.ListNodesReply:
        leader = self._leading()
        names = fleet.choose(leader, request.choice)
        if request.dry_run:
            pass
        elif request.uncordon:
            await leader.drains.release(names)
            await leader.cordons.remove(names)
        else:
            await leader.cordons.put(names, reason=request.reason, by=rpc.principal.get())
        return self._nodes(leader, names)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainInfo:
        leader = self._leading()
        found = await leader.drains.begin(request, rpc.principal.get(), rpc.trace.get())
        if isinstance(found, Drain):
            return views_drain.drain_message(leader, found.order, found.moves.values())
        order, plan = found
        return views_drain.drain_message(leader, order, records(leader, plan, order))

    async def WatchDrain(self, request: pb.DrainRef, context: Any) -> AsyncIterator[pb.DrainInfo]:
        leader = self._leading()
        drain = leader.drains.find(request.drain)
        last: pb.DrainInfo | None = None
        while True:
            seen = drain.changed.rung
            message = views_drain.drain_message(leader, drain.order, drain.moves.values())
            if message != last:
                yield message
                last = message
            if message.over:
                return
            await leader.while_leading(asyncio.ensure_future(drain.changed.wait(seen, 1.0)))

    async def CancelDrain(self, request: pb.DrainRef, context: Any) -> pb.DrainInfo:
        leader = self._leading()
        drain = leader.drains.find(request.drain)
        await leader.drains.cancel(drain)
        return views_drain.drain_message(leader, drain.order, drain.moves.values())
