"""Messages between the libnccl proxy in a process of a job and the worker. Pure; docs/nccl-proxy.md is the contract.

A frame of the stream socket is ``<II``: `MAGIC`, the length of what follows; then one message, msgpack: an array whose
first element is the message's tag. Every message with a ``request`` is a command or its answer.
"""

from __future__ import annotations

import struct
from typing import Final, Literal, TypeAlias

import msgspec

from moorage.errors import CorruptData
from moorage.nccl_quiesce.model import Call, Creation, Handle, Kind, Lane, Order, Phase, Snapshot

MAGIC: Final = 0x434E474D  #: "MGNC"
VERSION: Final = 1
LONGEST: Final = 64 * 1024 * 1024  #: bytes of a message
SOCKET: Final = "/.moorage-nccl/nccl.sock"  #: in the pod, unless ``MOORAGE_NCCL_SOCKET`` names another

_HEADER: Final = struct.Struct("<II")
HEADER_SIZE: Final = _HEADER.size

State: TypeAlias = Literal["creating", "ready", "gone"]

KINDS: Final[tuple[Kind, ...]] = ("collective", "send", "receive")
PHASES: Final[tuple[Phase, ...]] = ("open", "cut", "drain")
STATES: Final[tuple[State, ...]] = ("creating", "ready", "gone")

#: Status of a `Failed`: the deadline passed; the command does not fit what went before; it was not understood; NCCL
#: said no (the text says what); a later command called it off.
DEADLINE, WRONG_STATE, MALFORMED, REFUSED_BY_NCCL, CALLED_OFF = -1, -2, -3, -4, -5

DESTROYS, SUBMITS = 1, 2  #: flags of a call

WireLane: TypeAlias = tuple[int, int, int, int, int]  #: name, member, kind, peer or -1, count; name is an index
WireCreation: TypeAlias = tuple[int, int, int]  #: name, member, size
WireHandle: TypeAlias = tuple[int, int, int, int]  #: name, member, size, state


class WireCall(msgspec.Struct, frozen=True, array_like=True):
    """`model.Call`."""

    ticket: int
    thread: int
    flags: int
    lanes: list[WireLane]
    creates: list[WireCreation]


# ---- from the process


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First on each connection.

    ``process``: drawn at random when the library was loaded, survives checkpoints. ``incarnation`` and ``rank``: as the
    last `Welcome` said, 0 and -1 before. ``pid``: of the pod's namespace. ``nccl``: the real library's version code, 0
    when it cannot be loaded; ``library``: its path. ``attempt``, ``round``, ``phase``: of the last order obeyed.
    ``torn``: the communicators are gone, `Rebuild` is awaited.
    """

    version: int
    process: int
    incarnation: int
    rank: int
    pid: int
    name: str
    nccl: int
    library: str
    attempt: int
    round: int
    phase: int
    torn: bool
    communicators: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A command was carried out."""

    request: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A command was not carried out. ``status``: one of the numbers above, or a positive ncclResult_t."""

    request: int
    status: int
    text: str


class Report(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The answer to `Obey`. ``stale``: the order is out of date; all else is empty then.

    ``names``: the communicators that the rest refers to by index. The rest as in `model.Snapshot`. ``users``: pairs of
    name and thread.
    """

    request: int
    stale: bool
    attempt: int
    round: int
    names: list[str]
    admitted: list[WireLane]
    held: list[WireCall]
    inside: list[WireCall]
    entering: int
    handles: list[WireHandle]
    users: list[tuple[int, int]]
    moves: int
    undrained: list[str]

    def snapshot(self, rank: int, waits_for: tuple[int, ...] = ()) -> Snapshot | None:
        """As the cut takes it; None when the order was out of date. Raises `CorruptData`."""
        if self.stale:
            return None
        try:
            return Snapshot(
                attempt=self.attempt,
                round=self.round,
                rank=rank,
                admitted=self._lanes(self.admitted),
                held=tuple(self._call(call) for call in self.held),
                inside=tuple(self._call(call) for call in self.inside),
                entering=self.entering,
                handles=tuple(
                    Handle(self.names[name], member, size, STATES[state]) for name, member, size, state in self.handles
                ),
                users={self.names[name]: thread for name, thread in self.users},
                waits_for=waits_for,
                moves=self.moves,
                undrained=tuple(self.undrained),
            )
        except IndexError:
            raise CorruptData("a report of an NCCL proxy names what it does not list") from None

    def _lanes(self, lanes: list[WireLane]) -> dict[Lane, int]:
        return {Lane(self.names[name], member, KINDS[kind], peer): n for name, member, kind, peer, n in lanes}

    def _call(self, call: WireCall) -> Call:
        creates = tuple(Creation(self.names[name], member, size) for name, member, size in call.creates)
        lanes = self._lanes(call.lanes)
        return Call(call.ticket, call.thread, lanes, creates, bool(call.flags & DESTROYS), bool(call.flags & SUBMITS))


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """What keeps a checkpoint from being taken. ``communicator`` is empty where it belongs to the process."""

    communicator: str
    api: str
    why: str


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The answer to `Prepare`."""

    request: int
    refusals: list[Refusal]


class Ids(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The answer to `MakeIds`: a unique id (128 bytes) for each name, in the same order."""

    request: int
    ids: list[bytes]


class StatusText(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The answer to `Status`: a JSON object for people."""

    request: int
    text: str


FromProcess = Hello | Done | Failed | Report | Prepared | Ids | StatusText


# ---- to the process


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The answer to `Hello`; also later, when there is more to tell. Nobody makes a communicator before the first.

    ``rank``: the number of this process in all snapshots of the job. ``renewed``: names of creations that cuts have
    taken back, and the fresh ids that take the place of those the job knows.
    """

    incarnation: int
    rank: int
    renewed: list[tuple[str, bytes]] = []


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Say what cannot be carried over. Changes nothing."""

    request: int


class Obey(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """`model.Order`. ``needs``: name, member, kind, peer or -1, need."""

    request: int
    attempt: int
    round: int
    phase: int
    admit: list[int] = []
    needs: list[tuple[str, int, int, int, int]] = []
    push: bool = False

    @classmethod
    def of(cls, request: int, order: Order) -> Obey:
        """An order as it travels."""
        needs = [(c, member, KINDS.index(kind), peer, need) for (c, member, kind, peer), need in order.needs.items()]
        phase = PHASES.index(order.phase)
        return cls(request, order.attempt, order.round, phase, list(order.admit), needs, order.push)


class Teardown(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Destroy every communicator, after an accepted drain order of this ``attempt``; on all ranks at once.

    ``again`` and ``widowed`` as in `model.Plan`: creations to be taken back; communicators that are not made anew.
    Creations of ``again`` that a process has not come to yet may be named all the same. ``seconds``: deadline. It may
    be repeated. When it fails the process still waits for `Rebuild`. ``abort``: partners may have none any more, or be
    about to make them: nobody is waited for.
    """

    request: int
    attempt: int
    again: list[str]
    widowed: list[str]
    seconds: float
    abort: bool = False


class MakeIds(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Draw a unique id for each of these communicators (ncclGetUniqueId). Goes to the process of the lowest member."""

    request: int
    names: list[str]


class Rebuild(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Make the communicators anew, in this order, the same in all processes; those without a member here are skipped.

    ``communicators``: names with their fresh unique ids, all of `model.Plan.rebuild`. ``again``: fresh ids for
    creations that were taken back, for all processes, also those that have not come to them yet; splits and shrinks
    need none and are left out. Registrations, windows and reductions are replayed. `Done` when all stand; gates stay
    closed.
    """

    request: int
    attempt: int
    communicators: list[tuple[str, bytes]]
    again: list[tuple[str, bytes]]
    seconds: float


class Part(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """Close the connection after `Done`, and come back when the socket at the path has been bound anew."""

    request: int


class Status(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """Say how things are."""

    request: int


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """The cut ``attempt`` is accepted: partners may lose their communicators from now on, so whatever happens the gate
    stays closed until it is told to open. Failed (`WRONG_STATE`) when it is not closed for that cut."""

    request: int
    attempt: int


ToProcess = Welcome | Prepare | Obey | Teardown | MakeIds | Rebuild | Part | Status | Keep

_encoder: Final = msgspec.msgpack.Encoder()
_from_process: Final = msgspec.msgpack.Decoder(FromProcess)
_to_process: Final = msgspec.msgpack.Decoder(ToProcess)


def pack(message: FromProcess | ToProcess) -> bytes:
    """A message with its header."""
    body = _encoder.encode(message)
    return _HEADER.pack(MAGIC, len(body)) + body


def length(header: bytes) -> int:
    """How many bytes follow a header of `HEADER_SIZE` bytes. Raises `CorruptData`."""
    magic, size = _HEADER.unpack(header)
    if magic != MAGIC or size > LONGEST:
        raise CorruptData("what came from a process is no message of an NCCL proxy")
    return int(size)


def from_process(body: bytes) -> FromProcess:
    """Raises `CorruptData`."""
    try:
        return _from_process.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"a message of an NCCL proxy is not understood: {error}") from None


def to_process(body: bytes) -> ToProcess:
    """The other direction, for tests. Raises `CorruptData`."""
    try:
        return _to_process.decode(body)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"a message to an NCCL proxy is not understood: {error}") from None
