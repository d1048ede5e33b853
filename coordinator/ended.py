"""What becomes of jobs that are over: they are remembered for a while, then forgotten, or deleted by who may.

With a job go its checkpoints that are not pinned and the logs that were archived. A job with a pinned checkpoint stays.
One that failed or was stopped and still has a checkpoint could be gone on with: it is never forgotten by itself, unless
the settings say after how long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import structlog

from moorage import failpoints
from moorage.barrier import cmp, op
from moorage.barrier.kv import Op
from moorage.errors import Conflict, MoorageError, Unavailable

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader
    from moorage.records import CheckpointRecord
    from moorage.store import Store

log = structlog.get_logger(__name__)

failpoints.declare(
    *(f"coordinator.job.{what}.{side}" for what in ("archive", "forget") for side in ("before", "after")),
)

#: How often it is looked for jobs to forget, in seconds.
EVERY = 60.0
_DAY = 86400.0
_AGAIN_SECONDS = 0.3


class Limits(NamedTuple):
    """Which jobs that are over are kept. 0: no limit."""

    most: int = 1000
    days: float = 7.0
    resumable_days: float = 0.0


class Ended(NamedTuple):
    """A job that is over. ``ended``: seconds since the epoch; ``resumable``: it did not finish and has a checkpoint."""

    job: str
    ended: float
    resumable: bool


def forgettable(jobs: Iterable[Ended], limits: Limits, now: float) -> list[str]:
    """The ids of those to forget, oldest first. Pure."""

    def old(job: Ended, days: float) -> bool:
        return days > 0 and now - job.ended > days * _DAY

    found = sorted(jobs, key=lambda job: (job.ended, job.job))
    done = [job for job in found if not job.resumable]
    surplus = set(done[: max(0, len(done) - limits.most)] if limits.most > 0 else ())
    return [
        job.job for job in found if job in surplus or old(job, limits.resumable_days if job.resumable else limits.days)
    ]


def over(leader: Leader) -> list[Ended]:
    """The jobs that are over."""
    found = []
    for state in (job.state for job in leader.jobs.values() if job.state.over):
        saved = bool(state.latest or state.base)
        found.append(Ended(state.job, state.ended, resumable=saved and state.phase != "finished"))
    return found


async def look_after(leader: Leader) -> None:
    """Forget what is to be forgotten, now and then; never ends by itself."""
    config = leader.config
    limits = Limits(config.keep_ended, config.keep_ended_days, config.keep_resumable_days)
    while True:
        await asyncio.sleep(EVERY)
        for name in forgettable(over(leader), limits, time.time()):
            job = leader.jobs.get(name)
            try:
                if job is not None:
                    await job.remove()
            except MoorageError as error:
                log.debug("a job that is over stays", job=name, reason=str(error))


async def removable(leader: Leader, job: Job) -> list[CheckpointRecord]:
    """The checkpoints that would go with the job. Raises `Conflict` if it has to stay, `Unavailable`."""
    state = job.state
    if not state.over:
        raise Conflict(f"job {state.name} is {state.phase}", f"stop it first: moorage stop {state.name}")
    for drain in leader.drains.running():
        if state.job in drain.moves:
            raise Conflict(f"job {state.name} is part of drain {drain.order.id}", "wait until the drain is over")
    records = await leader.checkpoints.of_job(state.job)
    if pinned := [record.checkpoint for record in records if record.pinned]:
        raise Conflict(
            f"job {state.name} has pinned checkpoints: {', '.join(pinned)}", f"moorage unpin {pinned[0]} lets it go"
        )
    return records


async def remove(leader: Leader, job: Job) -> list[str]:
    """Remove all that etcd and the store hold of a job; returns its checkpoints. Called by the job's own driver alone.

    What the checkpoints needed is the next prune's. Raises `Conflict` (see `removable`), `LeadershipLost`,
    `Unavailable` (the store cannot be reached).
    """
    async with leader.checkpoints.pinning:
        records = await removable(leader, job)
        # First: without its record nobody would know of them. Without them the job's logs are gone, and it is removed
        # by whoever tries again.
        await failpoints.hit("coordinator.job.archive.before")
        await asyncio.to_thread(_remove_archive, leader.store, job.id)
        await failpoints.hit("coordinator.job.archive.after")
        await failpoints.hit("coordinator.job.forget.before")
        await _remove_records(leader, job)
        await failpoints.hit("coordinator.job.forget.after")
        leader.checkpoints.forgotten(len(records))
    names = [record.checkpoint for record in records]
    log.info("job forgotten", job=job.id, name=job.state.name, owner=job.state.owner, checkpoints=names)
    return names


def _remove_archive(store: Store, job: str) -> None:
    for name in store.list_objects(f"logs/{job}/"):
        store.delete_object(name)


async def _remove_records(leader: Leader, job: Job) -> None:
    keys, etcd = leader.keys, leader.etcd
    while True:
        leader.require()
        try:
            holder = await etcd.get(keys.name(job.state.name))
            own = holder is not None and holder.value == job.id.encode()
            fence = [leader.leadership.compare(), cmp.mod_revision(keys.state(job.id), job.persistence.revision)]
            ops: list[Op] = [op.delete_prefix(keys.job(job.id)), op.delete_prefix(keys.attempts(job.id))]
            if holder is not None and own:
                fence.append(cmp.mod_revision(holder.key, holder.mod_revision))
                ops.append(op.delete(holder.key))
            if (await etcd.txn(fence, ops)).succeeded:
                return
            await leader.verify()
            if await etcd.get(keys.state(job.id)) is None:
                return  # it was done, and the answer lost
        except Unavailable as error:
            log.info("etcd is away", job=job.id, error=str(error))
        await asyncio.sleep(_AGAIN_SECONDS)
