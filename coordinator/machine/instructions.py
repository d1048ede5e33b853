"""What the job state machine asks for.

A `Record` is written in the same etcd transaction as the state that it comes with. An `Order` is carried out after that
transaction; its results come back as events. Orders follow from the state alone (`pending`), so a new coordinator gives
all of them again: whatever they do is idempotent, and two equal orders are the same order.
"""

from __future__ import annotations

import msgspec

from moorage.coordinator.machine.state import Target
from moorage.records import AttemptStart, CheckpointRecord, IncarnationRecord, Outcome


class Record(msgspec.Struct, frozen=True):
    """Something to write together with the state."""


class Say(Record, frozen=True, kw_only=True):
    """One sentence of the job's story. ``minor`` ones are logged and not kept. A transition names start and finish."""

    kind: str
    sentence: str
    minor: bool = False
    start: str = ""
    finish: str = ""
    incarnation: int = 0
    attempt: int = 0
    node: str = ""
    data: dict[str, str | int | float | bool] = {}


class CreateStart(Record, frozen=True):
    """Create an attempt's ``start``; the writer fills in the store's generation."""

    start: AttemptStart


class Conclude(Record, frozen=True):
    """Create an attempt's ``outcome``."""

    outcome: Outcome


class Raise(Record, frozen=True):
    """Write the fencing token."""

    record: IncarnationRecord


class Commit(Record, frozen=True):
    """Create the checkpoint and make it the latest, if the store's generation is still ``generation``."""

    checkpoint: CheckpointRecord
    generation: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Something to do once the state is written."""

    incarnation: int


class Place(Order, frozen=True, kw_only=True):
    """Choose a node for each pod of the next incarnation. Answers: `Placed`; `Unplaceable`, and it goes on trying."""

    on: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    exact: bool = False


class Fence(Order, frozen=True, kw_only=True):
    """Make sure that no pod of an incarnation up to ``bound`` runs at ``targets``. Answer: `Done`."""

    bound: int
    targets: tuple[Target, ...]


class Load(Order, frozen=True, kw_only=True):
    """Start (``checkpoint`` empty) or restore every pod. Answers: `Done`, `Failed`."""

    checkpoint: str = ""


class Release(Order, frozen=True, kw_only=True):
    """Unseal and thaw every restored pod. Answers: `Done`, `Failed`."""


class AttemptOrder(Order, frozen=True, kw_only=True):
    """An order that belongs to one attempt. Answers: `Done`, `Failed`."""

    attempt: int


class Prepare(AttemptOrder, frozen=True, kw_only=True):
    """Preflight on every pod."""


class Freeze(AttemptOrder, frozen=True, kw_only=True):
    """Freeze every pod and let what was sent be acknowledged."""


class Seal(AttemptOrder, frozen=True, kw_only=True):
    """Cut the traffic of every pod."""


class Capture(AttemptOrder, frozen=True, kw_only=True):
    """Dump every pod; done when all have voted ``captured``."""


class Observe(AttemptOrder, frozen=True, kw_only=True):
    """Watch for an outcome that somebody else creates. Answer: `OutcomeStands`."""


class Collect(AttemptOrder, frozen=True, kw_only=True):
    """Wait for the votes ``persisted``. Answers: `Persisted`, `Failed`."""


class WriteManifest(AttemptOrder, frozen=True, kw_only=True):
    """Write the global manifest into the store. Answers: `Written`, `Failed`."""


class Settle(AttemptOrder, frozen=True, kw_only=True):
    """Make sure that every pod runs again after an abort. Answers: `Done`, `Failed`."""


class Kill(Order, frozen=True, kw_only=True):
    """End the processes of every pod that can be reached. Answer: `Closed`."""

    grace_seconds: float = 0.0


class Finish(Order, frozen=True, kw_only=True):
    """Keep logs and results of every pod that can be reached, and remove it. Answer: `Closed`."""


class Alarm(Order, frozen=True, kw_only=True):
    """Ring at ``at`` (seconds since the epoch). Answer: `AlarmRang`."""

    what: str
    at: float


Instruction = Record | Order
