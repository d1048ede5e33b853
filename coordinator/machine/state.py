"""What the coordinator knows about a job, as plain data: the value of ``jobs/<job>/state`` in etcd.

All of it is needed to go on after a restart, and nothing else is: what changes all the time (CPU time, output) stays
in memory. Times are seconds since the epoch unless the name ends in ``_seconds``.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from moorage.errors import NewerVersion
from moorage.records import StopReason

STATE_VERSION: Final = 1
#: How many request ids, and how many ended attempts, a job remembers.
REMEMBERED_REQUESTS: Final = 32
REMEMBERED_ATTEMPTS: Final = 16

Phase = Literal[
    "pending",  # waits for nodes
    "starting",  # pods are started from nothing
    "running",
    "checkpointing",  # a checkpoint after which the job runs on, until its outcome is decided
    "parking",  # a checkpoint after which the pods are removed, and their removal
    "parked",
    "restoring",
    "finishing",  # the pods have ended; logs and results are collected
    "finished",
    "failed",
    "stopping",
    "stopped",
]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
OVER: Final[frozenset[Phase]] = frozenset({"finished", "failed", "stopped"})
#: Phases in which nothing happens until somebody asks for it.
RESTING: Final[frozenset[Phase]] = OVER | {"parked"}

AttemptStep = Literal[
    "preparing",
    "freezing",
    "sealing",
    "capturing",
    "persisting",
    "committing",
    "settling",  # aborted; waits until every pod runs again
    "committed",
    "aborted",
]
Purpose = Literal["checkpoint", "park", "move", "stop"]
BringUpStep = Literal["placing", "fencing", "loading", "releasing"]
Cause = Literal["submit", "user", "move", "failure"]
EndingStep = Literal["killing", "closing", "fencing"]
Verdict = Literal["finished", "failed", "stopped"]
FailureKind = Literal["rank", "hang", "pod", "node"]


class Seat(msgspec.Struct, frozen=True, array_like=True):
    """Where one pod runs, and what bounds the life of its processes should that node be lost."""

    node: str
    lease_seconds: float = 10.0
    lease_kept: bool = False


class Target(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A pod of an older incarnation that may still have processes on ``node``."""

    pod: int
    node: str
    lease_seconds: float = 10.0
    lease_kept: bool = False


class Finding(msgspec.Struct, frozen=True):
    """One thing that cannot be saved: `moorage.v1.Refusal` as plain data."""

    what: str
    why: str
    cure: str = ""


class AttemptState(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a checkpoint. ``deadline``: when it is given up in its present step."""

    number: int
    incarnation: int
    kind: StopReason
    purpose: Purpose
    step: AttemptStep = "preparing"
    started: float = 0.0
    ended: float = 0.0
    deadline: float = 0.0
    automatic: bool = False
    nodes: tuple[str, ...] = ()  # purpose move: where to
    exact: bool = False  # nodes: one for each pod, as long as that can be; else anywhere
    keep: str = ""  # purpose park: where the nodes keep the device memory; empty: nowhere
    checkpoint: str = ""
    reason: str = ""
    error_kind: str = ""
    hint: str = ""
    refusals: tuple[Finding, ...] = ()
    pause_seconds: float = 0.0
    bytes_total: int = 0
    bytes_new: int = 0
    trace: str = ""

    @property
    def undecided(self) -> bool:
        """Whether its outcome does not exist yet: pods may be frozen and wait for it."""
        if self.step in ("preparing", "freezing", "sealing", "capturing"):
            return True
        return self.kind == "stop" and self.step in ("persisting", "committing")


class Queued(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that was asked for while another one runs; it gets the next number."""

    purpose: Purpose
    nodes: tuple[str, ...] = ()
    exact: bool = False
    keep: str = ""
    trace: str = ""


class BringUp(msgspec.Struct, frozen=True, kw_only=True):
    """The way from nothing (``checkpoint`` empty) or from a checkpoint to running pods."""

    step: BringUpStep = "placing"
    cause: Cause
    checkpoint: str = ""
    ordered: float = 0.0
    on: tuple[str, ...] = ()
    exact: bool = False  # on: one node for each pod, as long as that can be; else anywhere
    exclude: tuple[str, ...] = ()  # nodes that have failed to bring up a pod
    waiting_since: float = 0.0  # since when there is no node to place a pod on
    trouble: str = ""  # the last failure
    error_kind: str = ""  # its class in moorage.errors
    hint: str = ""  # the way out of it
    misfits: bool = False  # all failures so far: the checkpoint does not fit the node
    cold_start: bool | None = None  # what is to follow then; None: what the policy says
    trace: str = ""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The way to an end. ``unreached`` are pods whose node could not be asked."""

    verdict: Verdict
    step: EndingStep
    reason: str = ""
    exit_code: int | None = None
    grace_seconds: float = 0.0
    unreached: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be collected


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that waits until the attempt that is being stored has ended."""

    kind: FailureKind
    why: str
    exit_code: int | None = None
    node: str = ""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request that was carried out, so that its repetition is not."""

    id: str
    verb: str
    attempt: int = 0


class JobPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The submitted policy with its defaults filled in. ``max_restarts`` 0: no limit on their number."""

    checkpoint_every_seconds: float = 0.0
    keep_last: int = 3
    on_failure: Literal["restore", "fail"] = "restore"
    max_restarts: int = 0
    cold_start: bool = False
    attempt_deadline_seconds: float = 120.0
    hang_seconds: float = 0.0
    elastic: bool = False  # with no checkpoint that helps, a restart begins from nothing
    durability: Literal["local", "remote"] = "remote"
    keeper: str = ""  # who brings the job back where ``on_failure`` is fail; empty: nobody


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `moorage.coordinator.machine.validate` holds its invariants."""

    version: int = STATE_VERSION
    serial: int = 0  # grows with every write, so that no two written values are equal
    job: str
    name: str
    owner: str
    trace: str = ""
    pods: int
    policy: JobPolicy = JobPolicy()
    phase: Phase = "pending"
    reason: str = ""
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    incarnation: int = 0
    seats: tuple[Seat, ...] = ()  # of this incarnation; empty: no pod may run
    vni: int = 0
    slot: int = 0
    origin: str = ""  # the checkpoint that this incarnation was restored from; empty: started from nothing
    exits: dict[int, int] = {}  # pod: exit code, in this incarnation
    broken: dict[int, str] = {}  # pod: why it is gone, although it had been brought up while others still are
    fencing: tuple[Target, ...] = ()  # nothing of this incarnation is ordered before these are gone
    bringup: BringUp | None = None
    attempt: AttemptState | None = None
    queued: Queued | None = None
    ending: Ending | None = None
    trouble: Trouble | None = None
    why_parked: str = ""
    error_kind: str = (
        ""  # the class in moorage.errors of what the last bring-up was given up for; empty when it was not
    )
    hint: str = ""  # the way out of that
    attempts: int = 0  # number of the newest
    past: tuple[AttemptState, ...] = ()
    latest: str = ""  # newest committed checkpoint
    base: str = ""  # the checkpoint that the present incarnation descends from: what a failure goes back to
    next_checkpoint: float = 0.0  # heartbeat; 0: none is due
    failed_attempts: int = 0  # in a row
    restarts: int = 0  # since it was last started or restored because somebody asked
    restarts_before: int = 0  # until then; a failed job that was brought back on request counts too
    failures_in_row: int = 0  # of the job itself, with no new checkpoint between them
    exit_code: int | None = None
    last_restore_seconds: float = 0.0
    requests: tuple[Request, ...] = ()
    said: int = 0  # number of events so far

    @property
    def over(self) -> bool:
        return self.phase in OVER

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its pods, each once, in order."""
        return tuple(dict.fromkeys(seat.node for seat in self.seats))

    def find_attempt(self, number: int) -> AttemptState | None:
        """The attempt of that number if it is remembered."""
        known = (*self.past, *((self.attempt,) if self.attempt else ()))
        return next((a for a in known if a.number == number), None)


def checkpoint_id(job: str, attempt: int) -> str:
    """The name of the checkpoint that attempt ``attempt`` of ``job`` commits."""
    return f"{job}-{attempt:04d}"


def job_of(checkpoint: str) -> str:
    """The job that a checkpoint's id names; empty if it cannot be one."""
    job, _, number = checkpoint.rpartition("-")
    return job if number.isdecimal() else ""


def encode(state: JobState) -> bytes:
    """The value for etcd."""
    return msgspec.json.encode(state)


def decode(data: bytes) -> JobState:
    """The reverse of `encode`. Raises `NewerVersion`, and `msgspec.ValidationError` for anything else."""

    class _Version(msgspec.Struct):
        version: int
        job: str = ""

    head = msgspec.json.decode(data, type=_Version)
    if head.version > STATE_VERSION:
        raise NewerVersion(
            f"the state of job {head.job} has version {head.version}, this coordinator knows {STATE_VERSION}",
            "install the newer moorage on every coordinator",
        )
    return msgspec.json.decode(data, type=JobState)
