"""From the coordinator's records to the messages of the API. Pure."""

from __future__ import annotations

import msgspec

from moorage.compat import Verdict
from moorage.coordinator.checkpoints import Part
from moorage.coordinator.job import Job
from moorage.coordinator.machine.state import AttemptState, JobState, Queued, Seat
from moorage.records import CheckpointRecord, CordonRecord, Event, NodeRecord
from moorage.store import CheckResult, PodManifest
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2, worker_pb2

#: Names of an attempt's steps in the API, where they differ.
_STEPS = {"sealing": "freezing", "committing": "persisting"}


def job_message(job: Job) -> pb.Job:
    """A job as it stands."""
    state = job.state
    told = {status.pod: status for status in job.telemetry.of(state.incarnation)}
    return pb.Job(
        id=state.job,
        spec=job.spec,
        phase=state.phase,
        incarnation=state.incarnation,
        pods=[told.get(pod) or _untold(state, pod, seat) for pod, seat in enumerate(state.seats)],
        exit_code=state.exit_code or 0,
        has_exit_code=state.exit_code is not None,
        reason=_sentence(state.reason),
        error_kind=state.error_kind,
        hint=state.hint,
        latest_checkpoint=state.latest,
        attempt=state.attempts,
        restarts=state.restarts_before + state.restarts,
        created=state.created,
        started=state.started,
        ended=state.ended,
        trace=state.trace,
        over=state.over,
        last_restore_seconds=state.last_restore_seconds,
    )


def _untold(state: JobState, pod: int, seat: Seat) -> types_pb2.PodStatus:
    """A pod of which its worker has said nothing yet."""
    exited = pod in state.exits
    return types_pb2.PodStatus(
        job=state.job,
        pod=pod,
        incarnation=state.incarnation,
        node=seat.node,
        phase="exited" if exited else "starting",
        exit_code=state.exits.get(pod, 0),
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith(".") else ".")


def attempt_message(job: Job, number: int) -> pb.Attempt | None:
    """An attempt that the job remembers, or one that is queued; None otherwise."""
    state = job.state
    attempt = state.find_attempt(number)
    if attempt is not None:
        return _attempt(job, attempt)
    if state.queued is not None and number == state.attempts + 1:
        return _queued(state, state.queued, number)
    return None


def _queued(state: JobState, queued: Queued, number: int) -> pb.Attempt:
    return pb.Attempt(
        job=state.job,
        attempt=number,
        phase="preparing",
        kind="resume" if queued.purpose == "checkpoint" else "stop",
        reason=f"Waits until attempt {state.attempts} has ended.",
        pods=state.pods,
    )


def _attempt(job: Job, attempt: AttemptState) -> pb.Attempt:
    pods = job.state.pods
    stored = attempt.step in ("committing", "committed")
    captured = stored or attempt.step == "persisting"
    return pb.Attempt(
        job=job.id,
        attempt=attempt.number,
        phase=_STEPS.get(attempt.step, attempt.step),
        kind=attempt.kind,
        reason=_sentence(attempt.reason),
        checkpoint=attempt.checkpoint,
        started=attempt.started,
        pause_seconds=attempt.pause_seconds,
        bytes_total=attempt.bytes_total,
        bytes_new=attempt.bytes_new,
        refusals=[worker_pb2.Refusal(what=r.what, why=r.why, cure=r.cure) for r in attempt.refusals],
        pods=pods,
        pods_captured=pods if captured else job.votes.get("captured", 0),
        pods_persisted=pods if stored else job.votes.get("persisted", 0),
        error_kind=attempt.error_kind,
        hint=attempt.hint,
    )


def committed_message(record: CheckpointRecord, pods: int) -> pb.Attempt:
    """An attempt that is remembered only by its checkpoint."""
    return pb.Attempt(
        job=record.job,
        attempt=record.attempt,
        phase="committed",
        checkpoint=record.checkpoint,
        pause_seconds=record.pause_seconds,
        bytes_total=record.bytes_total,
        bytes_new=record.bytes_new,
        pods=pods,
        pods_captured=pods,
        pods_persisted=pods,
    )


def checkpoint_message(
    record: CheckpointRecord, *, name: str, latest: bool, uploaded: tuple[int, int]
) -> pb.CheckpointInfo:
    """A committed checkpoint; ``uploaded`` as `Checkpoints.uploaded` says."""
    return pb.CheckpointInfo(
        id=record.checkpoint,
        job=record.job,
        job_name=name,
        created=record.created,
        attempt=record.attempt,
        incarnation=record.incarnation,
        bytes_total=record.bytes_total,
        bytes_new=record.bytes_new,
        pause_seconds=record.pause_seconds,
        pinned=record.pinned,
        latest=latest,
        owner=record.owner,
        pods_uploaded=uploaded[0],
        pods_waiting=uploaded[1],
    )


def inspect_message(info: pb.CheckpointInfo, parts: list[Part], pods: list[PodManifest]) -> pb.InspectReply:
    """What is inside a checkpoint."""
    return pb.InspectReply(
        checkpoint=info,
        parts=[
            pb.InspectPart(pod=p.pod, kind=p.kind, bytes=p.bytes, stored_bytes=p.stored, items=p.items) for p in parts
        ],
        ranks=[
            types_pb2.RankStatus(
                rank=int(rank.get("rank", 0)),
                pid=int(rank.get("pid", 0)),
                exited=bool(rank.get("exited", False)),
                exit_code=int(rank.get("exit_code", 0)),
            )
            for pod in pods
            for rank in pod.ranks
        ],
    )


def check_message(result: CheckResult) -> pb.CheckProgress:
    """The end of a check."""
    return pb.CheckProgress(
        bytes_done=result.bytes, bytes_total=result.bytes, errors=result.problems, done=True, chunks=result.chunks
    )


def event_message(event: Event) -> pb.JobEvent:
    """One sentence of a job's story."""
    return pb.JobEvent(
        time=event.time,
        kind=event.kind,
        sentence=event.sentence,
        job=event.job,
        owner=event.owner,
        trace=event.trace,
        incarnation=event.incarnation,
        attempt=event.attempt,
        node=event.node,
        data_json=msgspec.json.encode(event.data).decode(),
    )


def node_message(
    record: NodeRecord,
    *,
    live: bool,
    jobs: dict[str, int],
    cordon: CordonRecord | None = None,
    same_store: bool = True,
) -> pb.Node:
    """A node; ``jobs``: the ids of the jobs that have pods there, and how many. ``same_store``: as the coordinator."""
    return pb.Node(
        node=record.node,
        address=record.address,
        live=live,
        ready=live and record.ready and same_store,
        gpus=record.gpus,
        cpus=record.cpus,
        memory_bytes=record.memory_bytes,
        version=record.version,
        jobs=sorted(jobs),
        labels=record.labels,
        pods=sum(jobs.values()),
        cordoned=cordon is not None,
        cordon_reason=cordon.reason if cordon else "",
        driver=record.driver,
        slots=record.slots,
        fingerprint_json=msgspec.json.encode(record.fingerprint).decode(),
    )


def compat_message(checkpoint: str, node: str, verdicts: list[Verdict]) -> pb.CompatReply:
    """How a node stands to a checkpoint, by pod."""
    return pb.CompatReply(
        checkpoint=checkpoint,
        node=node,
        fits=all(verdict.fits for verdict in verdicts),
        pods=[
            pb.PodFit(pod=pod, lines=[worker_pb2.FitLine(**msgspec.structs.asdict(line)) for line in verdict.lines])
            for pod, verdict in enumerate(verdicts)
        ],
    )
