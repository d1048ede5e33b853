"""NCCL in a checkpoint: the cut before the pods are frozen, communicators let go of and made anew, gates opened.

`close` is a part of the order to freeze, `open_again` of what follows when the pods run again: after the outcome
``resume`` (order to collect), after an abort (order to settle), after a restore (order to release). All of it lives in
memory. Each of the two begins by looking at what the processes say of themselves, so it may be broken off at any moment
and begun again, by another coordinator too:

* a cut gets a number above all that any process has heard of, so what an earlier coordinator still says is out of date;
* processes whose communicators are gone already take part in a cut as before (their counts stand), and let go of
  nothing a second time;
* when any process lacks communicators all let go of theirs once more, and all are made anew, under fresh ids;
* gates open only when nobody lacks anything. So a gate that is open says that all was made;
* workers and processes open gates by themselves when they hear of no coordinator for long, until the cut is accepted
  and all of them have heard so: only then the first communicator goes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import structlog

from moorage import failpoints
from moorage.barrier import clock
from moorage.coordinator.fleet import Fleet
from moorage.coordinator.on_pods import Failure
from moorage.errors import AttemptAborted, DeadlineExceeded
from moorage.nccl_quiesce import control, driver, rebuild
from moorage.nccl_quiesce.control import Done, Ids
from moorage.nccl_quiesce.cut import Cut, Memory, Settings
from moorage.nccl_quiesce.model import Abort, Decision, Short, Snapshot
from moorage.nccl_quiesce.rounds import Pace, Rounds

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

_STEPS = ("cut", "keep", "destroy", "rebuild", "open")
failpoints.declare(*(f"coordinator.quiesce.{step}.{side}" for step in _STEPS for side in ("before", "after")))

#: The part of what is left of an attempt's time that the cut may take, and the most of it, in seconds.
_SHARE = 0.5
_LONGEST = 60.0
#: How long processes may take to be there again after a capture, and to make communicators, in seconds.
_BACK_SECONDS = 60.0
_DESTROY_SECONDS = 60.0
_REBUILD_SECONDS = 60.0
_OPEN_SECONDS = 30.0
#: How long communicators that could not be made are tried again: longer than a process waits in vain for others.
_AGAIN_SECONDS = 90.0
_HINT = (
    "the job runs on. A rank that is behind computes, or waits for something else than NCCL: look at it with `moorage "
    "exec JOB --rank R -- COMMAND`, and try again; a longer --attempt-deadline gives more time (docs/consistent-cut.md)"
)
#: Over a network, unlike in the simulation, an answer may take its time.
PACE = Pace(shortest=0.002, longest=0.05, again=1.0)


#: Of those who were behind when the gates closed, so many are written down.
_BEHIND_WRITTEN = 32


class _Cut(Cut):
    """``behind``: who was behind when the gates had closed; None before that."""

    picture = rebuild.Survivors
    behind: list[Short] | None = None

    def decide(self, memory: Memory, snapshots: Mapping[int, Snapshot], now: float) -> tuple[Memory, Decision]:
        if self.behind is None:
            self.behind = [short for some in self.picture(snapshots).behind.values() for short in some.values()]
        return super().decide(memory, snapshots, now)

    def record(self, rounds: Rounds, seconds: float, communicators: int) -> dict[str, Any]:
        """What the log and the checkpoint's manifest say of it; ``behind``: rank, communicator, kind, count, need."""
        behind = self.behind or []
        return {
            "processes": len(rounds.ranks),
            "rounds": rounds.round,
            "slides": rounds.slides,
            "unequal": bool(behind),
            "behind": [
                [short.rank, short.lane.communicator, short.lane.kind, short.count, short.need]
                for short in behind[:_BEHIND_WRITTEN]
            ],
            "communicators": communicators,
            "seconds": round(seconds, 4),
        }


@contextlib.asynccontextmanager
async def _step(name: str) -> AsyncIterator[None]:
    await failpoints.hit(f"coordinator.quiesce.{name}.before")
    yield
    await failpoints.hit(f"coordinator.quiesce.{name}.after")


@contextlib.asynccontextmanager
async def _fleet(leader: Leader, job: Job, incarnation: int) -> AsyncIterator[Fleet]:
    fleet = Fleet(leader, job, incarnation)
    try:
        yield fleet
    finally:
        await fleet.close()


def wanted(job: Job) -> bool:
    """Whether the job can have communicators."""
    spec = job.spec
    return control.has_communicators(spec.env, gpus=spec.gpus_per_pod, pods=spec.pods, ranks_per_pod=spec.ranks_per_pod)


async def close(leader: Leader, job: Job, incarnation: int, seconds: float) -> None:
    """Stop all ranks where no operation is half issued, and let go of all communicators. Gates stay closed.

    ``seconds``: what is left of the attempt. Raises `AttemptAborted` (the gates are open then), `Failure`, `NodeGone`.
    """
    if not wanted(job):
        return
    until = clock.now() + min(_LONGEST, seconds * _SHARE)
    async with _fleet(leader, job, incarnation) as fleet:
        await fleet.look(_OPEN_SECONDS)
        job.gates_seconds, job.cut = 0.0, {}
        if fleet.processes and not job.gates_closed:
            job.gates_closed = clock.now()
        while fleet.processes and not fleet.parted:
            if await _cut(fleet, until, job):
                return


async def _cut(fleet: Fleet, until: float, job: Job) -> bool:
    """One cut; False: there are other processes than when it began, so it must be made anew."""
    settings = Settings(deadline=max(0.1, until - clock.now()))
    number = fleet.newest + 1
    cut = _Cut(settings, seed=number)
    rounds = Rounds(fleet.ranks, attempt=number, cut=cut, pace=PACE)
    before = fleet.processes.keys()
    began = clock.now()
    async with _step("cut"):
        result = await driver.run(rounds, fleet, now=clock.now)
    if isinstance(result, Abort):
        raise AttemptAborted(_named(fleet, result), _HINT)
    await fleet.look(_OPEN_SECONDS)
    if fleet.processes.keys() != before:
        job.log.info("other processes use NCCL now: the cut is made anew", cut=number)
        return False  # the gates that are closed take part in the next one as they are
    if not all(process.closed for process in fleet.processes.values()):
        job.log.info("a gate has opened by itself: the cut is made anew", cut=number)
        return False
    job.cut = cut.record(rounds, clock.now() - began, len(result.plan.rebuild))
    job.log.info("cut", cut=number, **job.cut)
    async with _step("keep"):
        # Nobody opens a gate by himself any more, before the first communicator goes.
        keep = control.Keep(number)
        await fleet.each("keep", dict.fromkeys(fleet.processes, keep), Done, _OPEN_SECONDS)
    async with _step("destroy"):
        orders = rebuild.parts(result.plan, number, fleet.processes)
        await fleet.each("destroy", orders, Done, _DESTROY_SECONDS)
    return True


async def _release(fleet: Fleet, rounds: Rounds) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_OPEN_SECONDS):
            await driver.release(rounds, fleet, now=clock.now)
            return
    raise DeadlineExceeded(f"not every gate has opened within {_OPEN_SECONDS:g} s")


def _named(fleet: Fleet, abort: Abort) -> str:
    """The reason with all who are behind, as far as people read; and where these processes are."""
    about = [short.rank for short in abort.behind] + [rank for rank, _ in (*abort.inside, *abort.undrained)]
    more = "".join(f"; {short}" for short in abort.behind[1:8] if str(short) not in abort.reason)
    return abort.reason + more + "".join(f"; {fleet.name(rank)}" for rank in list(dict.fromkeys(about))[:4])


async def open_again(leader: Leader, job: Job, incarnation: int) -> None:
    """Make anew whatever communicators are missing, then open every gate that is closed. Does nothing otherwise.

    The pods must run. Raises `Failure` (a communicator cannot be had again, so the job cannot run on), `NodeGone`.
    """
    if not wanted(job):
        return
    async with _fleet(leader, job, incarnation) as fleet:
        await fleet.look(_BACK_SECONDS, step="back")
        until, pause = clock.now() + _AGAIN_SECONDS, 0.2
        while True:
            try:
                await _make(fleet, job)
                break
            except Failure as error:
                # A worker that died has left processes that have their communicators, and others that wait for these
                # until their time is over.
                if clock.now() >= until:
                    raise
                job.log.info("communicators not made anew yet", error=str(error))
            await asyncio.sleep(pause)
            pause = min(2 * pause, 3.0)
            await fleet.look(_BACK_SECONDS, step="back")
        if any(process.closed for process in fleet.processes.values()):
            rounds = Rounds(fleet.ranks, attempt=fleet.newest + 1, cut=Cut(), pace=PACE)
            async with _step("open"):
                await _release(fleet, rounds)
        if job.gates_closed:
            job.gates_seconds, job.gates_closed = clock.now() - job.gates_closed, 0.0


async def _make(fleet: Fleet, job: Job) -> None:
    """Make communicators anew, if any process lacks them. Raises `Failure`, `NodeGone`."""
    plan = rebuild.plan(fleet.processes)
    if plan is None:
        return
    began = clock.now()
    async with _step("rebuild"):
        await fleet.each("destroy", plan.destroy(fleet.processes), Done, _DESTROY_SECONDS)
        made = await fleet.each("ids", plan.names(), Ids, _DESTROY_SECONDS)
        ids = {name: data for some in made.values() for name, data in some.ids}
        if (renewed := plan.renewed(ids)).ids:
            await fleet.tell("renew", renewed, _OPEN_SECONDS)
        await fleet.each("rebuild", plan.make(ids), Done, _REBUILD_SECONDS)
    job.log.info("communicators made anew", communicators=len(plan.order), seconds=round(clock.now() - began, 4))
