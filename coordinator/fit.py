"""Which nodes a checkpoint, or a running job, may be restored on: what every pod needs against what every node has.

What is known of a node (its record in etcd) is judged here; the files are looked at by the node itself. A node that
cannot be asked is not ruled out: its worker looks again before it restores anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from moorage.compat import JobFingerprint, Line, Verdict, job_from, judge, node_from
from moorage.coordinator.workers import NodeGone
from moorage.errors import MoorageError, Unavailable
from moorage.records import NodeRecord
from moorage.v1 import worker_pb2

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

#: (pod, node): why that pod cannot be restored there.
Misfits = Mapping[tuple[int, str], str]


async def of_checkpoint(leader: Leader, checkpoint: str) -> Misfits:
    """Where the pods of a checkpoint cannot go, of all live nodes. Empty for a checkpoint that cannot be read: the
    order to restore it says why."""
    try:
        pods = await fingerprints(leader, checkpoint)
    except (MoorageError, OSError) as error:
        log.info("nothing is known of what a checkpoint needs", checkpoint=checkpoint, error=str(error))
        return {}
    return await misfits(leader, pods, leader.nodes.live.values())


async def fingerprints(leader: Leader, checkpoint: str) -> list[JobFingerprint]:
    """Of its pods, pod 0 first; one of a pod that had ended needs nothing.

    Raises `NotFound`, `CorruptData`, `Unavailable`.
    """
    _, _, manifests = await leader.checkpoints.read(checkpoint)
    return [JobFingerprint() if m.extra.get("finished") else job_from(m.fingerprint) for m in manifests]


async def of_running(leader: Leader, job: Job, nodes: Iterable[str]) -> Misfits:
    """Where the pods of a running job cannot go, of ``nodes``. Raises what a worker raised that could not look."""
    records = [leader.nodes.live[node] for node in nodes if node in leader.nodes.live]
    if not records or not job.state.seats:
        return {}
    replies = await asyncio.gather(*(examine(leader, job, pod, fingerprint=True) for pod in range(job.state.pods)))
    return await misfits(leader, [_decode(reply.fingerprint) for reply in replies], records)


async def examine(leader: Leader, job: Job, pod: int, *, fingerprint: bool = False) -> worker_pb2.ExamineReply:
    """What a pod's worker says of it, with nothing touched. Raises `Unavailable`, and what the worker raised."""
    state = job.state
    fence = worker_pb2.Fence(epoch=leader.epoch, job=job.id, incarnation=state.incarnation, pod=pod, trace=state.trace)
    request = worker_pb2.ExamineRequest(fence=fence, fingerprint=fingerprint)
    try:
        reply: worker_pb2.ExamineReply = await leader.workers.order(state.seats[pod].node, "examine", request)
    except NodeGone as gone:
        raise Unavailable(str(gone), "try again when the job runs") from gone
    return reply


async def misfits(leader: Leader, pods: list[JobFingerprint], records: Iterable[NodeRecord]) -> Misfits:
    """All that does not fit. Pods that need the same are judged once."""
    kinds: dict[bytes, list[int]] = {}
    for pod, job in enumerate(pods):
        if job != JobFingerprint():
            kinds.setdefault(msgspec.json.encode(job), []).append(pod)
    pairs = [(data, record) for data in kinds for record in records]
    verdicts = await asyncio.gather(*(_verdict(leader, pods[kinds[data][0]], data, record) for data, record in pairs))
    found: dict[tuple[int, str], str] = {}
    for (data, record), verdict in zip(pairs, verdicts, strict=True):
        if verdict is not None and not verdict.fits:
            found.update({(pod, record.node): verdict.summary for pod in kinds[data]})
    return found


async def _verdict(leader: Leader, job: JobFingerprint, data: bytes, record: NodeRecord) -> Verdict | None:
    known = judge(job, node_from(record.fingerprint))
    if not known.fits:
        return known
    try:
        return await ask(leader, record.node, data)
    except (MoorageError, NodeGone) as error:
        log.info("a node does not say what fits", node=record.node, error=str(error))
        return None


async def ask(leader: Leader, node: str, fingerprint: bytes) -> Verdict:
    """The node's own verdict, files and all. Raises `NodeGone`, and what the worker raised."""
    reply = await leader.workers.order(node, "fit", worker_pb2.FitRequest(fingerprint=fingerprint))
    return Verdict(
        tuple(
            Line(rule=line.rule, state=line.state, wanted=line.wanted, found=line.found, message=line.message)
            for line in reply.lines
        )
    )


def _decode(data: bytes) -> JobFingerprint:
    try:
        return job_from(msgspec.json.decode(data, type=dict[str, Any])) if data else JobFingerprint()
    except msgspec.DecodeError:
        return JobFingerprint()
