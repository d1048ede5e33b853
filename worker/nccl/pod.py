"""All processes of one pod that use NCCL: who is there, and one step of a cut on all of them.

Invariants:

* while the pod is let go of (`part`, until `listen`), no process has a connection, and none gets one;
* a process that comes while gates are closed has its own closed before anything else;
* a gate is not left closed by a coordinator that says nothing any more, unless the cut was accepted (`control.Keep`):
  from then on partners may have no communicators, and only a coordinator can give them back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import structlog

from moorage.barrier import clock
from moorage.errors import CorruptData, MoorageError, NotFound, Unavailable, UsageError
from moorage.nccl_quiesce import control, wire
from moorage.nccl_quiesce.model import Order
from moorage.worker.nccl.link import Link
from moorage.worker.nccl.process import NcclProcess
from moorage.worker.nccl.sharing import Member

log = structlog.get_logger(__name__)
T = TypeVar("T")

_HELLO_SECONDS = 10.0
#: After how long without a word of any coordinator closed gates are opened, in seconds: a cut asks every second, and
#: what is between the rounds takes half a minute at most.
SILENCE_SECONDS = 45.0


class PodProcesses:
    """``socket``: where the processes connect, in the pod's own folder. ``expected``: who must come back.

    ``on_new``: called when a process has come that was not known.
    """

    def __init__(self, socket: Path, incarnation: int, label: str, on_new: Callable[[], None] = lambda: None) -> None:
        self.processes: dict[int, NcclProcess] = {}
        self.expected: dict[int, int] = {}  #: number to pid in the pod
        #: Of those that are not back yet, what they were told at the cut (`control.Process`).
        self.let_go: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self.runs = asyncio.Event()  #: not let go of
        self._socket, self._incarnation, self.label = socket, incarnation, label
        self._on_new = on_new
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._changed = asyncio.Condition()
        self._cut = 0  #: the cut that gates are closed for; 0: none
        self.kept = 0  #: the newest cut that was accepted, as far as is known here
        self.renewed: dict[str, bytes] = {}  #: ids of creations that were taken back, by name
        self._heard = clock.now()  #: when a coordinator last said something
        self._patience: asyncio.Task[None] | None = None

    # -- connections

    async def listen(self) -> None:
        """Bind the socket anew: processes that were let go of come back. Does nothing while it is bound."""
        if self._server is None:
            self._socket.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._accept, self._socket, backlog=1024)
            self._socket.chmod(0o666)  # the pod's processes may be any user's; nobody else sees the folder
        self.runs.set()

    async def close(self) -> None:
        """End all connections and the socket."""
        self.runs.clear()
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._socket.unlink(missing_ok=True)
        for link in list(self._links):
            link.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        self._links.add(link)
        try:
            process = await self._greet(link)
            async with self._changed:
                self._changed.notify_all()
            closing = asyncio.create_task(self._close_gate(process))
            await link.run()
            closing.cancel()
        except (MoorageError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.info("a process was not greeted", pod=self.label, pid=link.host_pid, error=str(error))
        finally:
            link.close()
            self._links.discard(link)
            async with self._changed:
                self._changed.notify_all()

    async def _greet(self, link: Link) -> NcclProcess:
        hello = await asyncio.wait_for(link.receive(), _HELLO_SECONDS)
        if not isinstance(hello, wire.Hello) or hello.version != wire.VERSION:
            raise CorruptData("a process does not speak the language of this worker's NCCL proxy")
        process = self.processes.get(hello.process)
        if process is None:
            process = self.processes[hello.process] = NcclProcess(link, hello)
            process.again, process.widowed = self.let_go.pop(hello.process, ((), ()))
            self._on_new()
        else:
            process.link.close()
            process.connect(link, hello)
        if process.closed:
            self._be_patient()
        await link.welcome(self._welcome(process))
        log.info("a process uses NCCL", pod=self.label, pid=process.pid, name=process.name, torn=process.torn)
        return process

    def _welcome(self, process: NcclProcess) -> wire.Welcome:
        return wire.Welcome(self._incarnation, process.rank, sorted(self.renewed.items()))

    async def renew(self, order: control.Renewed) -> None:
        """Creations have other ids from now on, also for processes that come later. Raises `Unavailable`."""
        self.renewed.update(order.ids)
        connected = [process for process in self.processes.values() if process.connected]
        await asyncio.gather(*(process.link.welcome(self._welcome(process)) for process in connected))

    async def _close_gate(self, process: NcclProcess) -> None:
        if self._cut and process.attempt < self._cut:
            try:
                await process.obey(Order(self._cut, 0, "cut"))
            except MoorageError as error:
                log.warning("a gate was not closed", pod=self.label, pid=process.pid, error=str(error))

    # -- a coordinator that is silent

    def _be_patient(self) -> None:
        self._heard = clock.now()
        if self._patience is None or self._patience.done():
            self._patience = asyncio.create_task(self._wait_for_words(), name=f"silence at {self.label}")

    def _deserted(self) -> list[NcclProcess]:
        """Those whose gate may be opened when nobody leads the cut any more."""
        return [p for p in self.processes.values() if p.connected and p.closed and not p.torn and p.attempt > self.kept]

    async def _wait_for_words(self) -> None:
        while self._deserted():
            left = self._heard + SILENCE_SECONDS - clock.now()
            if left > 0:
                await asyncio.sleep(left)
                continue
            log.warning("no word of a coordinator: gates are opened", pod=self.label, seconds=SILENCE_SECONDS)
            self._cut = 0
            for process in self._deserted():
                try:
                    await process.obey(Order(process.attempt, process.round + 1, "open"))
                except MoorageError as error:
                    log.warning("a gate was not opened", pod=self.label, pid=process.pid, error=str(error))
            self._heard = clock.now()

    def known(self) -> tuple[dict[int, int], dict[int, tuple[tuple[str, ...], tuple[str, ...]]]]:
        """All that are there or expected: number and pid in the pod; what they were told at the last cut."""
        pids = self.expected | {number: process.pid for number, process in self.processes.items()}
        told = {number: (process.again, process.widowed) for number, process in self.processes.items()}
        return pids, self.let_go | told

    def ends(self) -> frozenset[int]:
        """The inode numbers of the worker's ends of all connections."""
        return frozenset(link.inode for link in self._links)

    # -- who is there

    async def back(self, seconds: float, alive: Callable[[], Awaitable[set[int]]]) -> None:
        """Wait until all that are expected are connected, or gone. ``alive``: the pids in the pod that are there.

        Raises `Unavailable`.
        """
        until = clock.now() + seconds
        while missing := self._missing():
            left = until - clock.now()
            if left > 0:
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            there = await alive()
            for number in [number for number, pid in missing.items() if pid not in there]:
                self.expected.pop(number, None)
                self.processes.pop(number, None)
            if left <= 0 and (missing := self._missing()):
                names = ", ".join(map(str, missing.values()))
                raise Unavailable(f"{self.label}: NCCL's processes {names} are not back after {seconds:g} s")

    def _missing(self) -> dict[int, int]:
        """Numbers and pids of those that should be connected and are not."""
        for number, process in list(self.processes.items()):
            if not process.connected and not process.alive() and number not in self.expected:
                del self.processes[number]
        known = {number: process.pid for number, process in self.processes.items() if not process.connected}
        return known | {number: pid for number, pid in self.expected.items() if not self._is_there(number)}

    def _is_there(self, number: int) -> bool:
        process = self.processes.get(number)
        return process is not None and process.connected

    # -- steps

    async def look(self) -> dict[int, control.Process]:
        """All that are connected, as they are. Raises `Unavailable`, `DeviceFailed`."""
        self.expected = {}
        self._heard = clock.now()

        async def one(process: NcclProcess) -> control.Process | None:
            try:
                return await process.look()
            except Unavailable:
                if process.connected or process.alive():
                    raise
                return None  # it has ended just now

        connected = [process for process in self.processes.values() if process.connected]
        found = await asyncio.gather(*(one(process) for process in connected))
        return {process.number: process for process in found if process is not None}

    async def round(self, orders: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """One order of the cut to each. Who calls it out of date, or does not answer in time, is left out."""

        async def one(number: int, body: bytes) -> bytes | None:
            order = control.decode(body, Order)
            self._cut = 0 if order.phase == "open" else max(self._cut, order.attempt)
            process = self.processes.get(number)
            if process is None:
                return None
            try:
                report = await process.obey(order, seconds)
            except Unavailable as error:
                log.info("no report", pod=self.label, pid=process.pid, error=str(error))
                report = process.final(order)
            return None if report is None else control.encode(report)

        answers = await asyncio.gather(*(one(number, body) for number, body in orders.items()))
        self._be_patient()
        return {number: body for number, body in zip(orders, answers, strict=True) if body is not None}

    async def step(self, name: str, orders: Mapping[int, bytes], seconds: float) -> dict[int, bytes]:
        """``keep``, ``destroy``, ``ids`` or ``rebuild`` on each of these.

        Raises what any process raises, when all have ended.
        """
        self._heard = clock.now()

        async def one(number: int, body: bytes) -> bytes:
            process = self.processes.get(number)
            if process is None:
                raise NotFound(f"{self.label} has no process {number} with NCCL")
            match name:
                case "keep":
                    keep = control.decode(body, control.Keep)
                    self.kept = max(self.kept, keep.attempt)  # before anything else: it cannot be taken back
                    await process.keep(keep, seconds)
                case "destroy":
                    await process.destroy(control.decode(body, control.Destroy), seconds)
                case "ids":
                    return control.encode(await process.ids(control.decode(body, control.Names), seconds))
                case "rebuild":
                    await process.rebuild(control.decode(body, control.Make), seconds)
                case _:
                    raise UsageError(f"the cut has no step {name!r}")
            return control.encode(control.Done())

        async def named(number: int, body: bytes) -> bytes:
            try:
                return await one(number, body)
            except MoorageError as error:
                process = self.processes.get(number)
                raise type(error)(f"{process or number}: {error.message}", error.hint) from error

        answers: list[Any] = await asyncio.gather(
            *(named(number, body) for number, body in orders.items()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(orders, answers, strict=True))

    async def part(self) -> None:
        """Let go of all processes for a capture. May be repeated. Raises `Unavailable`, `DeviceFailed`."""
        self.runs.clear()
        connected = {number: process for number, process in self.processes.items() if process.connected}
        if connected:
            self.expected = {number: process.pid for number, process in connected.items()}
        await asyncio.gather(*(process.part() for process in connected.values()))
        await self.close()
        self._cut = 0

    async def refusals(self) -> list[tuple[str, wire.Refusal]]:
        """What cannot be carried over, each with its process. Raises `Unavailable`, `DeviceFailed`."""
        connected = [process for process in self.processes.values() if process.connected]
        found = await asyncio.gather(*(process.prepare() for process in connected))
        return [(str(process), refusal) for process, some in zip(connected, found, strict=True) for refusal in some]

    async def members(self) -> list[Member]:
        """Those that have communicators with others. Raises `Unavailable`, `DeviceFailed`."""
        connected = [process for process in self.processes.values() if process.connected]
        seen = await asyncio.gather(*(process.look() for process in connected))
        found = []
        for process, said in zip(connected, seen, strict=True):
            if any(handle.size > 1 and handle.state != "gone" for handle in said.report.handles):
                name = f"rank {process.rank}" if process.rank >= 0 else str(process)
                found.append(Member(process.link.host_pid, name))
        return found
