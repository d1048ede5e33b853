"""What happens to a job, as plain data. ``time`` is in seconds since the epoch."""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine.instructions import Alarm, Collect, Finish, Kill, Order, Place, WriteManifest
from moorage.coordinator.machine.state import Finding, Seat
from moorage.records import Outcome


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Anything that the machine handles."""

    time: float


class Asked(Event, frozen=True, kw_only=True):
    """A user's request. The same ``request`` again changes nothing."""

    request: str = ""
    trace: str = ""


class CheckpointAsked(Asked, frozen=True, kw_only=True):
    """Take a checkpoint; the job runs on."""


class ParkAsked(Asked, frozen=True, kw_only=True):
    """Take a checkpoint and remove the pods. ``keep``: where their device memory stays beside it; empty: nowhere."""

    keep: str = ""


class MoveAsked(Asked, frozen=True, kw_only=True):
    """Take a checkpoint and restore it on ``nodes``; ``exact``: pod i on ``nodes[i]`` if that can be, else anywhere."""

    nodes: tuple[str, ...]
    exact: bool = False


class StopAsked(Asked, frozen=True, kw_only=True):
    """End the job, with a checkpoint first if ``checkpoint``."""

    checkpoint: bool = False
    grace_seconds: float = 0.0


class RestoreAsked(Asked, frozen=True, kw_only=True):
    """Go on from ``checkpoint`` (empty: the newest) on ``nodes`` (empty: anywhere).

    ``cold_start``: whether to begin from nothing where the checkpoint does not fit; None: as the job's policy says.
    """

    checkpoint: str = ""
    nodes: tuple[str, ...] = ()
    cold_start: bool | None = None


class NodeLost(Event, frozen=True, kw_only=True):
    """The registration of ``node`` is gone."""

    node: str


class PodExited(Event, frozen=True, kw_only=True):
    """All ranks of a pod have exited; ``code`` is 0 or that of the first that failed, ``detail`` names it."""

    pod: int
    incarnation: int
    code: int
    detail: str = ""


class PodFailed(Event, frozen=True, kw_only=True):
    """A pod is gone or broken, though nobody asked for it."""

    pod: int
    incarnation: int
    reason: str


class Hung(Event, frozen=True, kw_only=True):
    """No output and no CPU time for too long."""

    incarnation: int
    reason: str


class Answer(Event, frozen=True, kw_only=True):
    """The result of an order. It is ignored when the state does not ask for that order any more."""


class Done(Answer, frozen=True, kw_only=True):
    """``of`` was carried out on all pods."""

    of: Order


class Failed(Answer, frozen=True, kw_only=True):
    """``of`` failed on ``pod`` at ``node`` (-1 and empty: not on one pod). ``error_kind`` is a class of errors.py."""

    of: Order
    message: str
    hint: str = ""
    error_kind: str = ""
    pod: int = -1
    node: str = ""
    refusals: tuple[Finding, ...] = ()
    fallback: str = ""  # an earlier checkpoint that can be had, where this one cannot


class Placed(Answer, frozen=True, kw_only=True):
    """A seat for each pod; ``vni`` is new, ``slot`` is only used the first time."""

    of: Place
    seats: tuple[Seat, ...]
    vni: int
    slot: int


class Unplaceable(Answer, frozen=True, kw_only=True):
    """There is no placement now; ``reason`` is a sentence. ``error_kind`` Incompatible: because of what nodes have."""

    of: Place
    reason: str
    error_kind: str = ""
    hint: str = ""


class Persisted(Answer, frozen=True, kw_only=True):
    """Every pod's manifest is in the store. ``pause_seconds``: the longest of all pods."""

    of: Collect
    bytes_total: int
    bytes_new: int
    pause_seconds: float


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be known of a checkpoint that counts before it is in the store; see `CheckpointRecord`."""

    pods: tuple[str, ...]
    nodes: tuple[str, ...]
    spec: bytes
    started: float


class Written(Answer, frozen=True, kw_only=True):
    """The global manifest is in the store; ``generation`` is what the attempt's start says.

    ``waiting``: it is not there yet, and the checkpoint counts all the same (durability local).
    """

    of: WriteManifest
    manifest: str
    generation: int
    waiting: Waiting | None = None


class Closed(Answer, frozen=True, kw_only=True):
    """Every pod was killed or finished, but those whose node is gone (``unreached``)."""

    of: Kill | Finish
    unreached: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class AlarmRang(Answer, frozen=True, kw_only=True):
    """It is time."""

    of: Alarm


class OutcomeStands(Event, frozen=True, kw_only=True):
    """The attempt's outcome exists, written by somebody else."""

    outcome: Outcome
