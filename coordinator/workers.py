"""Calls to workers. Every order is idempotent, so one whose answer was lost is given again while the node is live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc.aio
import structlog

from moorage import failpoints, rpc
from moorage.barrier import clock
from moorage.coordinator.nodes import Nodes
from moorage.errors import DeadlineExceeded, Unavailable
from moorage.records import NodeRecord
from moorage.trust import TlsFiles
from moorage.v1.worker_pb2_grpc import WorkerAsyncStub

log = structlog.get_logger(__name__)

#: RPC of the worker by the name of the order, with the seconds that one try may take.
ORDERS = {
    "start": ("StartPod", 300.0),
    "restore": ("RestorePod", 1800.0),
    "release": ("ReleasePod", 60.0),
    "kill": ("KillPod", 60.0),
    "prepare": ("PreparePod", 60.0),
    "freeze": ("FreezePod", 60.0),
    "seal": ("SealPod", 60.0),
    "capture": ("CapturePod", 1800.0),
    "resume": ("ResumePod", 60.0),
    "finish": ("FinishPod", 1800.0),
    "examine": ("ExaminePod", 300.0),
    "fit": ("CheckFit", 600.0),
    "quiesce": ("QuiescePod", 10.0),
}
failpoints.declare(*(f"coordinator.order.{name}.{side}" for name in ORDERS for side in ("before", "after")))

_TRIES_TIMED_OUT = 3


class NodeGone(Exception):
    """The node's registration is gone: nobody there answers. Never leaves the coordinator."""

    def __init__(self, node: str) -> None:
        super().__init__(f"node {node} is gone")
        self.node = node


class Workers:
    """One channel for each worker's endpoint."""

    def __init__(self, nodes: Nodes, tls: TlsFiles) -> None:
        self._nodes = nodes
        self._tls = tls
        self._stubs: dict[str, tuple[grpc.aio.Channel, WorkerAsyncStub]] = {}
        self._older: list[grpc.aio.Channel] = []  # from before the certificate was replaced: streams live on there
        self._stamp = tls.stamp()

    def stub(self, record: NodeRecord) -> WorkerAsyncStub:
        """The stub of a live node's worker."""
        if (stamp := self._tls.stamp()) != self._stamp:
            self._older += [channel for channel, _ in self._stubs.values()]
            self._stubs, self._stamp = {}, stamp
        if record.endpoint not in self._stubs:
            channel = rpc.aio_channel(record.endpoint, self._tls)
            self._stubs[record.endpoint] = channel, WorkerAsyncStub(channel)
        return self._stubs[record.endpoint][1]

    def live(self, node: str) -> NodeRecord:
        """Raises `NodeGone`."""
        record = self._nodes.live.get(node)
        if record is None:
            raise NodeGone(node)
        return record

    async def order(
        self, node: str, name: str, request: Any, *, trace: str = "", until: float | None = None, extra: float = 0.0
    ) -> Any:
        """Give an order until it is answered; returns the reply.

        ``until``: CLOCK_BOOTTIME seconds after which no new try is made. ``extra``: seconds that a try may take beyond
        the usual. Raises `NodeGone`, `DeadlineExceeded`, and whatever the worker raised.
        """
        method, seconds = ORDERS[name]
        await failpoints.hit(f"coordinator.order.{name}.before")
        pause, timed_out = 0.1, 0
        while True:
            record = self.live(node)
            seen = self._nodes.changed.rung
            limit = seconds + extra
            if until is not None:
                limit = min(limit, max(0.1, until - clock.now()))
            sent = clock.now()
            try:
                call = rpc.unary(
                    getattr(self.stub(record), method), request, what=f"node {node}", timeout=limit, trace_id=trace
                )
                reply = await self._while_there(record, call)
            except (Unavailable, DeadlineExceeded) as error:
                if isinstance(error, DeadlineExceeded):
                    timed_out += clock.now() - sent >= limit - 0.05
                    if not timed_out or timed_out >= _TRIES_TIMED_OUT:
                        raise
                if until is not None and clock.now() >= until:
                    raise
                log.info("order not answered", order=name, node=node, error=str(error))
                await self._nodes.changed.wait(seen, pause)
                pause = min(2 * pause, 1.0)
                continue
            await failpoints.hit(f"coordinator.order.{name}.after")
            return reply

    async def _while_there(self, record: NodeRecord, call: Coroutine[Any, Any, Any]) -> Any:
        """The call's result; it is given up when the worker that was called is gone, which no connection may tell.

        Raises `NodeGone`, or `Unavailable` when another worker has registered for the node.
        """
        calling = asyncio.ensure_future(call)
        leaving = asyncio.ensure_future(self._replaced(record))
        try:
            await asyncio.wait({calling, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            self.live(record.node)
            raise Unavailable(f"node {record.node} has another worker by now")
        finally:
            for task in (calling, leaving):
                task.cancel()
            await asyncio.gather(calling, leaving, return_exceptions=True)

    async def _replaced(self, record: NodeRecord) -> None:
        while True:
            seen = self._nodes.changed.rung
            now = self._nodes.live.get(record.node)
            if now is None or (now.session, now.endpoint) != (record.session, record.endpoint):
                return
            await self._nodes.changed.wait(seen)

    def stream(self, node: str, method: str, request: Any) -> Any:
        """A streaming call to a live node's worker. Raises `NodeGone`."""
        return getattr(self.stub(self.live(node)), method)(request, metadata=rpc.metadata())

    async def replies(self, node: str, method: str, request: Any) -> AsyncIterator[Any]:
        """What a streaming call yields. Raises `NodeGone`, and what the worker raised."""
        call = self.stream(node, method, request)
        try:
            async for reply in call:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise rpc.translate(error, f"node {node}") from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close all channels."""
        stubs, self._stubs = self._stubs, {}
        channels = [*(channel for channel, _ in stubs.values()), *self._older]
        await asyncio.gather(*(channel.close(None) for channel in channels))
