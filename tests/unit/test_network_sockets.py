"""What an inet_diag message says."""

from __future__ import annotations

import socket
import struct

import pytest

from moorage.worker.network import sockets


def _message(
    *, family: int = socket.AF_INET, state: int = sockets.ESTABLISHED, local: str = "100.96.0.1", info: bytes = b""
) -> bytes:
    packed = socket.inet_pton(family, local).ljust(16, b"\0")
    identity = struct.pack("!HH", 80, 4000) + packed + packed + struct.pack("=III", 0, 7, 8)
    attribute = struct.pack("=HH", 4 + len(info), 2) + info if info else b""
    other = struct.pack("=HH", 5, 99) + b"x\0\0\0"
    return struct.pack("=BBBB48sIIIII", family, state, 0, 0, identity, 0, 11, 22, 1000, 33) + other + attribute


def _info(unacked: int, window: int | None) -> bytes:
    info = bytearray(232 if window is not None else 104)
    struct.pack_into("=I", info, 24, unacked)
    if window is not None:
        struct.pack_into("=I", info, 228, window)
    return bytes(info)


def test_a_message_becomes_a_connection() -> None:
    found = sockets.parse(_message(info=_info(3, 500)))
    assert (found.local, found.local_port, found.remote_port) == ("100.96.0.1", 80, 4000)
    assert (found.receive_queue, found.send_queue, found.inode) == (11, 22, 33)
    assert (found.unacked, found.send_window, len(found.identity)) == (3, 500, 48)


def test_ipv4_in_ipv6_appears_as_ipv4() -> None:
    assert sockets.parse(_message(family=socket.AF_INET6, local="::ffff:100.96.0.1")).local == "100.96.0.1"
    assert sockets.parse(_message(family=socket.AF_INET6, local="fd00::1")).local == "fd00::1"


@pytest.mark.parametrize(
    ("state", "unacked", "window", "in_flight"),
    [
        (sockets.ESTABLISHED, 0, 500, False),
        (sockets.ESTABLISHED, 2, 500, True),
        (sockets.ESTABLISHED, 2, 0, False),
        (sockets.ESTABLISHED, 2, None, True),  # a kernel that does not tell the window
        (sockets.FIN_WAIT1, 1, 500, True),
        (sockets.SYN_SENT, 1, 0, True),
        (sockets.SYN_RECEIVED, 0, None, True),
        (sockets.FIN_WAIT2, 0, 500, False),
    ],
)
def test_what_the_peers_kernel_still_owes_an_answer_for_is_in_flight(
    state: int, unacked: int, window: int | None, in_flight: bool
) -> None:
    assert sockets.parse(_message(state=state, info=_info(unacked, window))).in_flight is in_flight
