"""Connections over unix sockets that a program of the pod has not accepted yet, with what was sent over them.

What waits in such a connection can be read only by accepting it, and no call puts an accepted one back. So the client
is connected once more: `emptied` accepts what waits and keeps what was sent, and `connecting.connect` makes a new
connection in the place of each client's process that replaces the old one, in the same order, still empty. Those CRIU
saves. Then, and after a restore, what was sent is sent again in the clients' place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moorage.errors import Refused
from moorage.worker import under_way, unix_diag
from moorage.worker.borrow import Place, borrowed_socket, holders_of
from moorage.worker.extra_record import Early
from moorage.worker.sandbox import inject
from moorage.worker.sandbox.cgroup import PodCgroup
from moorage.worker.sandbox.process import inner_pid
from moorage.worker.unix_diag import UnixSocket

_SO_PASSCRED = 16
_SIOCUNIXFILE = 0x89E0
_CURE = "let the program accept its connections before the checkpoint"


class Hands(NamedTuple):
    """What is worked with: the pod's cgroup, its processes, and how to do something in its network."""

    cgroup: PodCgroup
    host_pids: list[int]
    in_network: Callable[[Callable[[], object]], object]


def awaited(table: Mapping[int, UnixSocket]) -> list[UnixSocket]:
    """The listening sockets with connections that CRIU refuses or would bring back otherwise. Pure."""

    def used(inode: int) -> bool:
        client = table.get(inode)
        return client is None or bool(client.unread or client.shutdown)

    return [one for one in table.values() if one.state == unix_diag.LISTENING and any(map(used, one.waiting))]


def in_order(table: Mapping[int, UnixSocket]) -> list[UnixSocket]:
    """The listening sockets with several connections that CRIU saves, but does not restore in their order. Pure."""
    used = {one.inode for one in awaited(table)}
    return [
        one
        for one in table.values()
        if one.state == unix_diag.LISTENING and len(one.waiting) > 1 and one.inode not in used
    ]


def look(hands: Hands) -> tuple[list[Early], list[Early]]:
    """Connections that wait in sockets of the pod: with data or ended, and those in a row that CRIU saves; without
    their data. Raises `Refused` for one of the first kind that cannot be made again."""
    table: dict[int, UnixSocket] = hands.in_network(unix_diag.read)  # type: ignore[assignment]
    queues = [one for one in table.values() if one.state == unix_diag.LISTENING and one.waiting]
    if not queues:
        return [], []
    used, plain = awaited(table), in_order(table)
    holders = holders_of(hands.host_pids, {inode for one in queues for inode in (one.inode, *one.waiting)})
    for queue in queues:
        for client in () if queue.inode in holders else holders_among(queue.waiting, holders):
            raise _refused(client, "is connected, not accepted yet, to a socket that no process of the pod has open")

    def of(queue: UnixSocket) -> list[Early]:
        listeners = holders.get(queue.inode, [])[:1]  # none: it is not the pod's
        return [_early(listener, queue, inode, table, holders) for listener in listeners for inode in queue.waiting]

    row = []
    for queue in plain:
        with contextlib.suppress(Refused):  # then they come back in any order
            row += of(queue)
    return [one for queue in used for one in of(queue)], row


def holders_among(inodes: Iterable[int], holders: Mapping[int, list[Place]]) -> list[Place]:
    """Where sockets with these inode numbers are open. Pure."""
    return [place for inode in inodes for place in holders.get(inode, [])]


def _early(
    listener: Place,
    queue: UnixSocket,
    inode: int,
    table: Mapping[int, UnixSocket],
    holders: Mapping[int, list[Place]],
) -> Early:
    with borrowed_socket(*listener) as sock:
        if sock.getsockopt(socket.SOL_SOCKET, _SO_PASSCRED):
            raise _refused(listener, "holds a connection that was not accepted yet, whose data comes with credentials")
    if not inode:
        return Early(_inside(listener), None, queue.kind)
    held = holders.get(inode, [])
    if not held or len({place.pid for place in held}) > 1:
        who = "several processes have" if held else "no process of the pod has"
        raise _refused(listener, f"holds a connection that was not accepted yet, and whose other end {who} open")
    with borrowed_socket(*held[0]) as sock:
        if sock.getsockname():
            raise _refused(held[0], "is connected, not accepted yet, and has a name of its own")
    with borrowed_socket(*listener) as sock:
        if not _reached(sock, held[0].pid):
            raise _refused(
                listener,
                "holds a connection that was not accepted yet, and its name was removed, leads to something else, "
                "or is not seen by the client",
            )
    if len(queue.waiting) > queue.backlog + 1:
        raise _refused(listener, "holds more connections that were not accepted yet than it would take now")
    if not inject.possible():
        raise _refused(listener, "holds a connection that was not accepted yet, with data in it")
    return Early(_inside(listener), _inside(held[0]), queue.kind, shutdown=table[inode].shutdown)


def _reached(listener: socket.socket, client: int) -> bool:
    """Whether this process could connect to it once more: by its name it finds the file that it is bound to."""
    if isinstance(bound := listener.getsockname(), bytes):
        return True
    with unix_file(listener) as file:
        name = Path(f"/proc/self/fd/{file}").readlink()
        if name.name != Path(bound).name:
            return False  # renamed: it would be restored without a name
        with contextlib.suppress(OSError):
            return os.path.samestat(Path(f"/proc/{client}/root{name}").lstat(), os.fstat(file))
    return False


@contextlib.contextmanager
def unix_file(bound: socket.socket) -> Iterator[int]:
    """A descriptor of the file that a unix socket is bound to. Raises `OSError`."""
    file = fcntl.ioctl(bound, _SIOCUNIXFILE)
    try:
        yield file
    finally:
        os.close(file)


def _inside(place: Place) -> tuple[int, int]:
    return inner_pid(Path("/proc", str(place.pid))), place.fd


def _refused(place: Place, why: str) -> Refused:
    name = (Path("/proc", str(place.pid)) / "comm").read_text().strip()
    inside, fd = _inside(place)
    return Refused(f"process {inside} ({name}), descriptor {fd} (unix socket): it {why}", _CURE)


@dataclass
class Taken:
    """What `emptied` found. ``rights``: descriptors that came with pieces of the data, as place among ``notes``, place
    of the piece, own descriptors: they cannot be saved."""

    notes: list[Early] = field(default_factory=list)
    rights: dict[tuple[int, int], list[int]] = field(default_factory=dict)


@contextlib.contextmanager
def emptied(hands: Hands, found: Sequence[Early]) -> Iterator[Taken]:
    """Accept those connections and read what was sent. At the end of the block, by when the notes must be safe, the
    accepted ends are closed. Raises `OSError`."""
    places = tasks(hands.host_pids)
    with contextlib.ExitStack() as stack:
        taken = Taken()
        for listener, group in groupby(found, key=lambda one: one.listener):
            with borrowed_socket(places[listener[0]], listener[1]) as sock:
                for one, end in zip(group, accept(sock), strict=False):
                    stack.callback(end.close)
                    pieces = list(under_way.pieces(end))
                    for number, (_, descriptors) in enumerate(pieces):
                        for fd in descriptors:
                            stack.callback(os.close, fd)
                            taken.rights.setdefault((len(taken.notes), number), []).append(fd)
                    data = [piece for piece, _ in pieces]
                    taken.notes.append(Early(one.listener, one.client, one.kind, data, one.shutdown))
        yield taken


def accept(listener: socket.socket) -> Iterator[socket.socket]:
    """What waits there, in its order."""
    look = select.poll()
    look.register(listener, select.POLLIN)
    while look.poll(0):  # its flags are its owner's, and it may be one that waits
        yield socket.socket(fileno=listener._accept()[0])  # type: ignore[attr-defined]


def settled(found: Sequence[Early]) -> bool:
    """Whether these, when each was connected again by CRIU, only lack their data: none has to stand before another."""
    return all(one.client is not None for one in found) and len({one.listener for one in found}) == len(found)


def tasks(host_pids: Iterable[int]) -> dict[int, int]:
    """Process in the pod → on the host."""
    found = {}
    for pid in host_pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found[inner_pid(Path("/proc", str(pid)))] = pid
    return found
