"""Datagrams that wait in UDP sockets: looked at without reading them, and received anew."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Sequence

import msgspec

from moorage.worker.borrow import peeking
from moorage.worker.network import packets
from moorage.worker.network.packets import Injector

_IP_PKTINFO = 8
_IPV6_RECVPKTINFO, _IPV6_PKTINFO = 49, 50
_LARGEST = 1 << 16
_ROOM = 512  # for the control messages that the program has asked for itself


class Datagram(msgspec.Struct, frozen=True):
    """One datagram: where it was sent to, where it came from."""

    local: tuple[str, int]
    remote: tuple[str, int]
    data: bytes


def peek(sock: socket.socket) -> list[Datagram]:
    """All datagrams that wait in this UDP socket, whose owner stands still; they stay there. Raises `OSError`."""
    six = sock.family == socket.AF_INET6
    wanted = (socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO) if six else (socket.IPPROTO_IP, _IP_PKTINFO)
    told = sock.getsockopt(*wanted)
    found = []
    try:
        sock.setsockopt(*wanted, 1)
        port = sock.getsockname()[1]
        with contextlib.suppress(BlockingIOError), peeking(sock):
            while True:
                data, notes, _, sender = sock.recvmsg(_LARGEST, _ROOM, socket.MSG_PEEK | socket.MSG_DONTWAIT)
                target = _target(notes)
                if target:
                    found.append(Datagram((target, port), (_plain(sender[0]), sender[1]), data))
    finally:
        sock.setsockopt(*wanted, told)
    return found


def spent(sock: socket.socket, found: Sequence[Datagram]) -> bool:
    """Whether these were read out of the socket now, to be delivered again: the kernel shows an empty datagram to only
    one who looks without reading, so that the next checkpoint would not see it. Raises `OSError`."""
    if all(one.data for one in found):
        return False
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.recv(1, socket.MSG_DONTWAIT)
    return True


def _target(notes: list[tuple[int, int, bytes]]) -> str:
    for level, kind, text in notes:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
            return socket.inet_ntop(socket.AF_INET, struct.unpack_from("=i4s4s", text)[2])
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO):
            return _plain(socket.inet_ntop(socket.AF_INET6, text[:16]))
    return ""


def _plain(address: str) -> str:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def deliver(datagrams: Sequence[Datagram]) -> None:
    """Receive them, in this order, in the current network. Raises `OSError`."""
    if datagrams:
        with Injector() as injector:
            for one in datagrams:
                injector.send(packets.datagram(one.remote, one.local, one.data))
