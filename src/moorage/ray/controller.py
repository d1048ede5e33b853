"""The actor that keeps a job: it asks Ray for bundles, moorage for pods on them, and follows both until the end.

It runs on the driver's node and ends with the Ray job. All waiting is for events of the job (a stream of the
coordinator), of its supervisors (their futures) and for the state of Ray's nodes, which Ray only tells when asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import structlog

from moorage.config import ClientConfig
from moorage.coordinator.client import AsyncClient, AsyncJob, CheckpointInfo, EventInfo, JobInfo
from moorage.errors import Conflict, JobFailed, MoorageError, NoCapacity, NotFound
from moorage.ray.bundles import Bundles, Unusable, Wish
from moorage.ray.options import FailureConfig
from moorage.ray.plan import Action, Progress, Seen, Spent, Wanted, decide, spend
from moorage.ray.wire import Report, Reports
from moorage.v1 import types_pb2

log = structlog.get_logger(__name__)
_LOOK_SECONDS = 1.0
#: Of the time until a node goes away, the part in which other bundles are looked for; the rest is for the checkpoint.
_SEARCH_SHARE = 0.4
_SEARCH_SECONDS = 60.0
_EXISTS = "fail"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """All that the controller is told at its start. ``spec``: a serialized `JobSpec` with the job's name."""

    spec: bytes
    wish: Wish
    config: ClientConfig
    limits: FailureConfig
    if_exists: str = _EXISTS


class Controller:
    """One for each job. Its methods are the verbs of `RayJob`, whose futures their results are."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._spec = types_pb2.JobSpec.FromString(order.spec)
        self._client: AsyncClient | None = None
        self._job: AsyncJob | None = None
        self._info: JobInfo | None = None
        self._bundles: Bundles | None = None
        self._wanted: Wanted = "running"
        self._stranded = False
        self._spent = Spent()
        self._phase = ""
        self._lost: set[str] = set()
        self._reports = Reports()
        self._stirred = asyncio.Event()
        self._began = asyncio.Event()
        self._busy = asyncio.Lock()
        self._heartbeat = 0.0
        self._end: BaseException | None = None

    # -- from beginning to end

    async def run(self) -> JobInfo:
        """Bring the job to its end. Raises what stood in the way, `JobFailed` when it failed for good."""
        order = self._order
        self._client = AsyncClient(config=order.config)
        try:
            status = await self._client.status()
            self._bundles = Bundles(order.wish, status.cluster, self._stirred.set)
            async with self._busy:
                await self._begin()
            self._began.set()
            return await self._keep()
        except BaseException as error:
            self._end = error
            raise
        finally:
            self._began.set()
            if self._bundles is not None:
                await self._bundles.release()

    async def _begin(self) -> None:
        assert self._client is not None and self._bundles is not None
        with contextlib.suppress(NotFound):
            known = await self._client.job(self._spec.name)
            info = await known.status()
            if self._order.if_exists == "fail" and not info.over:
                raise Conflict(
                    f"job {info.name} exists and is {info.phase}",
                    'choose another name, or say if_exists="resume" or "replace"',
                )
            back = info.phase in ("parked", "failed", "stopped") and info.latest_checkpoint
            if self._order.if_exists == "resume" and (back or not info.over):
                self._job, self._info = known, info
        nodes = await self._place(patient=False)
        if self._job is None:
            self._job = await self._client.submit(
                self._spec, if_exists="replace" if self._order.if_exists == "replace" else "fail", on=nodes
            )
        elif self._info is not None and self._info.phase in ("running", "checkpointing"):
            await self._job.move(to=nodes)
        else:
            await self._job.restore(on=nodes)
        self._phase = ""
        self._info = await self._job.status()

    async def _place(self, *, patient: bool, deadline: float | None = None) -> list[str]:
        assert self._bundles is not None
        self._phase = "placing"
        return await self._bundles.acquire(self._look, patient=patient, deadline=deadline)

    async def _keep(self) -> JobInfo:
        assert self._job is not None and self._bundles is not None
        tasks = [asyncio.create_task(part) for part in (self._follow(), self._read(), self._poll())]
        try:
            while True:
                self._stirred.clear()
                await self._look()
                action = decide(self._seen(), self._spent, self._order.limits)
                if action.do == "end":
                    return await self._over(tasks[1])
                if action.do != "nothing":
                    async with self._busy:
                        # Somebody may have asked for something meanwhile.
                        action = decide(self._seen(), self._spent, self._order.limits)
                        await self._act(action)
                    continue
                for task in tasks:
                    if task.done() and not task.cancelled() and task.exception():
                        raise task.exception() or RuntimeError
                await self._stirred.wait()
        finally:
            for task in tasks:
                task.cancel()

    async def _over(self, reading: asyncio.Task[None]) -> JobInfo:
        assert self._job is not None
        info = await self._job.status()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._read_once(follow=False), 30)
        reading.cancel()
        if info.phase == "failed":
            raise JobFailed(info.reason, info.hint or f"moorage events {info.name} says more")
        self._info = info
        return info

    def _seen(self) -> Seen:
        assert self._info is not None and self._bundles is not None
        info = self._info
        return Seen(
            phase=info.phase,
            over=info.over,
            reason=info.reason,
            bundles=self._bundles.seen(self._lost),
            wanted=self._wanted,
            stranded=self._stranded,
        )

    # -- what is watched

    async def _follow(self) -> None:
        """The job at each change. A job that is over may be brought back, so it is asked again then."""
        assert self._job is not None
        while True:
            async for info in self._job.watch():
                self._info = info
                self._stirred.set()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read(self) -> None:
        while True:
            await self._read_once(follow=True)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _read_once(self, *, follow: bool) -> None:
        assert self._job is not None
        self._reports.begin()
        with contextlib.suppress(NotFound, Conflict):  # nothing was written yet
            async for piece in self._job.logs(follow=follow):
                self._reports.feed(piece.rank, piece.stderr, piece.data)

    async def _poll(self) -> None:
        assert self._bundles is not None
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if await self._bundles.look():
                self._stirred.set()

    async def _look(self) -> set[str]:
        assert self._client is not None
        self._lost = {node.node for node in await self._client.nodes() if not node.live}
        return self._lost

    # -- what is done

    async def _act(self, action: Action) -> None:
        if action.do == "nothing" or action.do == "end":
            return
        log.info("action", do=action.do, why=action.why, deadline=action.deadline)
        self._spent = spend(self._spent, action)
        match action.do:
            case "rejoin":
                await self._rejoin(action)
            case "evacuate":
                await self._evacuate(action)
            case "recover":
                await self._recover()
            case "give-up":
                await self._give_up(action)

    async def _rejoin(self, action: Action) -> None:
        """A supervisor alone has died: the job runs, is checkpointed in time, and gets a new one in the same bundle."""
        assert self._bundles is not None
        await self._checkpoint_now()
        try:
            await self._bundles.rejoin(action.bundles)
        except Unusable as error:
            log.warning("bundle cannot be joined again", why=str(error))
            await self._bundles.look()
            if any(bundle.preempted or not bundle.alive for bundle in self._bundles.seen(self._lost)):
                return  # the next look finds that, and which budget it is for
            self._spent = msgspec.structs.replace(self._spent, failures=self._spent.failures + 1)
            await self._evacuate(action)

    async def _checkpoint_now(self) -> CheckpointInfo | None:
        assert self._job is not None
        try:
            return await self._job.checkpoint()
        except MoorageError as error:
            log.warning("checkpoint was not made", why=str(error))
            return None

    async def _evacuate(self, action: Action) -> None:
        """Move a running job off bundles that go away: a checkpoint at once, then others, else park in time."""
        assert self._job is not None
        left = max(0.0, action.deadline - time.time()) if action.deadline else _SEARCH_SECONDS / _SEARCH_SHARE
        search = asyncio.get_running_loop().time() + left * _SEARCH_SHARE
        taken = asyncio.create_task(self._checkpoint_now())
        try:
            nodes = await self._place(patient=True, deadline=search)
        except NoCapacity as error:
            await taken
            log.warning("no place in time: the job is parked", why=str(error))
            await self._settle(self._job.park())
            await self._recover()
            return
        await taken
        await self._bring(nodes)

    async def _recover(self) -> None:
        """Bring back a job that has failed or is parked, on new bundles, from its newest checkpoint or anew."""
        await self._bring(await self._place(patient=True))

    async def _bring(self, nodes: list[str]) -> None:
        """Have the job run on ``nodes``, whatever has become of it meanwhile."""
        assert self._job is not None and self._client is not None
        self._phase = ""
        steady = ("running", "checkpointing", "parked")
        for _ in range(2):  # a job may fail while it is moved
            info = await self._job.until(lambda info: info.phase in steady or info.over)
            if info.over and info.phase != "failed":
                break
            if info.phase in ("running", "checkpointing"):
                done = await self._settle(self._job.move(to=nodes))
            elif info.latest_checkpoint:
                done = await self._settle(self._job.restore(on=nodes))
            else:
                self._reports = Reports()
                self._job = await self._client.submit(self._spec, if_exists="replace", on=nodes)
                done = await self._settle(self._job.status())
            if done:
                break

    async def _settle(self, way: Coroutine[Any, Any, Any]) -> bool:
        """Await a move, park or restore; whether it was done. Where not, the next look finds the job as it is."""
        assert self._job is not None
        done = True
        try:
            await way
        except MoorageError as error:
            log.warning("not done", why=str(error))
            done = False
        self._info = await self._job.status()
        self._stranded = self._info.phase == "parked" and self._wanted == "running"
        return done

    async def _give_up(self, action: Action) -> None:
        assert self._job is not None
        if self._info is not None and not self._info.over and self._info.phase != "parked":
            with contextlib.suppress(MoorageError):
                await self._job.park()
        name = self._spec.name
        raise JobFailed(
            f"job {name} is not brought back: {action.why.rstrip('.')}",
            f"moorage logs {name} and moorage events {name} say more; raise the limit, or restore it",
        )

    # -- verbs

    async def _ready(self) -> AsyncJob:
        await self._began.wait()
        if self._job is None:
            raise self._end or Conflict(f"job {self._spec.name} was not started")
        return self._job

    async def started(self) -> JobInfo:
        """The job as soon as it runs. Raises what `run` raises, and `Conflict` if it ends before."""
        job = await self._ready()
        return await job.until(lambda info: info.phase in ("running", "checkpointing"))

    async def status(self) -> JobInfo:
        """The job as it stands."""
        return await (await self._ready()).status()

    async def checkpoint(self) -> CheckpointInfo:
        """Checkpoint the job; it runs on."""
        job = await self._ready()
        async with self._busy:
            return await job.checkpoint()

    async def park(self) -> CheckpointInfo:
        """Checkpoint the job, take it off its nodes and give the bundles back to Ray."""
        job = await self._ready()
        async with self._busy:
            before, self._wanted = self._wanted, "parked"
            try:
                checkpoint = await job.park()
            except BaseException:
                self._wanted = before
                raise
            assert self._bundles is not None
            await self._bundles.release()
            self._info = await job.status()
            return checkpoint

    async def restore(self, checkpoint: str) -> JobInfo:
        """Bring the job back, on new bundles if it was parked."""
        job = await self._ready()
        async with self._busy:
            assert self._bundles is not None
            nodes = self._bundles.nodes if self._bundles.held else await self._place(patient=False)
            info = await job.restore(checkpoint or None, on=nodes)
            self._wanted, self._stranded, self._phase, self._info = "running", False, "", info
            return info

    async def stop(self, checkpoint: bool) -> JobInfo:
        """End the job."""
        job = await self._ready()
        self._wanted = "stopped"
        self._stirred.set()
        async with self._busy:
            return await job.stop(checkpoint=checkpoint)

    async def progress(self) -> Progress:
        """How the job stands, at once, also while bundles are looked for."""
        job, info = self._job, self._info
        if job is not None and info is not None and info.latest_checkpoint:
            assert self._client is not None
            found = [c for c in await self._client.checkpoints(job.id) if c.id == info.latest_checkpoint]
            self._heartbeat = found[0].created if found else self._heartbeat
        newest = self._reports.newest()
        return Progress(
            job=job.id if job is not None else "",
            phase=self._phase or (info.phase if info is not None else "placing"),
            reason=info.reason if info is not None else "",
            nodes=self._bundles.nodes if self._bundles is not None else [],
            incarnation=info.incarnation if info is not None else 0,
            failures=self._spent.failures,
            preemptions=self._spent.preemptions,
            latest_checkpoint=info.latest_checkpoint if info is not None else "",
            heartbeat=self._heartbeat,
            metrics=newest.metrics if newest else {},
            reports=self._reports.count(),
        )

    async def reports(self, rank: int) -> list[Report]:
        """All that a rank has reported."""
        return self._reports.in_order(rank)

    async def events(self) -> list[EventInfo]:
        """The job's events, oldest first."""
        return [event async for event in (await self._ready()).events()]

    async def logs(self, rank: int) -> str:
        """What a rank (-1: all) wrote so far."""
        pieces = [piece.data async for piece in (await self._ready()).logs(rank=rank)]
        return b"".join(pieces).decode(errors="replace")

    async def supervisors(self) -> list[Any]:
        """The actors in the bundles."""
        return self._bundles.actors() if self._bundles is not None else []
