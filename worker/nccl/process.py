"""One process of a pod that uses NCCL, as the worker sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from moorage.errors import DeviceFailed, Unavailable
from moorage.nccl_quiesce import control, wire
from moorage.nccl_quiesce.model import Order, Phase, Snapshot
from moorage.worker.nccl.link import Link

_ANSWER_SECONDS = 10.0


class NcclProcess:
    """``number`` is the proxy's own and survives checkpoints. ``again``, ``widowed``: as it was told at the last cut.

    A gate that has opened by itself (its worker was away for too long) ends the cut for this process: it is told no
    more of that one, and whoever leads it hears nothing of it until the deadline. ``over`` is the newest such cut.
    """

    def __init__(self, link: Link, hello: wire.Hello) -> None:
        self.number, self.pid, self.name = hello.process, hello.pid, hello.name
        self.again: tuple[str, ...] = ()
        self.widowed: tuple[str, ...] = ()
        #: Ids and rebuilds one after another, whoever has given up waiting for the one before.
        self.long = asyncio.Lock()
        self.connect(link, hello)

    def connect(self, link: Link, hello: wire.Hello) -> None:
        """A new connection of the process."""
        self.link = link
        self.attempt, self.round, self.phase = hello.attempt, hello.round, wire.PHASES[hello.phase]
        self.last: Snapshot | None = None
        self.torn = hello.torn
        self.over = hello.attempt if self.phase == "open" else 0
        self.rank = world_rank(link.host_pid)

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"

    @property
    def connected(self) -> bool:
        return not self.link.closed.is_set()

    @property
    def closed(self) -> bool:
        return self.phase != "open"

    def alive(self) -> bool:
        """Whether the host still has the process that connected last."""
        return Path("/proc", str(self.link.host_pid)).exists()

    async def obey(self, order: Order, seconds: float = _ANSWER_SECONDS) -> Snapshot | None:
        """Carry out an order and report; None when it is out of date. Raises `Unavailable`, `DeviceFailed`."""
        if order.phase != "open" and order.attempt == self.over:
            return None
        before = self.attempt, self.round, self.phase, self.over
        if (order.attempt, order.round) >= before[:2]:
            # Known from now on, whether somebody hears the answer or not: what is sent is obeyed.
            self.attempt, self.round, self.phase = order.attempt, order.round, order.phase
            self.over = order.attempt if order.phase == "open" else 0
        obeyed = True
        try:
            report = await self._obey(order, seconds)
            obeyed = report is not None
            return report
        except DeviceFailed:
            obeyed = False
            raise
        finally:
            if not obeyed and (self.attempt, self.round) == (order.attempt, order.round):
                self.attempt, self.round, self.phase, self.over = before

    async def _obey(self, order: Order, seconds: float) -> Snapshot | None:
        report = await self.link.command(lambda request: wire.Obey.of(request, order), wire.Report, seconds=seconds)
        found = report.snapshot(self.rank)
        self.last = found or self.last
        return found

    def final(self, order: Order) -> Snapshot | None:
        """The answer of a process that has exited, as it reported last; None while it is there."""
        if self.last is None or self.connected or self.alive():
            return None
        return msgspec.structs.replace(
            self.last,
            attempt=order.attempt,
            round=order.round,
            held=(),
            inside=(),
            entering=0,
            undrained=(),
            exited=True,
        )

    async def look(self, seconds: float = _ANSWER_SECONDS) -> control.Process:
        """The process as it is; nothing changes. Raises `Unavailable`, `DeviceFailed`."""
        phase: Phase = self.phase
        report = await self._obey(Order(self.attempt, self.round, phase), seconds)
        if report is None:
            raise Unavailable(f"{self} has heard of another cut than {self.attempt}")
        return control.Process(
            number=self.number,
            pid=self.pid,
            name=self.name,
            rank=self.rank,
            closed=self.closed,
            torn=self.torn,
            report=report,
            again=self.again,
            widowed=self.widowed,
        )

    async def prepare(self, seconds: float = _ANSWER_SECONDS) -> list[wire.Refusal]:
        """What cannot be carried over."""
        return (await self.link.command(wire.Prepare, wire.Prepared, seconds=seconds)).refusals

    async def keep(self, order: control.Keep, seconds: float) -> None:
        """Have it keep its gate closed whatever happens. A proxy that does not know the word lives with what it has."""
        if self.torn:
            return
        try:
            await self.link.command(lambda request: wire.Keep(request, order.attempt), wire.Done, seconds=seconds)
        except DeviceFailed as error:
            if f"failed with {wire.MALFORMED}:" not in error.message:
                raise

    async def destroy(self, order: control.Destroy, seconds: float) -> None:
        """Let go of all communicators. May be repeated. What the process is about is called off: a partner may be gone
        that a rebuild waits for."""
        # Whatever comes of it, the process waits for new ones.
        self.torn, self.again, self.widowed = True, order.own, order.widowed
        again, widowed = list(order.again), list(order.widowed)
        await self.link.command(
            lambda request: wire.Teardown(request, order.attempt, again, widowed, seconds, order.abort),
            wire.Done,
            seconds=seconds + _ANSWER_SECONDS,
        )

    async def ids(self, order: control.Names, seconds: float) -> control.Ids:
        """Fresh unique ids."""
        async with self.long:
            answer = await self.link.command(
                lambda request: wire.MakeIds(request, list(order.names)), wire.Ids, seconds=seconds
            )
        return control.Ids(tuple(zip(order.names, answer.ids, strict=True)))

    async def rebuild(self, order: control.Make, seconds: float) -> None:
        """Make communicators anew. Does nothing for a process that has them: its ids are used up."""
        async with self.long:
            if not self.torn:
                return
            await self.link.command(
                lambda request: wire.Rebuild(
                    request, order.attempt, list(order.communicators), list(order.again), seconds
                ),
                wire.Done,
                seconds=seconds + _ANSWER_SECONDS,
            )
            self.torn = False

    async def part(self, seconds: float = _ANSWER_SECONDS) -> None:
        """Have it end the connection. Raises `Unavailable` if it does not."""
        if self.connected:
            await self.link.command(wire.Part, wire.Done, seconds=seconds)
            try:
                await asyncio.wait_for(self.link.closed.wait(), seconds)
            except TimeoutError:
                raise Unavailable(f"{self} does not part from the worker") from None


def world_rank(host_pid: int) -> int:
    """The rank that a process was started as, or its parent before it; -1 if it was not started as one."""
    try:
        variables = Path("/proc", str(host_pid), "environ").read_bytes().split(b"\0")
    except OSError:
        return -1
    for name in (b"RANK=", b"MOORAGE_RANK="):
        for variable in variables:
            if variable.startswith(name) and variable[len(name) :].isdigit():
                return int(variable[len(name) :])
    return -1
