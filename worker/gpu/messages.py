"""What worker and GPU broker say to each other over the broker's unix socket: length-prefixed msgpack, as with guards.

Every order names a pod by its label. All are idempotent: one that was carried out already answers as before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from moorage.errors import WireError
from moorage.store import Content
from moorage.store_settings import StoreSettings, WrappingKey
from moorage.worker.gpu.blocks import KnownProcess, SavedMemory

SOCKET_FILE = "broker.sock"
LOG_FILE = "broker.log"
#: No message comes near this: the chunks of 100 GiB take some megabytes.
MESSAGE_MAX = 1 << 30


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Serve the pod's processes at ``socket``. ``gpus``: UUIDs in the pod's own order."""

    pod: str
    socket: str
    incarnation: int
    gpus: list[str]


class Look(msgspec.Struct, frozen=True, tag=True):
    """What is there, and what of it cannot be saved."""

    pod: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Open the store for an attempt; before the pause. ``key``: if the settings do not name it, as in `Fill`.

    ``stops``: the pod does not run on afterwards. ``folder``: on disk, for copies that fit nowhere else; empty: none.
    ``precopy``: whether its memory may be copied while it runs, where that pays.
    """

    pod: str
    attempt: int
    store: str
    settings: StoreSettings
    label: str
    nice: int
    key: WrappingKey | None = None
    stops: bool = False
    folder: str = ""
    precopy: bool = True


class Precopy(msgspec.Struct, frozen=True, tag=True):
    """Wait for the pre-copy that `Begin` began, where the pause has to wait for it; at most ``seconds``."""

    pod: str
    attempt: int
    seconds: float


class Quiesce(msgspec.Struct, frozen=True, tag=True):
    """Gates closed, streams dry, bulk memory unmapped, the rest in the processes' own memory."""

    pod: str
    attempt: int
    seconds: float


class Capture(msgspec.Struct, frozen=True, tag=True):
    """Hash, and copy what changed."""

    pod: str
    attempt: int


class BringBack(msgspec.Struct, frozen=True, tag=True):
    """The reverse of `Quiesce`, in processes that run (again). ``mapping``: GPU UUIDs, old to new.

    ``processes``: those that have to come, also when broker and keeper are new and know nothing.
    """

    pod: str
    seconds: float
    mapping: dict[str, str] = {}
    processes: list[KnownProcess] = []


class Persist(msgspec.Struct, frozen=True, tag=True):
    """Bring what was captured into the store."""

    pod: str
    attempt: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The attempt is over: give lease and copies back."""

    pod: str
    attempt: int


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Make the pod's device memory anew, from the store."""

    pod: str
    store: str
    settings: StoreSettings
    memory: SavedMemory
    contents: dict[str, Content]
    key: WrappingKey | None = None
    kept_key: str = ""  # under which its memory may have been kept


class Detach(msgspec.Struct, frozen=True, tag=True):
    """The pod is gone: give all its memory back, or ``keep`` it on the gpu or the host, under ``key``."""

    pod: str
    keep: Literal["", "gpu", "host"] = ""
    key: str = ""


class ListKept(msgspec.Struct, frozen=True, tag=True):
    """What is kept of parked pods."""


class DropKept(msgspec.Struct, frozen=True, tag=True):
    """Give back what is kept under these keys."""

    keys: list[str]


class Exit(msgspec.Struct, frozen=True, tag=True):
    """End, if no pod is attached."""


OfPod = Attach | Look | Begin | Precopy | Quiesce | Capture | BringBack | Persist | Forget | Fill | Detach
Request = OfPod | ListKept | DropKept | Exit


class Call(msgspec.Struct, frozen=True):
    """One order."""

    id: int
    request: Request


class Objection(msgspec.Struct, frozen=True):
    """Something that cannot be saved. ``size`` in bytes, 0 where it has none."""

    process: str
    api: str
    size: int = 0


class Kept(msgspec.Struct, frozen=True):
    """Device memory that is kept of one parked pod."""

    key: str
    incarnation: int
    place: str
    size: int  # bytes


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a call; what does not belong to its request is empty."""

    id: int
    error: WireError | None = None
    processes: list[KnownProcess] = []  # that use CUDA
    objections: list[Objection] = []
    bytes_total: int = 0
    bytes_new: int = 0
    bytes_free: int = 0
    timings: dict[str, float] = {}
    memory: SavedMemory | None = None
    contents: dict[str, Content] = {}
    kept: list[Kept] = []
