"""The drains of the cluster: beginning one, going on with those that an earlier coordinator began, calling one off."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import op
from moorage.barrier.kv import Op
from moorage.coordinator.bell import Bell
from moorage.coordinator.cordons import CHUNK
from moorage.coordinator.drain import fleet
from moorage.coordinator.drain.model import Homeless, Plan
from moorage.coordinator.drain.plan import plan
from moorage.coordinator.drain.record import DrainOrder, MoveRecord
from moorage.coordinator.drain.running import run
from moorage.errors import Conflict, NotFound
from moorage.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

failpoints.declare(
    *(f"coordinator.drain.{what}.{side}" for what in ("moves", "order", "note") for side in ("before", "after"))
)

#: How many drains that are over are remembered.
REMEMBERED = 16
_HOMELESS: dict[int, Homeless] = {pb.HOMELESS_PARK: "park", pb.HOMELESS_LEAVE: "leave"}


class Drain:
    """One drain and its jobs. ``changed`` rings at every change; ``stop`` is set when no move is to begin any more."""

    def __init__(self, order: DrainOrder, moves: dict[str, MoveRecord]) -> None:
        self.order = order
        self.moves = moves
        self.changed = Bell()
        self.stop = asyncio.Event()
        self.ordering = asyncio.Lock()  # one change of the order at a time, each of what the one before has left
        if order.phase == "cancelling":
            self.stop.set()


class Drains:
    """All of them, by id."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._lock = asyncio.Lock()
        self.all: dict[str, Drain] = {}

    async def take_up(self) -> None:
        """Read what etcd holds and go on with what is not over. Raises `Unavailable`."""
        keys = self._leader.keys
        listing = await self._leader.etcd.list(keys.drains)
        orders: dict[str, DrainOrder] = {}
        moves: dict[str, dict[str, MoveRecord]] = {}
        for kv in listing.items:
            drain, _, rest = kv.key.removeprefix(keys.drains).partition("/")
            if rest == "order":
                orders[drain] = msgspec.json.decode(kv.value, type=DrainOrder)
            else:
                move = msgspec.json.decode(kv.value, type=MoveRecord)
                moves.setdefault(drain, {})[move.job] = move
        for drain, order in orders.items():
            self._add(Drain(order, moves.get(drain, {})))

    def _add(self, drain: Drain) -> Drain:
        self.all[drain.order.id] = drain
        if not drain.order.over:
            self._leader.spawn(run(self._leader, drain), f"drain {drain.order.id}")
        return drain

    def find(self, name: str) -> Drain:
        """Raises `NotFound`."""
        if name not in self.all:
            raise NotFound(f"no drain {name!r}", "the last ones are remembered for a while")
        return self.all[name]

    def running(self) -> list[Drain]:
        """Those that are not over."""
        return [drain for drain in self.all.values() if not drain.order.over]

    def plan(self, nodes: tuple[str, ...], parallel: int) -> Plan:
        """What a drain of ``nodes`` would do now. Raises `NotFound`, `UsageError`."""
        leader = self._leader
        return plan(fleet.nodes(leader), fleet.jobs(leader), nodes, parallel=parallel, fits=fleet.fits(leader))

    async def begin(self, request: pb.DrainRequest, owner: str, trace: str) -> Drain | tuple[DrainOrder, Plan]:
        """Begin a drain, or attach to the one that does the same; only its plan if nothing is to be touched.

        Nothing is touched for ``dry_run``, and when a job has no other place and the request does not say what is then
        to be done. Raises `NotFound`, `UsageError`, `Conflict` (a node is being drained by another one), `Unavailable`.
        """
        async with self._lock:
            name = hashlib.blake2b(request.request_id.encode(), digest_size=4).hexdigest()
            if name in self.all and request.request_id:
                return self.all[name]
            nodes = fleet.choose(self._leader, request.choice)
            parallel = request.parallel or 1
            for other in self.running():
                if set(other.order.nodes) == set(nodes) and not other.stop.is_set() and not request.dry_run:
                    return other
                if (shared := set(other.order.nodes) & set(nodes)) and not request.dry_run:
                    raise Conflict(
                        f"{', '.join(sorted(shared))}: drain {other.order.id} is at work there",
                        "wait until it is over, or call it off with moorage uncordon",
                    )
            found = self.plan(nodes, parallel)
            now = time.time()
            order = DrainOrder(
                id=name,
                owner=owner,
                trace=trace,
                nodes=nodes,
                parallel=parallel,
                homeless=_HOMELESS.get(request.homeless, "refuse"),
                deadline=now + request.timeout_seconds if request.timeout_seconds > 0 else 0.0,
                created=now,
            )
            if request.dry_run or (found.stuck and order.homeless == "refuse"):
                return msgspec.structs.replace(order, phase="planned"), found
            return await self._create(order, found)

    async def _create(self, order: DrainOrder, found: Plan) -> Drain:
        leader = self._leader
        await self._forget()
        await leader.cordons.put(order.nodes, reason=f"drain {order.id}", by=order.owner, drain=order.id)
        # Planned again with nothing in between: from here on nothing new is placed on these nodes.
        found = self.plan(order.nodes, order.parallel)
        moves = records(leader, found, order)
        ops: list[Op] = [
            op.put(leader.keys.drain_move(order.id, move.job), msgspec.json.encode(move)) for move in moves
        ]
        for at in range(0, len(ops), CHUNK):
            await self._write("moves", ops[at : at + CHUNK])
        # Last: moves without an order are none, and the same request makes them again.
        await self._write("order", [op.put(leader.keys.drain(order.id), msgspec.json.encode(order))])
        log.info("drain begins", drain=order.id, nodes=list(order.nodes), jobs=len(moves), trace=order.trace)
        return self._add(Drain(order, {move.job: move for move in moves}))

    async def _write(self, what: str, ops: list[Op]) -> None:
        await failpoints.hit(f"coordinator.drain.{what}.before")
        result = await self._leader.etcd.txn([self._leader.leadership.compare()], ops)
        await failpoints.hit(f"coordinator.drain.{what}.after")
        if not result.succeeded:
            await self._leader.verify()

    async def change(self, drain: Drain, **fields: object) -> None:
        """Change the drain's order. Raises `Unavailable`, `LeadershipLost`."""
        async with drain.ordering:
            await self.note(drain, order=msgspec.structs.replace(drain.order, **fields))

    async def note(self, drain: Drain, *changed: MoveRecord, order: DrainOrder | None = None) -> None:
        """Write what became of some jobs; ``order``: only for who holds `Drain.ordering`.

        Raises `Unavailable`, `LeadershipLost`.
        """
        keys = self._leader.keys
        name = drain.order.id
        ops: list[Op] = [op.put(keys.drain_move(name, move.job), msgspec.json.encode(move)) for move in changed]
        if order is not None:
            ops.append(op.put(keys.drain(name), msgspec.json.encode(order)))
        for at in range(0, len(ops), CHUNK):
            await self._write("note", ops[at : at + CHUNK])
        drain.moves |= {move.job: move for move in changed}
        drain.order = order or drain.order
        drain.changed.ring()

    async def cancel(self, drain: Drain) -> None:
        """No move begins any more; those under way come to their end. Raises `Unavailable`, `LeadershipLost`."""
        async with drain.ordering:
            if drain.order.over or drain.stop.is_set():
                return
            await self.note(drain, order=msgspec.structs.replace(drain.order, phase="cancelling", reason="called off"))
            drain.stop.set()

    async def release(self, nodes: tuple[str, ...]) -> None:
        """Nodes are to be in service again: call off the drains that take them out."""
        for drain in self.running():
            if set(nodes) & set(drain.order.nodes):
                await self.cancel(drain)

    async def _forget(self) -> None:
        over = sorted((d.order for d in self.all.values() if d.order.over), key=lambda order: order.ended)
        for order in over[: max(0, len(over) - REMEMBERED + 1)]:
            await self._leader.etcd.delete_prefix(f"{self._leader.keys.drains}{order.id}/")
            del self.all[order.id]


def records(leader: Leader, found: Plan, order: DrainOrder) -> list[MoveRecord]:
    """The plan as what is to be done, job by job."""
    moves = [
        MoveRecord(job=move.job, name=move.name, wave=move.wave, source=move.source, target=move.target)
        for move in found.moves
    ]
    for one in found.stuck:
        park = order.homeless == "park"
        moves.append(
            MoveRecord(
                job=one.job,
                name=one.name,
                wave=one.wave,
                source=one.source,
                state="waiting" if park else "left",
                reason=one.reason,
                choices=one.choices,
            )
        )
    waves = {node: number for number, wave in enumerate(order.waves, 1) for node in wave}
    for job in leader.jobs.values():
        view = fleet.job(leader, job)
        mine = [waves[seat] for seat in view.seats if seat in waves]
        if view.ends and mine and not job.state.over:
            moves.append(MoveRecord(job=job.id, name=view.name, wave=min(mine), source=view.seats, ending=True))
    return moves
