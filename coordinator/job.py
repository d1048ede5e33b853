"""One job of the leading coordinator: takes events one by one, writes what follows, and keeps the orders going.

The machine decides (`machine`), `persist` writes, `orders` carries out. What is here holds them together: an event is
handled only after the write of the one before, an order begins only after the write that asked for it, and an order
that the state does not ask for any more is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog

from moorage.coordinator import ended
from moorage.coordinator.bell import Bell
from moorage.coordinator.machine import IllegalEvent, JobState, Machine, Policies
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine.instructions import Commit, Instruction, Order, Say
from moorage.coordinator.persist import GenerationMoved, LeadershipLost, OutcomeExists, Persistence
from moorage.coordinator.telemetry import Telemetry
from moorage.errors import MoorageError, NotFound
from moorage.v1.types_pb2 import JobSpec, PodStatus

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

_AGAIN_SECONDS = 0.5


class _Removal:
    """The wish to forget the job, among its events; ``answer`` gets the names of its checkpoints."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()


class Job:
    """A job and its driver. ``changed`` rings at every change of the state or of a pod's status."""

    def __init__(
        self, leader: Leader, state: JobState, spec: JobSpec, persistence: Persistence, policies: Policies
    ) -> None:
        self.leader = leader
        self.machine = Machine(state, policies)
        self.spec = spec
        self.persistence = persistence
        self.changed = Bell()
        self.telemetry = Telemetry()
        self.votes: dict[str, int] = {}  # of the attempt under way: step to number of pods
        self.gates_closed = 0.0  # since when (CLOCK_BOOTTIME) NCCL's gates are; 0: as far as is known they are open
        self.gates_seconds = 0.0  # how long they were, the last time
        self.cut: dict[str, Any] = {}  # what is known of the last one, where this coordinator has led it
        self.orders: dict[Order, asyncio.Task[None]] = {}
        self.log = log.bind(job=state.job, trace=state.trace)
        self._leaving: set[asyncio.Task[None]] = set()  # cancelled, not yet gone
        self._queue: asyncio.Queue[tuple[ev.Event, asyncio.Future[JobState] | None] | _Removal] = asyncio.Queue()
        self.gone = False  # it was forgotten

    @property
    def state(self) -> JobState:
        return self.machine.state

    @property
    def id(self) -> str:
        return self.state.job

    # -- what comes in

    def post(self, event: ev.Event) -> None:
        """Hand in an event, to be handled behind those that are waiting."""
        self._queue.put_nowait((event, None))

    async def ask(self, event: ev.Asked) -> JobState:
        """Hand in a request and wait until what follows from it is written. Raises `Conflict`, `NotFound`."""
        self._require()
        answer: asyncio.Future[JobState] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((event, answer))
        return await self.leader.while_leading(answer)

    async def remove(self) -> list[str]:
        """Forget the job, behind the events that wait; returns the checkpoints that went with it.

        Raises `Conflict` if it has to stay, `NotFound` if it is gone, `Unavailable`.
        """
        self._require()
        removal = _Removal()
        self._queue.put_nowait(removal)
        return await self.leader.while_leading(removal.answer)

    def _require(self) -> None:
        if self.gone:
            raise self._not_found()

    def _not_found(self) -> NotFound:
        return NotFound(f"no job {self.id!r}", "it was deleted just now")

    def status(self, status: PodStatus) -> None:
        """Take in what a worker says of a pod."""
        state = self.state
        if status.incarnation != state.incarnation or status.pod >= state.pods:
            return
        self.telemetry.see(status)
        self.changed.ring()
        if status.phase == "exited":
            code, detail = exit_of(status)
            event: ev.Event = ev.PodExited(
                time=time.time(), pod=status.pod, incarnation=status.incarnation, code=code, detail=detail
            )
            if status.pod not in state.exits:
                self.post(event)
        elif status.phase in ("failed", "killed"):
            reason = status.reason or f"it is {status.phase}"
            self.post(ev.PodFailed(time=time.time(), pod=status.pod, incarnation=status.incarnation, reason=reason))

    # -- what goes on

    async def run(self) -> None:
        """Drive the job until cancelled. Raises `LeadershipLost`."""
        try:
            self._reconcile()
            while True:
                item = await self._queue.get()
                if isinstance(item, _Removal):
                    await self._remove(item.answer)
                    if self.gone:
                        return
                    continue
                event, answer = item
                await self._handle(event, answer)
        finally:
            tasks = [*self.orders.values(), *self._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        while not self._queue.empty():
            item = self._queue.get_nowait()
            answer = item.answer if isinstance(item, _Removal) else item[1]
            if self.gone:
                _fail(answer, self._not_found())
            elif answer is not None:
                answer.cancel()

    async def _remove(self, answer: asyncio.Future[list[str]]) -> None:
        try:
            names = await ended.remove(self.leader, self)
        except MoorageError as error:
            _fail(answer, error)
            return
        self.gone = True
        self.leader.jobs.pop(self.id, None)
        self.changed.ring()
        if not answer.done():
            answer.set_result(names)

    async def _handle(self, event: ev.Event, answer: asyncio.Future[JobState] | None) -> None:
        try:
            await self._apply(event)
        except IllegalEvent as error:
            # The event is dropped: the state is right, so the orders that it asks for bring the job on.
            self.log.error("illegal event", story=str(error))
            _fail(answer, MoorageError(f"job {self.state.name}: {str(error).splitlines()[0]}", "see the log"))
        except MoorageError as error:
            if answer is None:
                self.log.warning("event not handled, tried again", event_kind=type(event).__name__, error=str(error))
                asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self.post, event)
            _fail(answer, error)
        if answer is not None and not answer.done():
            answer.set_result(self.state)
        self._reconcile()

    async def _apply(self, event: ev.Event) -> None:
        while True:
            before = self.state
            after, found = self.machine.consider(event)
            if after is before:
                return
            try:
                await self.persistence.write(before, after, found)
            except OutcomeExists as exists:
                self.log.info("another outcome stands", outcome=exists.outcome.kind, by=exists.outcome.by)
                await self._apply(ev.OutcomeStands(time=time.time(), outcome=exists.outcome))
                continue
            except GenerationMoved:
                # The order to write the manifest is given again: it confirms what the prune may have touched.
                self.log.info("the store was pruned before the commit")
                return
            self.machine.accept(event, after, found)
            self._tell(found)
            self.changed.ring()
            return

    def _tell(self, found: list[Instruction]) -> None:
        for record in found:
            if isinstance(record, Say):
                self.leader.told(record)
                self.log.info(record.sentence, kind=record.kind, incarnation=record.incarnation, attempt=record.attempt)
            elif isinstance(record, Commit):
                self.leader.committed(self)
        if self.state.attempt is None:
            self.votes = {}

    def _reconcile(self) -> None:
        """Orders that are not wanted any more are cancelled, those that are and do not run are begun.

        An order that has ended while the state still wants it, with no event waiting, is given again after a moment.
        """
        wanted = self.machine.resume()
        for order in [order for order in self.orders if order not in wanted]:
            leaving = self.orders.pop(order)
            leaving.cancel()
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        for order in wanted:
            task = self.orders.get(order)
            if task is None:
                self.orders[order] = asyncio.create_task(self._carry_out(order, 0.0))
            elif task.done() and self._queue.empty():
                self.orders[order] = asyncio.create_task(self._carry_out(order, _AGAIN_SECONDS))

    async def _carry_out(self, order: Order, pause: float) -> None:
        name = type(order).__name__.lower()
        while True:
            await asyncio.sleep(pause)
            try:
                await self.leader.carry_out(self, order)
                return
            except LeadershipLost:
                self.leader.stop()
                return
            except Exception as error:
                # Anything: an order must not die silently, and all of them may be given again.
                known = isinstance(error, MoorageError)
                self.log.warning("order failed, given again", order=name, error=str(error), exc_info=not known)
                pause = min(2 * pause or 0.2, 5.0)


Executor = Callable[[Job, Order], Awaitable[None]]


def exit_of(status: PodStatus) -> tuple[int, str]:
    """A pod's exit code, and the rank that it comes from (empty for 0)."""
    failed = [rank for rank in status.ranks if rank.exited and rank.exit_code]
    code = status.exit_code
    if not code and failed:
        # The first failure makes the others be killed, so those that were not killed come first.
        code = min(failed, key=lambda rank: (rank.exit_code > 128, rank.rank)).exit_code
    if not code:
        return 0, ""
    culprit = next((rank for rank in failed if rank.exit_code == code), None)
    return code, f"rank {culprit.rank}" if culprit else f"pod {status.pod}"


def _fail(answer: asyncio.Future[Any] | None, error: Exception) -> None:
    if answer is not None and not answer.done():
        answer.set_exception(error)
