"""A stand-in for NCCL and the libnccl proxy in one: operations over TCP that really wait for all partners, the gate of
`moorage.nccl_quiesce`, and the conversation of docs/nccl-proxy.md.

A communicator is a server thread in the process that made its id, and a connection from each member. An all-reduce
returns as soon as it is in the communicator's stream (a thread with a queue of few places); what it gives can be waited
for. Destroying a communicator with an operation that some member lacks is an error that the program dies of.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import random
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from moorage.nccl_quiesce import wire
from moorage.nccl_quiesce.gate import Gate
from moorage.nccl_quiesce.model import Call, Creation, Lane, Order, Snapshot

_NUMBER = struct.Struct("<q")
_PLACES = 4  #: in a stream's queue
_ID_BYTES = 128


def _name(uid: bytes) -> str:
    return f"id-{hashlib.blake2b(uid, digest_size=8).hexdigest()}"


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end is gone")
        data += more
    return data


class _Server(threading.Thread):
    """The meeting place of one communicator: sums what all members send, round after round."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._listening = socket.create_server((address, 0), backlog=64)
        host, port = self._listening.getsockname()
        text = f"{host} {port} {random.getrandbits(64):x}".encode()
        self.uid = text.ljust(_ID_BYTES, b"\0")
        self.start()

    def run(self) -> None:
        members: list[socket.socket] = []
        try:
            size = 1
            with self._listening:
                while len(members) < size:
                    member, _ = self._listening.accept()
                    (size,) = _NUMBER.unpack(_exactly(member, _NUMBER.size))
                    members.append(member)
            for member in members:
                member.sendall(b"g")
            while True:
                total = sum(_NUMBER.unpack(_exactly(member, _NUMBER.size))[0] for member in members)
                for member in members:
                    member.sendall(_NUMBER.pack(total))
        except OSError:
            pass
        finally:
            for member in members:
                member.close()

    def close(self) -> None:
        """Nobody comes any more. `shutdown` wakes the thread that accepts."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)


class Communicator:
    """One member's end. ``name`` and ``member`` never change; the connection does."""

    def __init__(self, name: str, member: int, size: int) -> None:
        self.name, self.member, self.size = name, member, size
        self.pending = 0
        self._counting = threading.Lock()
        self._queue: queue.Queue[tuple[int, Future[int]] | None] = queue.Queue(_PLACES)
        self._socket: socket.socket | None = None
        self._stream: threading.Thread | None = None

    def reach(self, uid: bytes) -> socket.socket:
        """A connection to the server; all are there when it says so."""
        host, port, _ = uid.rstrip(b"\0").decode().split()
        sock = socket.create_connection((host, int(port)), timeout=60)
        sock.settimeout(None)
        sock.sendall(_NUMBER.pack(self.size))
        return sock

    def stand(self, sock: socket.socket) -> None:
        """From now on there are operations."""
        self._socket = sock
        self._stream = threading.Thread(target=self._run, args=(sock,), daemon=True)
        self._stream.start()

    def submit(self, value: int) -> Future[int]:
        """Into the stream; waits for a place in it."""
        done: Future[int] = Future()
        with self._counting:
            self.pending += 1
        self._queue.put((value, done))
        return done

    def _run(self, sock: socket.socket) -> None:
        while (item := self._queue.get()) is not None:
            value, done = item
            try:
                sock.sendall(_NUMBER.pack(value))
                (total,) = _NUMBER.unpack(_exactly(sock, _NUMBER.size))
            except OSError as error:
                print(f"half an operation on {self.name}: {error}", file=sys.stderr, flush=True)
                os._exit(3)
            with self._counting:
                self.pending -= 1
            done.set_result(total)

    def destroy(self) -> None:
        if self._stream is not None and self._socket is not None:
            self._queue.put(None)
            self._stream.join()
            self._socket.close()
            self._stream = self._socket = None


class Nccl:
    """The library in one process. Thread-safe."""

    def __init__(self, rank: int, address: str) -> None:
        self.number = random.getrandbits(63)
        self._address, self._path = address, os.environ.get("MOORAGE_NCCL_SOCKET", wire.SOCKET)
        self._lock = threading.RLock()
        self._let_in: dict[int, threading.Event] = {}
        self._gate = Gate(rank, lambda ticket: self._let_in[ticket].set())
        self._communicators: dict[str, Communicator] = {}
        self._servers: list[_Server] = []
        self._back: dict[int, threading.Event] = {}  #: creations that were taken back wait for the rebuild
        self._creating: dict[int, str] = {}
        self._fresh: dict[str, bytes] = {}
        self._torn = False
        self._incarnation, self._rank = 0, -1
        self._busy = threading.Lock()
        self._called_off = threading.Event()
        self.refusals: list[wire.Refusal] = []  #: what it answers to a prepare
        threading.Thread(target=self._converse, daemon=True).start()

    # ---- what the program calls

    def unique_id(self) -> bytes:
        server = _Server(self._address)
        self._servers.append(server)
        return server.uid

    def init(self, uid: bytes, member: int, size: int) -> Communicator:
        """Make a communicator with all others who have this id."""
        name = _name(uid)
        while True:
            ticket = self._pass({}, (Creation(name, member, size),))
            communicator = Communicator(name, member, size)
            sock = communicator.reach(self._fresh.get(name, uid))
            with self._lock:
                self._creating[ticket] = name
            while True:
                ready = bool(select.select([sock], [], [], 0.02)[0])
                with self._lock:
                    if ticket in self._back:
                        again = self._back[ticket]
                        break
                    if ready and not self._gate.stands(ticket):
                        _exactly(sock, 1)
                        communicator.stand(sock)
                        self._communicators[name] = communicator
                        del self._creating[ticket]
                        self._gate.leave(ticket)
                        return communicator
            sock.close()
            again.wait()

    def all_reduce(self, communicator: Communicator, value: int) -> Future[int]:
        lane = Lane(communicator.name, communicator.member, "collective")
        ticket = self._pass({lane: 1}, ())
        done = communicator.submit(value)
        with self._lock:
            self._gate.leave(ticket)
        return done

    def _pass(self, lanes: dict[Lane, int], creates: tuple[Creation, ...]) -> int:
        """Through the gate."""
        with self._lock:
            ticket = self._gate.enter(threading.get_native_id(), lanes, creates)
            self._let_in[ticket] = event = threading.Event()
            if self._gate.settle(ticket, self._gate.look()):
                event.set()
        event.wait()
        with self._lock:
            del self._let_in[ticket]
        return ticket

    # ---- what the worker asks

    def _converse(self) -> None:
        left: tuple[int, int, int] | None = None
        while True:
            try:
                found = Path(self._path).stat()
                mark = (found.st_dev, found.st_ino, found.st_ctime_ns)
                if mark == left:
                    raise FileNotFoundError
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.connect(self._path)
                    parted = self._serve(sock)
                left = mark if parted else None
            except OSError:
                pass
            time.sleep(0.02)

    def _serve(self, sock: socket.socket) -> bool:
        """True: the worker has let go of this process."""
        with self._lock:
            gate = self._gate
            hello = wire.Hello(
                *(wire.VERSION, self.number, self._incarnation, self._rank, os.getpid(), "stub", 22809, "stub"),
                *(gate.attempt, gate.round, wire.PHASES.index(gate.phase), self._torn, len(self._communicators)),
            )
        sending = threading.Lock()

        def send(message: wire.FromProcess) -> None:
            with sending:
                sock.sendall(wire.pack(message))

        send(hello)
        while True:
            try:
                header = _exactly(sock, wire.HEADER_SIZE)
                message = wire.to_process(_exactly(sock, wire.length(header)))
            except OSError:
                return False
            match message:
                case wire.Welcome():
                    self._incarnation, self._rank = message.incarnation, message.rank
                case wire.Prepare():
                    send(wire.Prepared(message.request, self.refusals))
                case wire.Obey():
                    send(self._obey(message))
                case wire.MakeIds():
                    send(wire.Ids(message.request, [self.unique_id() for _ in message.names]))
                case wire.Keep():
                    send(wire.Done(message.request))
                case wire.Teardown() | wire.Rebuild():
                    threading.Thread(target=self._long, args=(message, send), daemon=True).start()
                case wire.Part():
                    send(wire.Done(message.request))
                    return True
                case wire.Status():
                    send(wire.StatusText(message.request, "{}"))

    def _obey(self, message: wire.Obey) -> wire.Report:
        names: list[str] = []
        needs = {Lane(n, m, wire.KINDS[kind], peer): need for n, m, kind, peer, need in message.needs}
        phase = wire.PHASES[message.phase]
        order = Order(message.attempt, message.round, phase, tuple(message.admit), needs, message.push)
        with self._lock:
            found = self._gate.obey(order, self._undrained)
        if found is None:
            return wire.Report(message.request, True, 0, 0, [], [], [], [], 0, [], [], 0, [])
        return report(message.request, found, names)

    def _undrained(self) -> tuple[str, ...]:
        return tuple(f"stream of {c.name}" for c in self._communicators.values() if c.pending)

    def _long(self, message: wire.Teardown | wire.Rebuild, send: Callable[[wire.FromProcess], None]) -> None:
        self._called_off.set()
        with self._busy:
            self._called_off.clear()
            try:
                if isinstance(message, wire.Teardown):
                    self._teardown(message)
                else:
                    self._rebuild(message)
                answer: wire.FromProcess = wire.Done(message.request)
            except InterruptedError:
                answer = wire.Failed(message.request, wire.CALLED_OFF, "called off")
            except Exception as error:
                answer = wire.Failed(message.request, wire.REFUSED_BY_NCCL, str(error))
        with contextlib.suppress(OSError):
            send(answer)

    def _teardown(self, message: wire.Teardown) -> None:
        with self._lock:
            if message.attempt != self._gate.attempt or self._gate.phase == "open":
                raise ValueError(f"cut {message.attempt} is not the one that this gate is closed for")
            self._torn = True
            for ticket, name in list(self._creating.items()):
                if name in message.again:
                    self._back[ticket] = threading.Event()
                    self._gate.take_back(ticket)
                    del self._creating[ticket]
        for communicator in self._communicators.values():
            communicator.destroy()
        for server in self._servers:
            server.close()
            server.join(message.seconds)
        self._servers = [server for server in self._servers if server.is_alive()]

    def _rebuild(self, message: wire.Rebuild) -> None:
        self._fresh.update(message.again)
        for name, uid in message.communicators:
            communicator = self._communicators.get(name)
            if communicator is not None:
                sock = communicator.reach(uid)
                until = time.monotonic() + message.seconds
                while not select.select([sock], [], [], 0.02)[0]:
                    if self._called_off.is_set():
                        raise InterruptedError
                    if time.monotonic() > until:
                        raise TimeoutError(f"{name}: not all of its members have come")
                _exactly(sock, 1)
                communicator.stand(sock)
        with self._lock:
            self._torn = False
            for event in self._back.values():
                event.set()
            self._back.clear()


def report(request: int, found: Snapshot, names: list[str]) -> wire.Report:
    """A snapshot as it travels."""

    def index(name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)

    def lanes(of: dict[Lane, int]) -> list[wire.WireLane]:
        return [(index(c), member, wire.KINDS.index(kind), peer, n) for (c, member, kind, peer), n in of.items()]

    def call(of: Call) -> wire.WireCall:
        creates = [(index(c.communicator), c.member, c.size) for c in of.creates]
        flags = wire.DESTROYS * of.destroys | wire.SUBMITS * of.submits
        return wire.WireCall(of.ticket, of.thread, flags, lanes(of.lanes), creates)

    return wire.Report(
        request,
        False,
        found.attempt,
        found.round,
        names,
        lanes(found.admitted),
        [call(of) for of in found.held],
        [call(of) for of in found.inside],
        found.entering,
        [(index(h.communicator), h.member, h.size, wire.STATES.index(h.state)) for h in found.handles],
        [(index(name), thread) for name, thread in found.users.items()],
        found.moves,
        list(found.undrained),
    )
