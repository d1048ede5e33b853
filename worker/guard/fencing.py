"""Carry out what `fence.decide` says: the guard's clock, its questions to etcd, and its deeds."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from moorage.errors import MoorageError
from moorage.records import IncarnationRecord, Keys
from moorage.worker.guard import fence, kernel
from moorage.worker.guard.fence import Action, Deadline, Read, State
from moorage.worker.guard.messages import GuardConfig

log = structlog.get_logger(__name__)

#: Between two questions to etcd, and between two attempts to make a stubborn pod stand still.
RETRY_SECONDS = 1.0

Question = Callable[[], Awaitable[int]]


class Fenceable(Protocol):
    """What fencing needs of a pod: see `pod.Pod`."""

    deadline: float

    @property
    def over(self) -> bool: ...
    @property
    def fenced(self) -> bool: ...
    @property
    def unsettled(self) -> bool: ...
    async def fence(self) -> None: ...
    async def lift(self) -> None: ...
    async def kill(self, grace: float, reason: str) -> object: ...


class Fencing:
    """Keeps one pod's fence. ``ask`` reads the job's incarnation and may take its time or raise `MoorageError`."""

    def __init__(self, pod: Fenceable, *, own: int, deadline: float, ask: Question) -> None:
        self._pod = pod
        self._own = own
        self._ask = ask
        now = kernel.now()
        self._deadline = Deadline(deadline, now)
        self._state = State.FENCED if pod.fenced else State.OPEN
        self._must_fence = pod.fenced  # a guard that died may have written the intention and not have done it
        self._read: Read | None = None
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._timer = kernel.boottime_timer()

    def renew(self, until: float) -> None:
        """The worker's promise."""
        renewed = fence.renew(self._deadline, until, kernel.now())
        broken = renewed.since != self._deadline.since
        self._deadline = renewed
        self._pod.deadline = renewed.until
        self._wake.set()
        if broken:
            self._hurry.set()

    def poke(self) -> None:
        """Something about the pod has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._timer, self._wake.set)
        try:
            while True:
                self._wake.clear()
                await self._turn()
                await self._sleep()
        finally:
            loop.remove_reader(self._timer)
            if self._reader is not None:
                self._reader.cancel()

    async def _turn(self) -> None:
        if self._pod.over:
            self._state = State.GONE
        for action in fence.decide(self._state, kernel.now(), self._deadline, self._read, self._own):
            if action is Action.FENCE:
                log.warning("the deadline has passed", deadline=self._deadline.until)
                self._state, self._read, self._must_fence = State.FENCED, None, True
            elif action is Action.READ and (self._reader is None or self._reader.done()):
                self._reader = asyncio.create_task(self._keep_asking())
            elif action is Action.LIFT:
                log.info("the incarnation is still the job's own", incarnation=self._own)
                self._deadline = fence.freed(self._deadline)  # first: it may lapse again meanwhile
                await self._pod.lift()
                self._state, self._must_fence = State.OPEN, False
            elif action is Action.KILL and self._read is not None:
                await self._kill(self._read)
        if self._state is State.FENCED and (self._must_fence or self._pod.unsettled):
            try:
                await self._pod.fence()
                self._must_fence = False
            except (MoorageError, OSError) as error:
                log.error("the pod could not be fenced, trying again", error=str(error))

    async def _kill(self, read: Read) -> None:
        found = f"incarnation {read.incarnation}" if read.incarnation else "no such job, or that none of it may run"
        log.warning("the pod is given up", own=self._own, found=found)
        try:
            await self._pod.kill(0.0, f"fenced: etcd holds {found}; this is incarnation {self._own}")
            self._state = State.GONE
        except MoorageError as error:
            log.error("the pod could not be killed, trying again", error=str(error))

    async def _sleep(self) -> None:
        if self._state is State.OPEN:
            kernel.set_timer(self._timer, self._deadline.until)
        elif self._state is State.FENCED:
            kernel.set_timer(self._timer, kernel.now() + RETRY_SECONDS)
        await self._wake.wait()

    async def _keep_asking(self) -> None:
        while self._state is State.FENCED:
            self._hurry.clear()
            asked = kernel.now()
            try:
                self._read = Read(await self._ask(), asked)
                self._wake.set()
            except MoorageError as error:
                log.warning("etcd does not tell the incarnation", error=str(error))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), RETRY_SECONDS)


class Etcd:
    """Asks etcd for the job's incarnation. Nothing of gRPC is loaded before the first question: it would more than
    double the guard's memory, and most guards never ask."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._key = Keys(config.cluster).incarnation(config.job)

    async def __call__(self) -> int:
        """The job's incarnation; 0 when the job is gone or no pod of it may run. Raises `MoorageError`."""
        module = await asyncio.to_thread(importlib.import_module, "moorage.barrier.client")
        access = self._config.etcd
        password = _password(access.password_file)
        client = module.EtcdClient(access.endpoints, tls=access.tls, user=access.user, password=password)
        try:
            found = await client.get(self._key)
        finally:
            await client.close()
        return incarnation_of(found.value if found is not None else None)


def _password(file: str) -> str:
    try:
        return Path(file).read_text().strip() if file else ""
    except OSError as error:
        raise MoorageError(f"{file}: {error.strerror}") from error


def incarnation_of(value: bytes | None) -> int:
    """What the key's value says: 0 for none, or for a job of which no pod may run. Raises `MoorageError`."""
    if value is None:
        return 0
    try:
        record = msgspec.json.decode(value, type=IncarnationRecord)
    except msgspec.DecodeError as error:
        raise MoorageError(f"the job's incarnation in etcd cannot be read: {error}") from error
    return record.incarnation if record.placement else 0
