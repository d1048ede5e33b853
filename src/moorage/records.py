"""What etcd holds: the keys and the records under them. Coordinator, worker and guard meet only here and in the API.

Every key stands under ``/moorage/<cluster>/v1/``. Values are JSON of the structs below; unknown fields are ignored
(a newer release may add some), so a field may be added but never change its meaning.

Invariants that every writer keeps by comparing in the same transaction:

* ``jobs/<job>/state`` is written only by the coordinator that holds ``leader`` (compare the leader key's create
  revision) and only over the revision that it read.
* ``jobs/<job>/incarnation`` only grows. A pod whose incarnation is below it must be dead or frozen.
* ``attempts/<job>/<n>/outcome`` is created once and never changed or removed before the attempt's other keys.
* ``checkpoints/<id>`` is created in the transaction that makes it ``latest``.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Keys:
    """Key names of one cluster. ``cluster`` is ``[a-z0-9-]{1,32}``."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.root = f"/moorage/{cluster}/v1/"

    @property
    def leader(self) -> str:
        return self.root + "leader/"

    @property
    def nodes(self) -> str:
        return self.root + "nodes/"

    def node(self, node: str) -> str:
        """The node's registration, under the worker's lease: it is gone when the worker's session is."""
        return f"{self.nodes}{node}"

    @property
    def names(self) -> str:
        return self.root + "names/"

    def name(self, name: str) -> str:
        """Value: the job id that holds this name."""
        return f"{self.names}{name}"

    @property
    def jobs(self) -> str:
        return self.root + "jobs/"

    def job(self, job: str) -> str:
        return f"{self.jobs}{job}/"

    def spec(self, job: str) -> str:
        return self.job(job) + "spec"

    def state(self, job: str) -> str:
        return self.job(job) + "state"

    def incarnation(self, job: str) -> str:
        return self.job(job) + "incarnation"

    def events(self, job: str) -> str:
        return self.job(job) + "events/"

    @property
    def all_attempts(self) -> str:
        """Apart from ``jobs/``: this is where workers write, and etcd's permissions are by prefix."""
        return self.root + "attempts/"

    def attempts(self, job: str) -> str:
        return f"{self.all_attempts}{job}/"

    def attempt(self, job: str, attempt: int) -> str:
        return f"{self.attempts(job)}{attempt:08d}/"

    def start(self, job: str, attempt: int) -> str:
        return self.attempt(job, attempt) + "start"

    def vote(self, job: str, attempt: int, step: str, pod: int) -> str:
        """``step`` is ``captured`` or ``persisted``."""
        return f"{self.attempt(job, attempt)}votes/{step}/{pod:05d}"

    def outcome(self, job: str, attempt: int) -> str:
        return self.attempt(job, attempt) + "outcome"

    def checkpoints(self, job: str) -> str:
        return self.job(job) + "checkpoints/"

    def checkpoint(self, job: str, checkpoint: str) -> str:
        return self.checkpoints(job) + checkpoint

    def latest(self, job: str) -> str:
        """Value: id of the newest committed checkpoint."""
        return self.job(job) + "latest"

    @property
    def store_generation(self) -> str:
        """Decimal number; prune raises it. A commit compares it with what it read before it wrote chunks."""
        return self.root + "store/generation"

    @property
    def store_leases(self) -> str:
        return self.root + "store/leases/"

    @property
    def cordons(self) -> str:
        return self.root + "cordons/"

    def cordon(self, node: str) -> str:
        """There as long as no pod may be placed on the node; it outlives the node's registration."""
        return f"{self.cordons}{node}"

    @property
    def drains(self) -> str:
        return self.root + "drains/"

    def drain(self, drain: str) -> str:
        """The order; what it does to each job stands below it."""
        return f"{self.drains}{drain}/order"

    def drain_move(self, drain: str, job: str) -> str:
        return f"{self.drains}{drain}/moves/{job}"

    @property
    def audit(self) -> str:
        """Who asked for what: ``audit/<day>/<time>``, an `Event` each."""
        return self.root + "audit/"

    @property
    def crl(self) -> str:
        """The authority's revocation list (PEM), which every server lays beside its certificates."""
        return self.root + "trust/crl"

    def joined(self, serial: str) -> str:
        """Which node a join token was used for: value `JoinRecord`. Its lease outlives the token."""
        return f"{self.root}joins/{serial}"

    def counter(self, name: str) -> str:
        """Cluster-wide decimal counters: ``vni`` (per incarnation) and ``slot`` (addresses of pods on ext0)."""
        return f"{self.root}counters/{name}"


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has a live worker. Lives under the worker's lease."""

    node: str
    address: str  # of the host: where VXLAN packets go and the worker listens
    endpoint: str  # host:port of the worker's gRPC server
    session: str  # random for each start of the worker
    pid: int
    version: str
    lease_seconds: int
    cpus: int
    memory_bytes: int
    gpus: list[str] = []
    kernel: str = ""
    labels: dict[str, str] = {}
    ready: bool = True  # false: doctor found something that no pod can run without
    # True: this worker never revokes its lease while a pod lives, so a registration that is gone means that the lease,
    # and with it every guard's deadline, has run out. False: after it is gone the coordinator waits the lease's time.
    lease_kept: bool = False
    driver: str = ""  # of the GPUs
    slots: int = 0  # most pods; 0: no limit
    fingerprint: dict[str, Any] = {}  # moorage.compat.NodeFingerprint
    store: str = ""  # the nonce of the store that this worker opened; empty: an earlier release, which does not say


class CordonRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing is placed on ``node`` until somebody takes this away."""

    node: str
    reason: str = ""
    by: str = ""
    time: float = 0.0
    drain: str = ""  # the drain that it was made for


class JoinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a join token was used for. Asked again with the same key, the answer is the same."""

    node: str
    public_key: str = ""  # SHA-256 of the PEM; empty: the token was made for this node, and not used yet
    certificate: str = ""


class IncarnationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fencing token: which running instance of the job is the true one. Guards read it."""

    incarnation: int
    placement: list[str]  # node of pod 0, 1, …; empty: no pod may run
    vni: int = 0
    trace: str = ""


StopReason = Literal["resume", "stop"]
OutcomeKind = Literal["resume", "stop", "abort"]


class AttemptStart(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a checkpoint. ``kind`` says what follows a success: run on, or remove the pods."""

    attempt: int
    incarnation: int
    pods: int
    kind: StopReason
    deadline_seconds: float  # counted by each worker from the moment it learnt of the attempt
    trace: str = ""
    store_generation: int = 0


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's vote for one step. For ``persisted``, ``manifest`` names the pod manifest in the store."""

    pod: int
    incarnation: int
    attempt: int
    ok: bool = True
    reason: str = ""
    finished: bool = False  # all ranks of the pod had exited with 0
    manifest: str = ""
    bytes_total: int = 0
    bytes_new: int = 0
    pause_seconds: float = 0.0  # `persisted`: how long the pod stood still, from before its freeze to after its thaw


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an attempt, once and for all. ``by`` is ``coordinator`` or the node that aborted it."""

    kind: OutcomeKind
    incarnation: int
    attempt: int
    reason: str = ""
    by: str = ""


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A committed checkpoint. ``manifest`` is the digest-named global manifest in the store."""

    checkpoint: str
    job: str
    owner: str
    attempt: int
    incarnation: int
    manifest: str
    created: float  # seconds since the epoch
    bytes_total: int
    bytes_new: int
    pause_seconds: float
    pinned: bool = False
    trace: str = ""
    # Only until all of it is in the store, where it counted before that (durability local): names of the pods'
    # manifests, and the node that has each. The global manifest is written when every pod has been uploaded.
    pods: list[str] = []
    nodes: list[str] = []
    spec: bytes = b""
    started: float = 0.0  # of the attempt; the global manifest has it


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One plain sentence about a job, with what a program needs to filter it."""

    time: float
    kind: str  # e.g. "checkpoint.committed"
    sentence: str
    job: str
    owner: str
    trace: str = ""
    incarnation: int = 0
    attempt: int = 0
    node: str = ""
    data: dict[str, str | int | float | bool] = {}
