"""Clients of unix sockets that are connected once more, in the place of the process that has each (`unaccepted`).

To the client its socket is the one that it had: number, flags, options, the entries of its epolls; and to the server it
has the credentials of the client. A client that has closed its end since is played by this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moorage.errors import MoorageError
from moorage.worker.borrow import Place, borrowed_socket, holders_of
from moorage.worker.extra_record import Early
from moorage.worker.sandbox import inject
from moorage.worker.unaccepted import Hands, accept, tasks, unix_file

_SO_PEEK_OFF, _SO_PASSCRED, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE, _SO_BUF_LOCK = 42, 16, 32, 33, 72
_SO_PASSPIDFD = 76
#: Options that a program may have set, and how many bytes each has.
_OPTIONS = (
    (socket.SO_PRIORITY, 4), (socket.SO_MARK, 4), (socket.SO_RCVLOWAT, 4), (_SO_PASSCRED, 4), (_SO_PASSPIDFD, 4),
    (socket.SO_LINGER, 8), (socket.SO_RCVTIMEO, 16), (socket.SO_SNDTIMEO, 16), (_SO_PEEK_OFF, 4),
)  # fmt: skip
_EPOLL_ADD = 1
_AT_EACCESS, _AT_EMPTY_PATH = 0x200, 0x1000
_WATCHED = re.compile(r"^tfd:\s+(\d+) events:\s+([0-9a-f]+) data:\s+([0-9a-f]+)", re.MULTILINE)
#: Descriptors that came with the data, by place of the connection and of the piece.
Rights = Mapping[tuple[int, int], list[int]]


class _Sending(NamedTuple):
    """A connection, and what is to be sent over it: pieces with the descriptors that go with each."""

    one: Early
    pieces: list[tuple[bytes, list[int]]]
    shutdown: int


class _Server(NamedTuple):
    """A listening socket of the pod, its name there, and a descriptor of its file (-1: the name is an abstract one)."""

    sock: socket.socket
    name: bytes
    file: int


class _Client(NamedTuple):
    """A process with clients: calls in its place, its descriptors by the inode number of their socket, and what its
    epolls wait for: descriptor → epoll, events, data."""

    calls: inject.Stopped
    copies: Mapping[int, list[Place]]
    watched: Mapping[int, list[tuple[int, int, int]]]


def connect(hands: Hands, early: Sequence[Early], *, with_data: bool) -> list[tuple[Early, str]]:
    """Connect all clients anew, in their order, with what they had sent or without. Those that have closed their end
    are left out without data. Whatever waits at these listeners now is dropped. Returns those that are lost, and why.

    Raises `OSError`, `MoorageError` when the pod's threads do not stop; then nothing was changed.
    """
    with ready(hands, early) as hand:
        return hand.connect(early, with_data=with_data)


@contextlib.contextmanager
def ready(hands: Hands, early: Sequence[Early]) -> Iterator[Ready]:
    """Open all that is needed to connect these clients anew, before anything is taken out of a queue; in the block the
    pod's threads stand still for it. Raises `OSError`, `MoorageError` when they do not."""
    with inject.held(hands.cgroup, hands.host_pids), contextlib.ExitStack() as stack:
        yield Ready(hands, early, stack)


class Ready:
    """``missing``: connections that cannot be made, and why."""

    def __init__(self, hands: Hands, early: Sequence[Early], stack: contextlib.ExitStack) -> None:
        self._hands = hands
        self._places = tasks(hands.host_pids)
        self._stack = stack
        self._servers: dict[tuple[int, int], _Server] = {}
        self._clients: dict[int, _Client] = {}
        self._addresses: dict[tuple[tuple[int, int], int], bytes] = {}
        self._why: dict[tuple[tuple[int, int], int], str] = {}
        self.missing: list[tuple[Early, str]] = []
        for one in early:
            if (way := _way(one)) not in self._why:
                self._why[way] = ""
                try:
                    self._prepare(one)
                except (OSError, MoorageError) as error:
                    self._why[way] = str(error)
                except KeyError:
                    self._why[way] = "a process is gone"
            if self._why[way]:
                self.missing.append((one, self._why[way]))

    def _prepare(self, one: Early) -> None:
        server = self._server(one.listener)
        if one.client is not None:
            client = self._client(self._places[one.client[0]])
            self._addresses[_way(one)] = self._address(client.calls, server)
            client.calls.call(inject.CLOSE, client.calls.call(inject.SOCKET, *_new(server.sock)))  # one more is allowed

    def _server(self, listener: tuple[int, int]) -> _Server:
        if listener not in self._servers:
            sock = self._stack.enter_context(borrowed_socket(self._places[listener[0]], listener[1]))
            self._servers[listener] = self._stack.enter_context(_server(sock))
        return self._servers[listener]

    def _client(self, pid: int) -> _Client:
        if pid not in self._clients:
            calls = inject.Stopped(pid)
            calls.__enter__()
            self._stack.callback(_quietly, calls.__exit__, None, None, None)
            self._clients[pid] = _Client(calls, holders_of([pid]), _watching(Path("/proc", str(pid))))
        return self._clients[pid]

    def _address(self, calls: inject.Stopped, server: _Server) -> bytes:
        """Where the client finds the listener: by a descriptor of the file that it had connected to."""
        if server.file < 0:
            return server.name
        path = calls.call(inject.OPENAT, -100, calls.put(server.name), os.O_PATH | os.O_CLOEXEC)
        self._stack.callback(_quietly, calls.call, inject.CLOSE, path)
        if not os.path.samestat(Path("/proc", str(calls.host_pid), "fd", str(path)).stat(), os.fstat(server.file)):
            raise MoorageError(f"{os.fsdecode(server.name)} is not the socket that the client had connected to")
        try:
            calls.call(inject.FACCESSAT2, path, calls.put(b""), os.W_OK, _AT_EMPTY_PATH | _AT_EACCESS)
        except OSError as error:
            if error.errno != errno.ENOSYS:  # Linux 5.8
                raise
        return f"/proc/self/fd/{path}\0".encode()

    def connect(
        self, early: Sequence[Early], *, with_data: bool, rights: Rights | None = None
    ) -> list[tuple[Early, str]]:
        """As `connect`: these are the ones that all was made ready for."""
        lost: list[tuple[Early, str]] = []
        wanted = [_sending(number, one, rights or {}, with_data) for number, one in enumerate(early)]
        for listener, group in groupby(wanted, key=lambda sending: sending.one.listener):
            if (server := self._servers.get(listener)) is None:
                lost += [(sending.one, "its listener is gone") for sending in group]
                continue
            for end in accept(server.sock):
                end.close()
            for sending in group:
                if not with_data and sending.one.client is None:
                    continue
                try:
                    if why := self._why[_way(sending.one)]:
                        raise MoorageError(why)
                    if sending.one.client is None:
                        _play(self._hands, sending, server)
                    else:
                        self._replace(sending, *sending.one.client)
                except (OSError, MoorageError) as error:
                    lost.append((sending.one, str(error)))
        return lost

    def _replace(self, sending: _Sending, pid: int, fd: int) -> None:
        """Put a new connection in the place of the client's."""
        address = struct.pack("=H", socket.AF_UNIX) + self._addresses[_way(sending.one)]
        place = Place(self._places[pid], fd)
        calls, holding, watched = self._client(place.pid)
        own = Path("/proc", str(place.pid))
        with borrowed_socket(*place) as old, contextlib.ExitStack() as stack:
            copies = [copy for _, copy in holding[os.fstat(old.fileno()).st_ino]]
            new = calls.call(inject.SOCKET, *_new(old))
            stack.callback(calls.call, inject.CLOSE, new)
            calls.call(inject.CONNECT, new, calls.put(address), len(address))
            with borrowed_socket(place.pid, new) as sock:
                _alike(old, sock)
                _send(sock, sending)
            for copy in copies:
                calls.call(inject.DUP3, new, copy, _flags(own, copy) & os.O_CLOEXEC)
            for copy in copies:
                for epoll, events, data in watched.get(copy, []):
                    calls.call(inject.EPOLL_CTL, epoll, _EPOLL_ADD, copy, calls.put(struct.pack("=IQ", events, data)))


def _way(one: Early) -> tuple[tuple[int, int], int]:
    """What connections have in common that only one preparation is needed for: listener, and process of the client."""
    return one.listener, one.client[0] if one.client is not None else 0


def _new(like: socket.socket) -> tuple[int, int, int]:
    return socket.AF_UNIX, like.type | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0


def _quietly(work: Callable[..., object], *arguments: object) -> None:
    """Of a process that may have been killed meanwhile."""
    with contextlib.suppress(OSError, MoorageError):
        work(*arguments)


def _sending(number: int, one: Early, rights: Rights, with_data: bool) -> _Sending:
    if not with_data:
        return _Sending(one, [], 0)
    return _Sending(one, [(data, rights.get((number, at), [])) for at, data in enumerate(one.data)], one.shutdown)


@contextlib.contextmanager
def _server(listener: socket.socket) -> Iterator[_Server]:
    name = listener.getsockname()
    if isinstance(name, bytes):
        yield _Server(listener, name, -1)
        return
    with unix_file(listener) as file:
        yield _Server(listener, os.fsencode(Path(f"/proc/self/fd/{file}").readlink()), file)


def _play(hands: Hands, sending: _Sending, server: _Server) -> None:
    """As a client that has closed its end."""

    def connected() -> None:
        with socket.socket(socket.AF_UNIX, sending.one.kind) as sock:
            sock.setblocking(False)
            sock.connect(server.name if server.file < 0 else f"/proc/self/fd/{server.file}")
            _send(sock, sending)

    hands.in_network(connected)


def _watching(own: Path) -> dict[int, list[tuple[int, int, int]]]:
    """Epoll, events and data of all that this process waits for, by descriptor."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for link in (own / "fd").iterdir():
        if str(link.readlink()) == "anon_inode:[eventpoll]":
            for fd, events, data in _WATCHED.findall((own / "fdinfo" / link.name).read_text()):
                found.setdefault(int(fd), []).append((int(link.name), int(events, 16), int(data, 16)))
    return found


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
