"""What the API returns: plain frozen structs, so that no caller has to know protobuf.

Times are seconds since the epoch, durations seconds, sizes bytes. `moorage ... --output json` prints these structs.
"""

from __future__ import annotations

import msgspec

from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2, worker_pb2


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. ``pid`` is inside the pod; ``exit_code`` is None while it runs, 128 + signal when killed by one."""

    rank: int
    pid: int
    exit_code: int | None

    @classmethod
    def of(cls, message: types_pb2.RankStatus) -> RankInfo:
        return cls(rank=message.rank, pid=message.pid, exit_code=message.exit_code if message.exited else None)


class PodInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One pod as its node last reported it."""

    pod: int
    node: str
    phase: str
    incarnation: int
    reason: str
    ranks: list[RankInfo]
    cpu_seconds: float
    output_bytes: int

    @classmethod
    def of(cls, message: types_pb2.PodStatus) -> PodInfo:
        return cls(
            pod=message.pod,
            node=message.node,
            phase=message.phase,
            incarnation=message.incarnation,
            reason=message.reason,
            ranks=[RankInfo.of(rank) for rank in message.ranks],
            cpu_seconds=message.cpu_seconds,
            output_bytes=message.output_bytes,
        )


class JobInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A job as it stood at one moment. ``over``: finished, failed or stopped.

    ``error_kind`` (a class of `moorage.errors`) and ``hint`` (the way out) tell why the job could not be started or
    brought back; they are empty when it could.
    """

    id: str
    name: str
    owner: str
    phase: str
    reason: str
    over: bool
    exit_code: int | None
    incarnation: int
    restarts: int
    attempt: int
    latest_checkpoint: str
    created: float
    started: float
    ended: float
    last_restore_seconds: float
    command: list[str]
    working_directory: str
    ranks: int
    pods: list[PodInfo]
    trace: str
    error_kind: str = ""
    hint: str = ""

    @classmethod
    def of(cls, message: pb.Job) -> JobInfo:
        return cls(
            id=message.id,
            name=message.spec.name,
            owner=message.spec.owner,
            phase=message.phase,
            reason=message.reason,
            over=message.over,
            exit_code=message.exit_code if message.has_exit_code else None,
            incarnation=message.incarnation,
            restarts=message.restarts,
            attempt=message.attempt,
            latest_checkpoint=message.latest_checkpoint,
            created=message.created,
            started=message.started,
            ended=message.ended,
            last_restore_seconds=message.last_restore_seconds,
            command=list(message.spec.command),
            working_directory=message.spec.working_directory,
            ranks=max(1, message.spec.pods) * max(1, message.spec.ranks_per_pod),
            pods=[PodInfo.of(pod) for pod in message.pods],
            trace=message.trace,
            error_kind=message.error_kind,
            hint=message.hint,
        )


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint. ``bytes_new`` is what it added to the store."""

    id: str
    job: str
    job_name: str
    owner: str
    created: float
    attempt: int
    incarnation: int
    bytes_total: int
    bytes_new: int
    pause_seconds: float
    pinned: bool
    latest: bool
    pods_uploaded: int = 0  # of one that counted before it was in the store: pods that are there by now
    pods_waiting: int = 0  # and that are not

    @classmethod
    def of(cls, message: pb.CheckpointInfo) -> CheckpointInfo:
        return cls(
            id=message.id,
            job=message.job,
            job_name=message.job_name,
            owner=message.owner,
            created=message.created,
            attempt=message.attempt,
            incarnation=message.incarnation,
            bytes_total=message.bytes_total,
            bytes_new=message.bytes_new,
            pause_seconds=message.pause_seconds,
            pinned=message.pinned,
            latest=message.latest,
            pods_uploaded=message.pods_uploaded,
            pods_waiting=message.pods_waiting,
        )


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a checkpoint. ``refusals`` are sentences: what cannot be saved, why, and the way out."""

    job: str
    attempt: int
    phase: str
    kind: str
    reason: str
    checkpoint: str
    started: float
    pause_seconds: float
    bytes_total: int
    bytes_new: int
    pods: int
    pods_captured: int
    pods_persisted: int
    refusals: list[str]
    error_kind: str
    hint: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to this attempt."""
        return self.phase in {"committed", "aborted", "failed"}

    @classmethod
    def of(cls, message: pb.Attempt) -> AttemptInfo:
        return cls(
            job=message.job,
            attempt=message.attempt,
            phase=message.phase,
            kind=message.kind,
            reason=message.reason,
            checkpoint=message.checkpoint,
            started=message.started,
            pause_seconds=message.pause_seconds,
            bytes_total=message.bytes_total,
            bytes_new=message.bytes_new,
            pods=message.pods,
            pods_captured=message.pods_captured,
            pods_persisted=message.pods_persisted,
            refusals=[": ".join(part for part in (r.what, r.why, r.cure) if part) for r in message.refusals],
            error_kind=message.error_kind,
            hint=_ways_out(message),
        )


def _ways_out(message: pb.Attempt) -> str:
    """One line: the way out of what stood in the way; where that was several things, all of them."""
    if len(message.refusals) > 1:
        return "; ".join(f"{refusal.what}: {refusal.cure or refusal.why}" for refusal in message.refusals)
    return message.hint or "; ".join(refusal.cure for refusal in message.refusals)


class NodeInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A node. ``live``: its worker holds its lease; ``ready``: it lacks nothing that a pod needs.

    ``cordoned``: nothing new is placed on it. ``slots``: the most pods that it takes; 0: no limit.
    """

    node: str
    address: str
    live: bool
    ready: bool
    cpus: int
    memory_bytes: int
    gpus: list[str]
    version: str
    pods: int
    jobs: list[str]
    labels: dict[str, str]
    cordoned: bool = False
    cordon_reason: str = ""
    driver: str = ""
    slots: int = 0
    fingerprint: msgspec.Raw = msgspec.Raw(b"{}")  # moorage.compat.NodeFingerprint as JSON

    @classmethod
    def of(cls, message: pb.Node) -> NodeInfo:
        return cls(
            node=message.node,
            address=message.address,
            live=message.live,
            ready=message.ready,
            cpus=message.cpus,
            memory_bytes=message.memory_bytes,
            gpus=list(message.gpus),
            version=message.version,
            pods=message.pods,
            jobs=list(message.jobs),
            labels=dict(message.labels),
            cordoned=message.cordoned,
            cordon_reason=message.cordon_reason,
            driver=message.driver,
            slots=message.slots,
            fingerprint=msgspec.Raw((message.fingerprint_json or "{}").encode()),
        )


class EventInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about a job, with what a program needs to filter it. ``data`` is JSON text."""

    time: float
    kind: str
    sentence: str
    job: str
    owner: str
    trace: str
    incarnation: int
    attempt: int
    node: str
    data: msgspec.Raw

    @classmethod
    def of(cls, message: pb.JobEvent) -> EventInfo:
        return cls(
            time=message.time,
            kind=message.kind,
            sentence=message.sentence,
            job=message.job,
            owner=message.owner,
            trace=message.trace,
            incarnation=message.incarnation,
            attempt=message.attempt,
            node=message.node,
            data=msgspec.Raw((message.data_json or "{}").encode()),
        )


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a rank's output, as the rank wrote it (not always a whole line).

    ``truncated``: output before it is not kept any more; ``data`` may be empty then.
    """

    rank: int
    pod: int
    stderr: bool
    time: float
    data: bytes
    truncated: bool = False

    @classmethod
    def of(cls, message: worker_pb2.LogChunk) -> LogLine:
        return cls(
            rank=message.rank,
            pod=message.pod,
            stderr=message.is_stderr,
            time=message.time,
            data=message.data,
            truncated=message.truncated,
        )


class InspectPart(msgspec.Struct, frozen=True, kw_only=True):
    """How much of one kind a pod's part of a checkpoint holds; ``stored_bytes`` after deduplication and packing."""

    pod: int
    kind: str
    bytes: int
    stored_bytes: int
    items: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What is inside a checkpoint, by pod and kind."""

    checkpoint: CheckpointInfo
    parts: list[InspectPart]
    ranks: list[RankInfo]

    @classmethod
    def of(cls, message: pb.InspectReply) -> Inspection:
        return cls(
            checkpoint=CheckpointInfo.of(message.checkpoint),
            parts=[
                InspectPart(pod=p.pod, kind=p.kind, bytes=p.bytes, stored_bytes=p.stored_bytes, items=p.items)
                for p in message.parts
            ],
            ranks=[RankInfo.of(rank) for rank in message.ranks],
        )


class CheckInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How far a check of a checkpoint is; when ``done``, ``errors`` holds all that is wrong."""

    bytes_done: int
    bytes_total: int
    chunks: int
    errors: list[str]
    done: bool

    @classmethod
    def of(cls, message: pb.CheckProgress) -> CheckInfo:
        return cls(
            bytes_done=message.bytes_done,
            bytes_total=message.bytes_total,
            chunks=message.chunks,
            errors=list(message.errors),
            done=message.done,
        )


class PruneInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a prune removed, or would remove; ``kept`` are the checkpoints whose data stays."""

    kept: list[str]
    packs: int
    bytes: int
    dry_run: bool

    @classmethod
    def of(cls, message: pb.PruneReply) -> PruneInfo:
        return cls(
            kept=list(message.checkpoints),
            packs=message.packs,
            bytes=message.bytes,
            dry_run=message.dry_run,
        )


class FindingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a node's doctor: ``state`` is ok, warning or missing."""

    name: str
    state: str
    detail: str
    cure: str

    @classmethod
    def of(cls, message: worker_pb2.Finding) -> FindingInfo:
        return cls(name=message.name, state=message.state, detail=message.detail, cure=message.cure)


class StatusInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads the cluster and where its store is."""

    cluster: str
    leader: str
    version: str
    store: str
    leading: bool

    @classmethod
    def of(cls, message: pb.StatusReply) -> StatusInfo:
        return cls(
            cluster=message.cluster,
            leader=message.leader,
            version=message.version,
            store=message.store,
            leading=message.leading,
        )


class CompatLine(msgspec.Struct, frozen=True, kw_only=True):
    """How a node stands to one rule. ``state``: ok, differs, unused or not compared; ``pods``: those it is told of."""

    rule: str
    state: str
    wanted: str
    found: str
    message: str
    pods: list[int]


class CompatInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a checkpoint and a node. Pods to which the same applies share a line."""

    checkpoint: str
    node: str
    fits: bool
    lines: list[CompatLine]

    @property
    def misfits(self) -> list[CompatLine]:
        """The lines that forbid a restore there."""
        return [line for line in self.lines if line.state == "differs"]

    @classmethod
    def of(cls, message: pb.CompatReply) -> CompatInfo:
        pods: dict[tuple[str, str, str, str, str], list[int]] = {}
        for pod in message.pods:
            for line in pod.lines:
                key = (line.rule, line.state, line.wanted, line.found, line.message)
                pods.setdefault(key, []).append(pod.pod)
        lines = [
            CompatLine(rule=rule, state=state, wanted=wanted, found=found, message=text, pods=numbers)
            for (rule, state, wanted, found, text), numbers in pods.items()
        ]
        return cls(checkpoint=message.checkpoint, node=message.node, fits=message.fits, lines=lines)


class JobFindingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in a running job that cannot be saved, why, and the way out."""

    pod: int
    node: str
    what: str
    why: str
    cure: str

    @classmethod
    def of(cls, message: pb.JobFinding) -> JobFindingInfo:
        refusal = message.refusal
        return cls(pod=message.pod, node=message.node, what=refusal.what, why=refusal.why, cure=refusal.cure)
