"""Carrying a drain out, wave by wave. All that it must remember is in `record`: a coordinator may die."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from moorage.coordinator.drain import fleet
from moorage.coordinator.drain.model import DrainPhase
from moorage.coordinator.drain.plan import plan
from moorage.coordinator.drain.record import MoveRecord
from moorage.coordinator.drain.verdict import judge, request_id
from moorage.coordinator.machine import events as ev
from moorage.errors import Conflict, MoorageError, Unavailable

if TYPE_CHECKING:
    from moorage.coordinator.drain.drains import Drain
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

#: Jobs of one wave that are on their way at the same time: more only wait for the same disks and links.
_AT_ONCE = 8
_AGAIN_SECONDS = 1.0


async def run(leader: Leader, drain: Drain) -> None:
    """Bring a drain to its end. Raises `LeadershipLost`."""
    clock = asyncio.create_task(_deadline(drain))
    try:
        for wave in range(max(1, drain.order.wave), len(drain.order.waves) + 1):
            if drain.stop.is_set():
                break
            await _persist(leader, drain, wave=wave)
            await _replan(leader, drain, wave)
            await _wave(leader, drain, wave)
        if not drain.stop.is_set():
            await _replan(leader, drain, len(drain.order.waves))
        # What came in late, and what was under way in a wave that was broken off.
        await _wave(leader, drain, len(drain.order.waves))
        phase, reason = _end(drain)
        await _persist(leader, drain, phase=phase, reason=reason, ended=time.time())
        log.info("drain is over", drain=drain.order.id, phase=phase, reason=reason, trace=drain.order.trace)
    finally:
        clock.cancel()
        await asyncio.gather(clock, return_exceptions=True)


async def _deadline(drain: Drain) -> None:
    while drain.order.deadline:
        left = drain.order.deadline - time.time()
        if left <= 0:
            drain.stop.set()
            return
        await asyncio.sleep(min(left, 5.0))  # in slices: the wall clock may be set


def _end(drain: Drain) -> tuple[DrainPhase, str]:
    moves = drain.moves.values()
    if waiting := [move.name for move in moves if not move.settled]:
        names = ", ".join(sorted(waiting))
        if drain.order.deadline and time.time() >= drain.order.deadline:
            return "timed-out", f"time ran out before {names} moved"
        return "cancelled", f"it was called off before {names} moved"
    if stay := [move.name for move in moves if move.state in ("failed", "left")]:
        return "incomplete", f"{', '.join(sorted(stay))} could not be moved"
    if parked := [move.name for move in moves if move.unplaced]:
        return "incomplete", f"{', '.join(sorted(parked))} found no place and had to be parked"
    return "done", ""


async def _persist(leader: Leader, drain: Drain, *moves: MoveRecord, **order: object) -> None:
    """Write until it is written: moves, or changes of the order."""
    while True:
        try:
            if order:
                await leader.drains.change(drain, **order)
            else:
                await leader.drains.note(drain, *moves)
            return
        except Unavailable as error:
            leader.require()
            log.info("drain not written, tried again", drain=drain.order.id, error=str(error))
            await asyncio.sleep(_AGAIN_SECONDS)


async def _replan(leader: Leader, drain: Drain, wave: int) -> None:
    """Before each wave: what was planned is kept where it still can be had; jobs that came in since are taken along."""
    waiting = {name: move for name, move in drain.moves.items() if move.state == "waiting" and not move.ending}
    found = plan(
        fleet.nodes(leader),
        fleet.jobs(leader),
        drain.order.nodes,
        parallel=drain.order.parallel,
        fits=fleet.fits(leader),
        wanted={name: move.target for name, move in waiting.items() if move.target},
    )
    news: list[MoveRecord] = []
    for move in found.moves:
        known = drain.moves.get(move.job)
        if known is None:
            news.append(
                MoveRecord(job=move.job, name=move.name, wave=move.wave, source=move.source, target=move.target)
            )
        elif move.job in waiting and known.target != move.target:
            log.info("planned anew", drain=drain.order.id, job=move.job, before=known.target, after=move.target)
            news.append(
                msgspec.structs.replace(
                    known, source=move.source, target=move.target, wave=max(known.wave, wave), reason="", choices=()
                )
            )
    for one in found.stuck:
        known = drain.moves.get(one.job)
        if known is None or (one.job in waiting and (known.target or drain.order.homeless != "park")):
            base = known or MoveRecord(job=one.job, name=one.name, wave=one.wave, source=one.source)
            state = "waiting" if drain.order.homeless == "park" else "left"
            news.append(msgspec.structs.replace(base, target=(), state=state, reason=one.reason, choices=one.choices))
    if news:
        await _persist(leader, drain, *news)


async def _wave(leader: Leader, drain: Drain, wave: int) -> None:
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str) -> None:
        async with at_once:
            await _carry(leader, drain, name)

    due = [(move.ending, name) for name, move in drain.moves.items() if move.wave <= wave and not move.settled]
    names = [name for _, name in sorted(due)]  # what ends by itself must not keep others from beginning
    tasks = [asyncio.create_task(one(name)) for name in names]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(leader: Leader, drain: Drain, name: str) -> None:
    """Move one job, until it is settled; or, when the drain is called off, until it is where nobody waits for it."""
    leaving = frozenset(drain.order.nodes)
    while True:
        job = leader.jobs.get(name)
        move = drain.moves[name]
        seen = job.changed.rung if job else 0
        verdict = judge(drain.order.id, move, job.state if job else None, leaving)
        if verdict.state is not None:
            seconds = time.time() - move.began if move.began else 0.0
            await _persist(
                leader,
                drain,
                msgspec.structs.replace(
                    move,
                    state=verdict.state,
                    reason=verdict.reason or ("" if verdict.state == "moved" else move.reason),
                    choices=verdict.choices,
                    unplaced=verdict.unplaced,
                    seconds=round(seconds, 3),
                ),
            )
            return
        if drain.stop.is_set() and (move.state == "waiting" or verdict.ask):
            if move.state != "waiting":  # its move was aborted, and no other one is to begin
                await _persist(leader, drain, msgspec.structs.replace(move, state="waiting"))
            return
        assert job is not None
        if verdict.ask and move.ending:  # it was about to end by itself, and did not
            await _persist(leader, drain, msgspec.structs.replace(move, ending=False))
            await _replan(leader, drain, move.wave)
            continue
        if verdict.ask and await _ask(leader, drain, move, job):
            continue
        await _change(drain, job, seen)


async def _change(drain: Drain, job: Job, seen: int) -> None:
    waits = [asyncio.ensure_future(job.changed.wait(seen, 5.0)), asyncio.ensure_future(drain.stop.wait())]
    if drain.stop.is_set():
        waits.pop().cancel()
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()


async def _ask(leader: Leader, drain: Drain, move: MoveRecord, job: Job) -> bool:
    """Order the move, or its next try. Returns whether it was taken in."""
    if any(done.id == request_id(drain.order.id, move) for done in job.state.requests):
        move = msgspec.structs.replace(move, tries=move.tries + 1)
        await asyncio.sleep(_AGAIN_SECONDS)
    request = request_id(drain.order.id, move)
    await _persist(leader, drain, msgspec.structs.replace(move, state="moving", began=move.began or time.time()))
    now = time.time()
    asked: ev.Asked
    if move.target:
        asked = ev.MoveAsked(time=now, request=request, trace=drain.order.trace, nodes=move.target, exact=True)
    else:
        asked = ev.ParkAsked(time=now, request=request, trace=drain.order.trace)
    try:
        await job.ask(asked)
        return True
    except Conflict as error:
        log.info("the job cannot be moved right now", drain=drain.order.id, job=job.id, error=str(error))
    except MoorageError as error:
        log.warning("the job was not asked", drain=drain.order.id, job=job.id, error=str(error))
    return False
