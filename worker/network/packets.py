"""TCP segments and UDP datagrams as bytes, and raw sockets that hand them to this network's own kernel.

Pure but for `Injector`.
"""

from __future__ import annotations

import socket
import struct
from types import TracebackType

#: Mark of what `Injector` sends, so that the shield lets it through.
MARK = 0x6D6F6F72
SYN, FIN, RST, PSH, ACK = 0x02, 0x01, 0x04, 0x08, 0x10
_WORD = 0xFFFFFFFF
_TTL = 64


def checksum(data: bytes) -> int:
    """The ones' complement sum of the Internet protocols."""
    if len(data) % 2:
        data += b"\0"
    # The sum does not depend on where it is folded, so the sum of many words is the remainder of the one number.
    total = int.from_bytes(data, "big")
    rest = total % 0xFFFF or (0xFFFF if total else 0)
    return ~rest & 0xFFFF


def _pack(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


def _summed(source: bytes, target: bytes, protocol: int, body: bytes, at: int) -> bytes:
    """``body`` with its checksum in the two bytes ``at``, which are zero."""
    length = struct.pack(
        "!II" if len(source) == 16 else "!HH", *((len(body), protocol) if len(source) == 16 else (protocol, len(body)))
    )
    total = checksum(source + target + length + body)
    if protocol == socket.IPPROTO_UDP:
        total = total or 0xFFFF  # 0 says that there is none
    return body[:at] + struct.pack("!H", total) + body[at + 2 :]


def _packet(source: str, target: str, protocol: int, body: bytes, at: int) -> bytes:
    a, b = _pack(source), _pack(target)
    body = _summed(a, b, protocol, body, at)
    if len(a) == 16:
        return struct.pack("!IHBB", 6 << 28, len(body), protocol, _TTL) + a + b + body
    # The kernel fills in the checksum of the header.
    return struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 0, 0, _TTL, protocol, 0, a, b) + body


def segment(
    source: tuple[str, int],
    target: tuple[str, int],
    *,
    sequence: int,
    acknowledged: int,
    flags: int,
    window: int,
    options: bytes = b"",
    data: bytes = b"",
) -> bytes:
    """A TCP segment with its IP header. ``window`` as it stands in the header, unscaled."""
    options += b"\1" * (-len(options) % 4)
    head = struct.pack(
        "!HHIIBBHHH",
        source[1], target[1], sequence & _WORD, acknowledged & _WORD,
        (20 + len(options)) // 4 << 4, flags, window, 0, 0,
    )  # fmt: skip
    return _packet(source[0], target[0], socket.IPPROTO_TCP, head + options + data, 16)


def datagram(source: tuple[str, int], target: tuple[str, int], data: bytes) -> bytes:
    """A UDP datagram with its IP header."""
    head = struct.pack("!HHHH", source[1], target[1], (8 + len(data)) & 0xFFFF, 0)
    return _packet(source[0], target[0], socket.IPPROTO_UDP, head + data, 6)


class Injector:
    """Make it inside the network whose kernel shall receive. Raises `OSError`."""

    def __init__(self) -> None:
        self._sockets = {}
        for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            raw = socket.socket(family, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            self._sockets[family == socket.AF_INET6] = (raw, loopback)

    def __enter__(self) -> Injector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for raw, _ in self._sockets.values():
            raw.close()

    def send(self, packet: bytes) -> None:
        """Over ``lo``, whatever addresses the packet itself bears: it is received before this returns."""
        raw, loopback = self._sockets[packet[0] >> 4 == 6]
        raw.sendto(packet, (loopback, 0))
