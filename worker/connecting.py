"""Clients of unix sockets that are connected once more, in the place of the process that has each (`unaccepted`).

To the client its socket is the one that it had: number, flags, options, the entries of its epolls; and to the server it
has the credentials of the client. A client that has closed its end since is played by this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moorage.errors import MoorageError
from moorage.worker.borrow import borrowed_socket
from moorage.worker.extra_record import Early
from moorage.worker.sandbox import inject
from moorage.worker.unaccepted import Hands, Place, accept, holders_of, tasks

_SIOCUNIXFILE = 0x89E0
_SO_PEEK_OFF, _SO_PASSCRED, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_BUF_LOCK = 42, 16, 32, 33, 72
_SO_PASSPIDFD = 76
#: Options that a program may have set, and how many bytes each has.
_OPTIONS = (
    (socket.SO_PRIORITY, 4), (socket.SO_MARK, 4), (socket.SO_RCVLOWAT, 4), (_SO_PASSCRED, 4), (_SO_PASSPIDFD, 4),
    (socket.SO_LINGER, 8), (socket.SO_RCVTIMEO, 16), (socket.SO_SNDTIMEO, 16), (_SO_PEEK_OFF, 4),
)  # fmt: skip
_EPOLL_ADD = 1
_WATCHED = re.compile(r"^tfd:\s+(\d+) events:\s+([0-9a-f]+) data:\s+([0-9a-f]+)", re.MULTILINE)
#: Descriptors that came with the data, by place of the connection and of the piece.
Rights = Mapping[tuple[int, int], list[int]]


class _Sending(NamedTuple):
    """A connection, and what is to be sent over it: pieces with the descriptors that go with each."""

    one: Early
    pieces: list[tuple[bytes, list[int]]]
    shutdown: int


class _Server(NamedTuple):
    """The name of a listening socket in the pod, and a descriptor of its file (-1: the name is an abstract one)."""

    name: bytes
    file: int


def connect(
    hands: Hands, early: Sequence[Early], *, with_data: bool, rights: Rights | None = None
) -> list[tuple[Early, str]]:
    """Connect all clients anew, in their order, with what they had sent or without. Those that have closed their end
    are left out without data. Whatever waits at these listeners now is dropped. Returns those that are lost, and why.

    Raises `OSError`, `MoorageError` when the pod's threads do not stop; then nothing was changed.
    """
    places = tasks(hands.host_pids)
    lost: list[tuple[Early, str]] = []
    wanted = [_sending(number, one, rights or {}, with_data) for number, one in enumerate(early)]
    with inject.held(hands.cgroup, hands.host_pids):
        for listener, group in groupby(wanted, key=lambda sending: sending.one.listener):
            with borrowed_socket(places[listener[0]], listener[1]) as sock, _server(sock) as server:
                for end in accept(sock):
                    end.close()
                for sending in group:
                    if not with_data and sending.one.client is None:
                        continue
                    try:
                        if sending.one.client is None:
                            _play(hands, sending, server)
                        else:
                            _replace(Place(places[sending.one.client[0]], sending.one.client[1]), sending, server)
                    except (OSError, MoorageError) as error:
                        lost.append((sending.one, str(error)))
    return lost


def _sending(number: int, one: Early, rights: Rights, with_data: bool) -> _Sending:
    if not with_data:
        return _Sending(one, [], 0)
    return _Sending(one, [(data, rights.get((number, at), [])) for at, data in enumerate(one.data)], one.shutdown)


@contextlib.contextmanager
def _server(listener: socket.socket) -> Iterator[_Server]:
    name = listener.getsockname()
    if isinstance(name, bytes):
        yield _Server(name, -1)
        return
    file = fcntl.ioctl(listener, _SIOCUNIXFILE)
    try:
        yield _Server(os.fsencode(Path(f"/proc/self/fd/{file}").readlink()), file)
    finally:
        os.close(file)


def _play(hands: Hands, sending: _Sending, server: _Server) -> None:
    """As a client that has closed its end."""

    def connected() -> None:
        with socket.socket(socket.AF_UNIX, sending.one.kind) as sock:
            sock.setblocking(False)
            sock.connect(server.name if server.file < 0 else f"/proc/self/fd/{server.file}")
            _send(sock, sending)

    hands.in_network(connected)


def _replace(place: Place, sending: _Sending, server: _Server) -> None:
    """Put a new connection in the place of the client's."""
    own = Path("/proc", str(place.pid))
    with borrowed_socket(*place) as old, inject.Stopped(place.pid) as calls, contextlib.ExitStack() as stack:
        inode = os.fstat(old.fileno()).st_ino
        copies = [fd for _, fd in holders_of([place.pid], {inode})[inode]]
        watching = list(_watching(own, copies))
        name = server.name
        if server.file >= 0:
            path = calls.call(inject.OPENAT, -100, calls.put(name), os.O_PATH | os.O_CLOEXEC)
            stack.callback(calls.call, inject.CLOSE, path)
            if not os.path.samestat((own / "fd" / str(path)).stat(), os.fstat(server.file)):
                raise MoorageError(f"{os.fsdecode(name)} is not the socket that the client had connected to")
            name = f"/proc/self/fd/{path}\0".encode()
        new = calls.call(inject.SOCKET, socket.AF_UNIX, old.type | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
        stack.callback(calls.call, inject.CLOSE, new)
        address = struct.pack("=H", socket.AF_UNIX) + name
        calls.call(inject.CONNECT, new, calls.put(address), len(address))
        with borrowed_socket(place.pid, new) as sock:
            _alike(old, sock)
            _send(sock, sending)
        for fd in copies:
            calls.call(inject.DUP3, new, fd, _flags(own, fd) & os.O_CLOEXEC)
        for epoll, fd, events, data in watching:
            calls.call(inject.EPOLL_CTL, epoll, _EPOLL_ADD, fd, calls.put(struct.pack("=IQ", events, data)))


def _watching(own: Path, copies: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """Epoll, descriptor, events and data of all that this process waits for on these descriptors."""
    for link in (own / "fd").iterdir():
        if str(link.readlink()) == "anon_inode:[eventpoll]":
            for fd, events, data in _WATCHED.findall((own / "fdinfo" / link.name).read_text()):
                if int(fd) in copies:
                    yield int(link.name), int(fd), int(events, 16), int(data, 16)


def _flags(own: Path, fd: int) -> int:
    found = re.search(r"^flags:\s+(\d+)", (own / "fdinfo" / str(fd)).read_text(), re.MULTILINE)
    return int(found[1], 8) if found else 0


def _alike(old: socket.socket, new: socket.socket) -> None:
    """Give the new socket the options and flags of the old one."""
    for name, size in _OPTIONS:
        with contextlib.suppress(OSError):
            value = old.getsockopt(socket.SOL_SOCKET, name, size)
            if new.getsockopt(socket.SOL_SOCKET, name, size) != value:
                new.setsockopt(socket.SOL_SOCKET, name, value)
    for name, force in ((socket.SO_SNDBUF, _SO_SNDBUFFORCE), (socket.SO_RCVBUF, _SO_RCVBUFFORCE)):
        size = old.getsockopt(socket.SOL_SOCKET, name)
        if new.getsockopt(socket.SOL_SOCKET, name) != size:
            new.setsockopt(socket.SOL_SOCKET, force, size // 2)  # it tells the double
    new.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, old.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK))
    flags = fcntl.fcntl(old.fileno(), fcntl.F_GETFL)
    fcntl.fcntl(new.fileno(), fcntl.F_SETFL, flags & ~os.O_ASYNC)


def send(hands: Hands, early: Iterable[Early]) -> None:
    """Send what was sent over these connections, which are there and empty. Raises `OSError`."""
    places = tasks(hands.host_pids)
    for one in early:
        if one.client is not None and (one.data or one.shutdown):
            with borrowed_socket(places[one.client[0]], one.client[1]) as sock:
                _send(sock, _sending(0, one, {}, with_data=True))


def _send(sock: socket.socket, sending: _Sending) -> None:
    room, locked = (sock.getsockopt(socket.SOL_SOCKET, name) for name in (socket.SO_SNDBUF, _SO_BUF_LOCK))
    need = sum(len(data) + 4096 for data, _ in sending.pieces)
    sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, room + 2 * need)
    try:
        for data, descriptors in sending.pieces:
            left, more = memoryview(data), descriptors
            while left:
                sent = socket.send_fds(sock, [left], more, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                left, more = left[sent:], []
    finally:
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, room // 2)  # it tells the double
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locked)
    if sending.shutdown:
        sock.shutdown(sending.shutdown - 1)
