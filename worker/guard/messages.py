"""What guard and worker say to each other over the pod's unix socket, and the guard's configuration.

The wire carries length-prefixed msgpack: four bytes (big endian), then one `Call`, `Answer` or `GuardEvent`. Calls on
one connection are answered in any order, matched by id. After a `Subscribe` the guard sends events on that connection.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moorage.errors import WireError
from moorage.tls import TlsFiles

CONFIG_FILE = "guard.json"
SOCKET_FILE = "guard.sock"
LOCK_FILE = "guard.lock"
LOG_FILE = "guard.log"
STATE_FILE = "guard.state"
JOURNAL_FILE = "journal"

#: What the pod is: no container yet; its processes may run; frozen; no process left.
PodPhase = Literal["empty", "running", "frozen", "exited"]
#: What the worker's orders want it to be. A fenced pod is frozen whatever this says.
Desired = Literal["run", "freeze"]


class EtcdAccess(msgspec.Struct, frozen=True, kw_only=True):
    """How the guard reaches etcd when its deadline has passed."""

    endpoints: list[str]
    tls: TlsFiles | None = None
    user: str = ""
    password_file: str = ""


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``guard.json`` in the pod's folder (0600)."""

    cluster: str
    node: str
    job: str
    pod: int
    incarnation: int
    container: str  # runc's name for it
    runc_root: str  # runc's --root: a folder of the node's state, one for all its pods
    bundle: str  # folder with config.json
    cgroup: str  # cgroupsPath of config.json: absolute, relative to each hierarchy's mount
    runc: str  # paths of the programs; the worker has found them already
    criu: str
    etcd: EtcdAccess
    cut_links: list[str] = []  # host interfaces that carry the pod's traffic; down while it is fenced
    deadline: float = 0.0  # first deadline (CLOCK_BOOTTIME seconds); 0: fenced until one is given
    journal_bytes: int = 64 << 20
    kill_seconds: float = 30.0  # how long the death of a pod's processes may take before it is reported as an error


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the pod's init reported it."""

    rank: int
    pid: int  # inside the pod
    exited: bool = False
    exit_code: int = 0  # 128 + signal when killed by one


class GuardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The pod as its guard sees it."""

    job: str
    pod: int
    incarnation: int
    guard_pid: int
    phase: PodPhase
    desired: Desired
    reason: str = ""  # why it was frozen, thawed or killed last
    fenced: bool = False  # the deadline has passed and the incarnation is not confirmed yet
    cut: bool = False
    busy: str = ""  # the operation under way
    init_pid: int = 0  # of the container's pid 1, on the host; 0: none
    ranks: list[RankState] = []
    exit_code: int | None = None  # when phase is "exited"
    killed: bool = False  # the guard or the worker ended it
    deadline: float = 0.0
    journal_start: int = 0  # offsets in the journal
    journal_end: int = 0
    sequence: int = 0  # of the last frame that the pod's init wrote
    lost_frames: int = 0
    output_bytes: int = 0  # of all ranks, since the pod's first start
    cpu_seconds: float = 0.0


EventKind = Literal["status", "started", "exited", "output", "frozen", "thawed", "fenced", "unfenced", "ended"]


class GuardEvent(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """A change, with the whole status after it. ``rank`` is -1 when the event is not about one rank."""

    kind: EventKind
    status: GuardStatus
    rank: int = -1


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Run the bundle."""


class Restore(msgspec.Struct, frozen=True, tag="restore"):
    """Restore the bundle from CRIU images; the pod stays frozen."""

    images: str
    work: str


class Freeze(msgspec.Struct, frozen=True, tag="freeze"):
    """Freeze the pod's cgroup; answered when every process of it stands."""

    reason: str


class Thaw(msgspec.Struct, frozen=True, tag="thaw"):
    """Let it run on (as soon as it is not fenced)."""

    reason: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Read the frozen pod's pipe until it is empty."""


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Dump the pod with CRIU."""

    images: str
    work: str
    leave_running: bool = True


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the pod: SIGTERM and ``grace`` seconds, then SIGKILL. Answered when no process is left."""

    grace: float
    reason: str


class Deadline(msgspec.Struct, frozen=True, tag="deadline"):
    """The worker's lease holds until then (CLOCK_BOOTTIME seconds)."""

    deadline: float


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Only the status."""


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """Send events on this connection from now on; the first one is the status."""


class Exit(msgspec.Struct, frozen=True, tag="exit"):
    """End the guard. Refused while the pod has a process."""


Request = Start | Restore | Freeze | Thaw | Drain | Checkpoint | Kill | Deadline | Status | Subscribe | Exit


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """A request under an id of the caller's choice."""

    id: int
    request: Request


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The answer to the call of that id: an error, or the status after it."""

    id: int
    status: GuardStatus | None = None
    error: WireError | None = None
    timings: dict[str, float] = {}  # seconds by step
    image_bytes: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation of `GuardClient` returns."""

    status: GuardStatus
    timings: dict[str, float]
    image_bytes: int = 0
