"""Checkpoints that count before they are in the store (durability local): what is missing, and completing them.

Such a checkpoint's record names the pods' manifests and the nodes that have them. The workers upload on their own; as
soon as every pod is in the store the global manifest is written and the record becomes like any other.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import cmp, op
from moorage.coordinator.persist import compare_generation
from moorage.errors import CorruptData, MoorageError
from moorage.records import CheckpointRecord
from moorage.store import GlobalManifest, Store

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

_EVERY = 2.0

failpoints.declare("coordinator.upload.complete.before", "coordinator.upload.complete.after")


def manifest_of(record: CheckpointRecord) -> GlobalManifest:
    """The global manifest of a checkpoint that waits for its pods."""
    return GlobalManifest(
        job=record.job,
        owner=record.owner,
        attempt=record.attempt,
        incarnation=record.incarnation,
        created=record.started,
        pods=record.pods,
        spec=record.spec,
        trace=record.trace,
    )


def missing(store: Store, record: CheckpointRecord) -> list[int]:
    """The pods of a waiting checkpoint that are not in the store yet. Blocking. Raises `Unavailable`."""
    return [pod for pod, name in enumerate(record.pods) if not store.has_pod_manifest(name)]


async def unreachable(leader: Leader, job: Job, record: CheckpointRecord) -> list[int]:
    """Pods of a checkpoint that can be had neither from the store nor from the node that they are to run on."""
    if not record.pods:
        return []
    seats = [seat.node for seat in job.state.seats]
    away = [pod for pod in range(len(record.pods)) if record.nodes[pod] != seats[pod]]
    if not away:
        return []
    absent = set(await asyncio.to_thread(missing, leader.store, record))
    return [pod for pod in away if pod in absent]


async def fallback(leader: Leader, record: CheckpointRecord) -> str:
    """The newest checkpoint of the job that is in the store and older than ``record``; empty: none."""
    older = [r for r in await leader.checkpoints.of_job(record.job) if r.attempt < record.attempt and not r.pods]
    return older[-1].checkpoint if older else ""


async def complete(leader: Leader) -> None:
    """Complete what has been uploaded, again and again; never ends by itself."""
    while True:
        waiting = False
        try:
            for record in await leader.checkpoints.all():
                if record.pods:
                    waiting |= not await _complete(leader, record)
        except MoorageError as error:
            log.info("uploads not looked at", error=str(error))
            waiting = True
        seen = leader.checkpoints.committed.rung
        await leader.checkpoints.committed.wait(seen, _EVERY if waiting else 60.0)


async def _complete(leader: Leader, record: CheckpointRecord) -> bool:
    """Whether the checkpoint is in the store now."""
    store = leader.store
    generation = await leader.read_generation()
    if await asyncio.to_thread(missing, store, record):
        return False
    key = leader.keys.checkpoint(record.job, record.checkpoint)
    try:
        name = await asyncio.to_thread(store.write_global_manifest, manifest_of(record))
        # After the generation was read: what a prune has condemned since the upload is copied out of its way.
        await asyncio.to_thread(store.confirm, name)
    except CorruptData as error:
        log.error("a checkpoint cannot be completed", checkpoint=record.checkpoint, error=str(error))
        return True  # nothing to wait for
    kv = await leader.etcd.get(key)
    if kv is None:
        return True  # forgotten meanwhile
    current = msgspec.json.decode(kv.value, type=CheckpointRecord)
    new = msgspec.structs.replace(current, pods=[], nodes=[], spec=b"", started=0.0)
    await failpoints.hit("coordinator.upload.complete.before")
    fence = [
        leader.leadership.compare(),
        cmp.mod_revision(key, kv.mod_revision),
        compare_generation(leader.keys, generation),
    ]
    result = await leader.etcd.txn(fence, [op.put(key, msgspec.json.encode(new))])
    await failpoints.hit("coordinator.upload.complete.after")
    if result.succeeded:
        log.info("checkpoint is in the store", checkpoint=record.checkpoint)
        return True
    await leader.verify()
    return False
