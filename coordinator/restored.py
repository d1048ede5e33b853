"""An etcd that was restored from a backup may be older than the jobs: then nothing may be ordered by what it says.

Workers and store know better. A pod whose incarnation is above its job's in etcd, a checkpoint of such an incarnation,
or a worker that has taken orders from a later leader can only be there when etcd has forgotten. A coordinator that
finds one of them leads nobody, and says why. The way out is a newer backup, or `accept`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec
import structlog

from moorage import failpoints
from moorage.barrier import cmp, op
from moorage.coordinator.machine.invariants import validate
from moorage.coordinator.machine.state import JobState, Target, decode, encode
from moorage.coordinator.workers import NodeGone
from moorage.errors import Fenced, MoorageError
from moorage.records import IncarnationRecord
from moorage.v1 import worker_pb2

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

#: By how much `accept` raises every incarnation: far above any that may have been forgotten.
LEAP = 1000
HINT = (
    "restore a newer backup of etcd; or give up what it has forgotten: moorage coordinator --accept-older-etcd "
    "(docs/etcd.md)"
)
_ASK_SECONDS = 1.5

failpoints.declare("coordinator.accept.before", "coordinator.accept.after")


class OlderEtcdError(Exception):
    """etcd has forgotten something that happened; the message names it."""


async def check(leader: Leader) -> None:
    """Before anything is taken up. Raises `OlderEtcdError`, `Unavailable`."""
    states = await read_states(leader)
    incarnations = {job: state.incarnation for job, (state, _) in states.items()}
    known = await _known_manifests(leader)
    looking = asyncio.create_task(_look_for_a_while(leader, incarnations, known))
    found = await asyncio.gather(*(_ask(leader, node, incarnations) for node in sorted(leader.nodes.live)))
    found = [*found, await looking]
    if forgotten := [sentence for sentence in found if sentence]:
        raise OlderEtcdError(f"etcd holds an older state than the cluster: {'; '.join(forgotten)}")


def seen(leader: Leader, node: str, job: str, incarnation: int) -> None:
    """A pod that shows up later. Raises `OlderEtcdError` when etcd does not know its incarnation."""
    state = leader.jobs[job].state
    if incarnation > state.incarnation:
        forgotten = _newer(node, job, incarnation, state.incarnation)
        raise OlderEtcdError(f"etcd holds an older state than the cluster: {forgotten}")


def _newer(where: str, job: str, incarnation: int, known: int) -> str:
    return f"{where} has incarnation {incarnation} of job {job}, of which etcd knows {known}"


async def _ask(leader: Leader, node: str, incarnations: dict[str, int]) -> str:
    """What a node has that etcd does not know; empty: nothing, or it does not answer (`seen` will tell)."""

    async def first() -> str:
        request = worker_pb2.WatchPodsRequest(epoch=leader.epoch)
        async for status in leader.workers.replies(node, "WatchPods", request):
            if not status.job:
                return ""
            known = incarnations.get(status.job)
            if known is not None and status.incarnation > known:
                return _newer(node, status.job, status.incarnation, known)
        return ""

    try:
        return await asyncio.wait_for(first(), _ASK_SECONDS)
    except Fenced:
        kv = await leader.etcd.get(leader.leadership.key)
        if kv is None or kv.create_revision != leader.epoch:
            return ""  # somebody else leads by now
        return f"{node} has taken orders from a leader that etcd does not know"
    except (MoorageError, NodeGone, TimeoutError):
        return ""


async def _known_manifests(leader: Leader) -> frozenset[str]:
    listing = await leader.etcd.list(leader.keys.jobs, keys_only=True)
    keys = [kv.key for kv in listing.items if "/checkpoints/" in kv.key]
    found = await asyncio.gather(*(leader.checkpoints.get(key.rpartition("/")[2]) for key in keys))
    return frozenset(record.manifest for record in found)


async def _look_for_a_while(leader: Leader, incarnations: dict[str, int], known: frozenset[str]) -> str:
    # A store that does not answer must not keep the next leader from leading.
    try:
        return await asyncio.wait_for(asyncio.to_thread(_look, leader, incarnations, known), _ASK_SECONDS)
    except TimeoutError:
        log.warning("the store was not asked whether etcd is older", error="it does not answer")
        return ""


def _look(leader: Leader, incarnations: dict[str, int], known: frozenset[str]) -> str:
    """A checkpoint in the store of an incarnation that etcd does not know; only what etcd does not name is read."""
    try:
        for entry in leader.store.backend.list("checkpoints"):
            name = entry.name.rpartition("/")[2]
            if name in known:
                continue
            try:
                manifest = leader.store.read_global_manifest(name)
            except MoorageError:
                continue
            incarnation = incarnations.get(manifest.job)
            if incarnation is not None and manifest.incarnation > incarnation:
                return _newer("the store", manifest.job, manifest.incarnation, incarnation)
    except MoorageError as error:
        log.warning("the store was not asked whether etcd is older", error=str(error))
    return ""


async def read_states(leader: Leader) -> dict[str, tuple[JobState, int]]:
    """Every job's state and the revision of its key."""
    listing = await leader.etcd.list(leader.keys.jobs)
    found: dict[str, tuple[JobState, int]] = {}
    for kv in listing.items:
        if kv.key.endswith("/state") and kv.key.count("/") == leader.keys.jobs.count("/") + 1:
            try:
                state = decode(kv.value)
            except (MoorageError, msgspec.MsgspecError):
                continue  # told of when it is taken up
            found[state.job] = (state, kv.mod_revision)
    return found


def leapt(state: JobState, nodes: dict[str, tuple[float, bool]]) -> JobState:
    """The job as it stands when all that etcd has forgotten is given up: parked, above every incarnation there was.

    ``nodes``: lease and whether it is kept, of every node that may have pods of it. Pure.
    """
    lost = {Target(pod, node, *lease) for pod in range(state.pods) for node, lease in nodes.items()}
    lost |= {Target(pod, seat.node, seat.lease_seconds, seat.lease_kept) for pod, seat in enumerate(state.seats)}
    new = msgspec.structs.replace(
        state,
        serial=state.serial + 1,
        incarnation=state.incarnation + LEAP,
        phase="parking" if lost else "parked",
        reason="etcd was restored from an older backup, and what it had forgotten was given up",
        why_parked="etcd was restored from an older backup",
        seats=(),
        exits={},
        broken={},
        fencing=tuple(sorted(lost)),
        bringup=None,
        attempt=None,
        queued=None,
        ending=None,
        trouble=None,
    )
    validate(new)
    return new


async def accept(leader: Leader) -> None:
    """Give up what etcd has forgotten: every job that is not over is parked as a far later incarnation."""
    nodes = {r.node: (float(r.lease_seconds), r.lease_kept) for r in leader.nodes.live.values()}
    for job, (state, revision) in (await read_states(leader)).items():
        if state.over:
            continue
        new = leapt(state, nodes)
        record = IncarnationRecord(incarnation=new.incarnation, placement=[], trace=new.trace)
        key = leader.keys.state(job)
        await failpoints.hit("coordinator.accept.before")
        fence = [leader.leadership.compare(), cmp.mod_revision(key, revision)]
        puts = [op.put(key, encode(new)), op.put(leader.keys.incarnation(job), msgspec.json.encode(record))]
        result = await leader.etcd.txn(fence, puts)
        await failpoints.hit("coordinator.accept.after")
        if not result.succeeded:
            raise Fenced(f"the state of job {job} was written by somebody else meanwhile", "start again")
        log.warning("given up", job=job, incarnation=new.incarnation, at=time.time())
