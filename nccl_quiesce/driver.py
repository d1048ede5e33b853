"""Drives `Rounds` over a transport: one task for each exchange with a rank, and a clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from moorage.errors import DeadlineExceeded, Unavailable
from moorage.nccl_quiesce.model import Abort, Accept, Order, Snapshot
from moorage.nccl_quiesce.rounds import Outgoing, Rounds

log = structlog.get_logger(__name__)


class Transport(Protocol):
    """How orders reach a rank."""

    async def exchange(self, rank: int, order: Order) -> Snapshot | None:
        """Deliver an order and return the report; None when the rank calls the order out of date.

        Raises `Unavailable` or `DeadlineExceeded` when it cannot be had; the order is then sent again in time.
        """
        ...


async def run(rounds: Rounds, transport: Transport, *, now: Callable[[], float] = time.monotonic) -> Accept | Abort:
    """Drive an attempt to its decision; after an `Abort` until all gates have confirmed that they are open.

    Cancelled, it leaves the gates as they are: whoever owns the attempt's outcome then opens them (`release`).
    """
    await _drive(rounds, transport, rounds.start, lambda: isinstance(rounds.result, Accept), now)
    assert rounds.result is not None
    return rounds.result


async def release(rounds: Rounds, transport: Transport, *, now: Callable[[], float] = time.monotonic) -> None:
    """Open the gates: after a cut, once the communicators stand again, or to give the attempt up.

    Goes on until all have confirmed, so the caller sets the limit.
    """
    await _drive(rounds, transport, rounds.release, lambda: False, now)


async def _drive(
    rounds: Rounds,
    transport: Transport,
    begin: Callable[[float], Outgoing],
    over: Callable[[], bool],
    now: Callable[[], float],
) -> None:
    reports: asyncio.Queue[Snapshot] = asyncio.Queue()
    exchanges: dict[int, asyncio.Task[None]] = {}

    async def exchange(rank: int, order: Order) -> None:
        try:
            report = await transport.exchange(rank, order)
        except (Unavailable, DeadlineExceeded) as error:
            log.debug("no report", rank=rank, round=order.round, error=str(error))
            return
        if report is not None:
            reports.put_nowait(report)

    def send(outgoing: Outgoing) -> None:
        for rank, order in outgoing:
            if (old := exchanges.get(rank)) is not None:
                old.cancel()
            exchanges[rank] = asyncio.create_task(exchange(rank, order))

    try:
        send(begin(now()))
        while not over() and not rounds.released:
            try:
                async with asyncio.timeout(max(0.0, rounds.wake - now())):
                    report = await reports.get()
            except TimeoutError:
                send(rounds.tick(now()))
            else:
                send(rounds.receive(report, now()))
    finally:
        for task in exchanges.values():
            task.cancel()
        await asyncio.gather(*exchanges.values(), return_exceptions=True)
