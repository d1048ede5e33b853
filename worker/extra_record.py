"""What belongs to a pod's processes and is not in CRIU's images: recorded beside them, put back after a restore."""

from __future__ import annotations

import msgspec

from moorage.errors import CorruptData
from moorage.worker.network.corked import Corked
from moorage.worker.network.datagrams import Datagram
from moorage.worker.network.waiting import Waiting

#: Among the images, so that it goes wherever they go.
FILE = "moorage-extras.json"


class SocketOptions(msgspec.Struct, frozen=True):
    """Options of one socket, as ``(level, name, value)``; ``pid`` and ``fd`` are those inside the pod."""

    pid: int
    fd: int
    options: list[tuple[int, int, bytes]]


class Thread(msgspec.Struct, frozen=True):
    """A thread that may not run on every processor of its node, or has another timer slack. ``tid``: in the pod."""

    tid: int
    cpus: list[int] = []
    slack: int = 0  # nanoseconds


class PacketPipe(msgspec.Struct, frozen=True):
    """A descriptor (``pid`` and ``fd`` are those inside the pod) of a pipe of packets; one of each pipe has what waits
    in it."""

    pid: int
    fd: int
    packets: list[bytes]


class Terminal(msgspec.Struct, frozen=True):
    """The master's end (``pid`` and ``fd`` are those inside the pod) of a pseudo-terminal with text in it that was
    written with output processing on."""

    pid: int
    fd: int


class PosixLock(msgspec.Struct, frozen=True):
    """A POSIX lock of process ``pid`` (in the pod) on bytes of descriptor ``fd``'s file; ``length`` 0: to any end."""

    pid: int
    fd: int
    write: bool
    start: int
    length: int


class Watch(msgspec.Struct, frozen=True):
    """A watch of inotify, descriptor ``fd`` of process ``pid``, on what has no name any more but is open: at ``place``
    below the folder of process ``holder`` in ``/proc``. All are numbers in the pod."""

    pid: int
    fd: int
    number: int
    mask: int
    holder: int
    place: str


class Pieces(msgspec.Struct, frozen=True):
    """A stream (``pid`` and ``fd`` are those inside the pod) with descriptors under way: where, in what waits in it,
    a message begins that has some with it."""

    pid: int
    fd: int
    starts: list[int]


class Early(msgspec.Struct, frozen=True):
    """A connection over a unix socket that was not accepted yet. ``listener``, ``client``: process in the pod and
    descriptor, of a ``client`` that has closed it none; ``data``: what it sent (packets: one each); ``shutdown``: 1 for
    reading, 2 for writing. Those of one listener stand in their order."""

    listener: tuple[int, int]
    client: tuple[int, int] | None
    kind: int
    data: list[bytes] = []
    shutdown: int = 0


class Extras(msgspec.Struct):
    """``links``: path of an open file whose name was removed → a name that it still has. ``timers``: process →
    POSIX timer → the thread that it signals. ``eventfds``: process → descriptor → flags, of those that CRIU would make
    otherwise. ``zombies``: process that has ended → its exit code, above 127. ``packets``: pipes with O_DIRECT,
    ``terminals``: those with text that waits, ``locks``: all POSIX locks, ``watches``: those on what has no name,
    ``pieces``: of streams with descriptors in them, ``backlog``: connections that wait to be accepted, ``early``: those
    over unix sockets, ``datagrams``: what waits in UDP sockets, ``corked``: what those hold back. All numbers are
    those in the pod."""

    links: dict[str, str] = {}
    timers: dict[str, dict[int, int]] = {}
    sockets: list[SocketOptions] = []
    scheduling: list[Thread] = []
    eventfds: dict[str, dict[int, int]] = {}
    zombies: dict[str, int] = {}
    packets: list[PacketPipe] = []
    terminals: list[Terminal] = []
    locks: list[PosixLock] = []
    backlog: list[Waiting] = []
    early: list[Early] = []
    watches: list[Watch] = []
    pieces: list[Pieces] = []
    corked: list[Corked] = []
    datagrams: list[Datagram] = []

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Extras:
        """Raises `CorruptData`."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"{FILE} cannot be read: {error}", "restore an earlier checkpoint") from None
