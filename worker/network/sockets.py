"""What TCP knows about a pod's connections (SOCK_DIAG), and ending some of them. Linux's inet_diag.h in 100 lines.

`Diagnosis` is opened inside the pod's namespace and works from any thread afterwards: a netlink socket stays in the
namespace in which it was made.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from moorage.errors import EnvironmentLacking

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NLM_F_REQUEST, _NLM_F_ACK, _NLM_F_DUMP = 0x1, 0x4, 0x300
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48s")
_MESSAGE = struct.Struct("=BBBB48sIIIII")
_ID = struct.Struct("!HH16s16s")
_UNACKED = struct.Struct("=I")
_UNACKED_AT, _SEND_WINDOW_AT = 24, 228  # in struct tcp_info

ESTABLISHED, SYN_SENT, SYN_RECEIVED, FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSED, CLOSE_WAIT, LAST_ACK, LISTEN, CLOSING = (
    range(1, 12)
)
STATE_NAMES = (
    "", "established", "syn-sent", "syn-received", "fin-wait-1", "fin-wait-2", "time-wait", "closed", "close-wait",
    "last-ack", "listening", "closing",
)  # fmt: skip
_ALIVE = sum(1 << s for s in range(1, 12) if s not in (TIME_WAIT, CLOSED, LISTEN))


class Connection(msgspec.Struct, frozen=True):
    """One TCP socket. Queues in bytes, ``unacked`` in segments; ``send_window`` -1 where the kernel does not tell.

    Addresses of IPv6 sockets that speak IPv4 (``::ffff:a.b.c.d``) appear as IPv4.
    """

    family: int
    state: int
    local: str
    local_port: int
    remote: str
    remote_port: int
    receive_queue: int
    send_queue: int
    inode: int
    unacked: int
    send_window: int
    identity: bytes = b""

    @property
    def in_flight(self) -> bool:
        """Whether the peer's kernel still owes an answer that it can give while its processes are frozen.

        A peer whose window is closed owes none: what was sent into it comes again when the window opens.
        """
        if self.state in (SYN_SENT, SYN_RECEIVED):
            return True
        return self.unacked > 0 and self.send_window != 0


class OtherSocket(msgspec.Struct, frozen=True):
    """A raw or packet socket: ``kind`` is ``raw`` or ``packet``; ``inode`` is what ``/proc/<pid>/fd`` shows."""

    kind: str
    inode: int


class SocketReport(msgspec.Struct, frozen=True):
    """All sockets of a pod that a preflight wants to know."""

    connections: list[Connection]
    listening: list[Connection]
    other: list[OtherSocket]


def _address(family: int, raw: bytes) -> str:
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[:4])
    address = ipaddress.IPv6Address(raw)
    return str(address.ipv4_mapped or address)


def parse(payload: bytes) -> Connection:
    """One `inet_diag_msg` with its attributes, without the netlink header."""
    family, state, _, _, identity, _, received, queued, _, inode = _MESSAGE.unpack_from(payload)
    local_port, remote_port, local, remote = _ID.unpack_from(identity)
    unacked, window = 0, -1
    position = _MESSAGE.size
    while position + 4 <= len(payload):
        length, kind = struct.unpack_from("=HH", payload, position)
        if kind == _INET_DIAG_INFO:
            info = payload[position + 4 : position + length]
            if len(info) >= _UNACKED_AT + 4:
                (unacked,) = _UNACKED.unpack_from(info, _UNACKED_AT)
            if len(info) >= _SEND_WINDOW_AT + 4:
                (window,) = _UNACKED.unpack_from(info, _SEND_WINDOW_AT)
        position += max(4, (length + 3) & ~3)
    return Connection(
        family, state, _address(family, local), local_port, _address(family, remote), remote_port,
        received, queued, inode, unacked, window, identity,
    )  # fmt: skip


class Diagnosis:
    """An open SOCK_DIAG socket. Make it inside the namespace that it shall look at. Raises `OSError`."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.settimeout(10)
        self._sequence = 0

    def __enter__(self) -> Diagnosis:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def tcp(self, states: int = _ALIVE) -> list[Connection]:
        """All TCP sockets in one of ``states`` (a bit for each), IPv4 and IPv6. Raises `EnvironmentLacking`."""
        return [found for family in (socket.AF_INET, socket.AF_INET6) for found in self._dump(family, states)]

    def destroy(self, connection: Connection) -> bool:
        """Abort the connection: its process gets ECONNABORTED, the peer a reset. False if it was gone already.

        Raises `EnvironmentLacking` on a kernel without CONFIG_INET_DIAG_DESTROY.
        """
        request = _REQUEST.pack(connection.family, socket.IPPROTO_TCP, 0, 1 << connection.state, connection.identity)
        self._send(_SOCK_DESTROY, _NLM_F_REQUEST | _NLM_F_ACK, request)
        code = next(self._replies())[1]
        if code in (errno.EOPNOTSUPP, errno.EINVAL):
            raise EnvironmentLacking(
                "this kernel cannot end a connection from outside (CONFIG_INET_DIAG_DESTROY)",
                "connections to the world end when their peers answer with a reset",
            )
        return not code

    def _dump(self, family: int, states: int) -> Iterator[Connection]:
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), states, b"")
        self._send(_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, request)
        for payload, code in self._replies():
            if code:
                if code == errno.ENOENT:
                    raise EnvironmentLacking("the kernel cannot list TCP sockets", "load the module tcp_diag")
                raise OSError(code, f"sock_diag: {os.strerror(code)}")
            if payload:
                yield parse(payload)

    def _send(self, kind: int, flags: int, body: bytes) -> None:
        self._sequence += 1
        self._socket.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, self._sequence, 0) + body)

    def _replies(self) -> Iterator[tuple[bytes, int]]:
        """Pairs (payload, 0), and at the end (b"", error number or 0)."""
        while True:
            data = self._socket.recv(1 << 16)
            position = 0
            while position < len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, position)
                payload = data[position + _HEADER.size : position + length]
                position += (length + 3) & ~3
                if sequence != self._sequence:
                    continue
                if kind in (_NLMSG_ERROR, _NLMSG_DONE):
                    code = struct.unpack_from("=i", payload)[0] if len(payload) >= 4 else 0
                    yield b"", -code
                    return
                yield payload, 0


def other_sockets() -> list[OtherSocket]:
    """Raw and packet sockets of the current namespace, from ``/proc``."""
    found = []
    for kind, file in (("raw", "raw"), ("raw", "raw6"), ("packet", "packet")):
        try:
            lines = Path("/proc/thread-self/net", file).read_text().splitlines()[1:]
        except FileNotFoundError:
            continue
        column = 9 if kind == "raw" else 8
        found += [OtherSocket(kind, int(line.split()[column])) for line in lines]
    return found


def report() -> SocketReport:
    """All sockets of the current namespace (call it within `namespace.run_in`)."""
    with Diagnosis() as diagnosis:
        connections = diagnosis.tcp()
        listening = diagnosis.tcp(1 << LISTEN)
    return SocketReport(connections, listening, other_sockets())
