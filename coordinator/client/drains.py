"""Cordons and drains as the API returns them, and the calls for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from moorage.coordinator.client.connection import Connection, request_id
from moorage.coordinator.client.models import NodeInfo
from moorage.errors import MoorageError, UsageError
from moorage.v1 import coordinator_pb2 as pb

HOMELESS = {"refuse": pb.HOMELESS_REFUSE, "park": pb.HOMELESS_PARK, "leave": pb.HOMELESS_LEAVE}


class MoveInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a drain. ``source``, ``target``, ``placed``: the node of pod 0, 1, … before, as planned, and now.

    ``state``: waiting, moving, moved, parked, ended, failed or left. ``choices``: what can be done about ``reason``.
    """

    job: str
    name: str
    wave: int
    source: list[str]
    target: list[str]
    placed: list[str]
    state: str
    reason: str
    choices: list[str]
    seconds: float

    @classmethod
    def of(cls, message: pb.DrainMove) -> MoveInfo:
        return cls(
            job=message.job,
            name=message.name,
            wave=message.wave,
            source=list(message.source),
            target=list(message.target),
            placed=list(message.placed),
            state=message.state,
            reason=message.reason,
            choices=list(message.choices),
            seconds=message.seconds,
        )


class WaveInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are drained at the same time, and the jobs that move with them."""

    nodes: list[str]
    moves: list[MoveInfo]


class DrainInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A drain as it stands. ``phase``: planned, running, cancelling, done, incomplete, cancelled or timed-out.

    ``homeless`` are the jobs that have no other place: while there are some, a drain that was not told what to do with
    them stays planned.
    """

    id: str
    phase: str
    nodes: list[str]
    wave: int
    waves: list[WaveInfo]
    homeless: list[MoveInfo]
    reason: str
    owner: str
    created: float
    ended: float
    over: bool

    @property
    def moves(self) -> list[MoveInfo]:
        """All jobs that are to move."""
        return [move for wave in self.waves for move in wave.moves]

    @classmethod
    def of(cls, message: pb.DrainInfo) -> DrainInfo:
        return cls(
            id=message.id,
            phase=message.phase,
            nodes=list(message.nodes),
            wave=message.wave,
            waves=[WaveInfo(nodes=list(w.nodes), moves=[MoveInfo.of(m) for m in w.moves]) for w in message.waves],
            homeless=[MoveInfo.of(move) for move in message.homeless],
            reason=message.reason,
            owner=message.owner,
            created=message.created,
            ended=message.ended,
            over=message.over,
        )


class FleetCalls:
    """Mixed into the client, which has the connection."""

    connection: Connection

    async def cordon(
        self, nodes: Iterable[str] = (), *, selector: str = "", reason: str = "", dry_run: bool = False
    ) -> list[NodeInfo]:
        """Place nothing new on these nodes. Raises `NotFound`."""
        return await self._cordon(nodes, selector, uncordon=False, reason=reason, dry_run=dry_run)

    async def uncordon(self, nodes: Iterable[str] = (), *, selector: str = "", dry_run: bool = False) -> list[NodeInfo]:
        """Take nodes into service again; calls off a drain that takes them out. Raises `NotFound`."""
        return await self._cordon(nodes, selector, uncordon=True, reason="", dry_run=dry_run)

    async def _cordon(
        self, nodes: Iterable[str], selector: str, *, uncordon: bool, reason: str, dry_run: bool
    ) -> list[NodeInfo]:
        choice = pb.NodeChoice(nodes=list(nodes), selector=selector)
        request = pb.CordonRequest(choice=choice, uncordon=uncordon, reason=reason, dry_run=dry_run)
        reply = await self.connection.call("Cordon", request)
        return [NodeInfo.of(node) for node in reply.nodes]

    async def drain(
        self,
        nodes: Iterable[str] = (),
        *,
        selector: str = "",
        on_driver: str = "",
        parallel: int = 1,
        timeout: float = 0.0,
        homeless: str = "refuse",
        dry_run: bool = False,
    ) -> DrainInfo:
        """Begin to move every job off these nodes, ``parallel`` nodes at a time; returns the plan that is under way.

        It returns with phase ``planned``, and nothing was touched, for ``dry_run``, and when jobs have no other place
        and ``homeless`` is refuse. ``timeout``: seconds, 0 for none. Raises `NotFound`, `UsageError`, `Conflict`.
        """
        if homeless not in HOMELESS:
            raise UsageError(f"--homeless {homeless!r} does not exist", f"use one of {', '.join(HOMELESS)}")
        if parallel < 1:
            raise UsageError(f"--parallel {parallel} is too small", "the least is 1")
        request = pb.DrainRequest(
            choice=pb.NodeChoice(nodes=list(nodes), selector=selector, driver=on_driver),
            parallel=parallel,
            timeout_seconds=timeout,
            homeless=HOMELESS[homeless],
            dry_run=dry_run,
            request_id=request_id(),
        )
        return DrainInfo.of(await self.connection.call("Drain", request))

    async def follow_drain(self, drain: str, *, progress: Callable[[DrainInfo], None] | None = None) -> DrainInfo:
        """Wait until a drain is over. Raises `NotFound`."""
        last: DrainInfo | None = None
        async for message in self.connection.stream("WatchDrain", lambda: pb.DrainRef(drain=drain)):
            last = DrainInfo.of(message)
            if progress:
                progress(last)
            if last.over:
                return last
        raise MoorageError(f"drain {drain} ended without an answer: {last}")

    async def cancel_drain(self, drain: str) -> DrainInfo:
        """Let no move of a drain begin any more. Raises `NotFound`."""
        return DrainInfo.of(await self.connection.call("CancelDrain", pb.DrainRef(drain=drain)))
