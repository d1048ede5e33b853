"""Segments and datagrams are laid out and summed as the protocols want it."""

from __future__ import annotations

import socket
import struct

import pytest

from moorage.worker.network import packets, rules

_ENDS = [(("127.0.0.1", 1), ("127.0.0.1", 2)), (("::1", 1), ("::1", 2)), (("100.96.0.1", 65535), ("100.96.0.2", 80))]


def _sums_up(packet: bytes, protocol: int) -> bool:
    six = packet[0] >> 4 == 6
    addresses = packet[8:40] if six else packet[12:20]
    body = packet[40:] if six else packet[20:]
    length = struct.pack("!II", len(body), protocol) if six else struct.pack("!HH", protocol, len(body))
    return packets.checksum(addresses + length + body) == 0


@pytest.mark.parametrize("ends", _ENDS)
@pytest.mark.parametrize("data", [b"", b"x", b"\xff\xff" * 700, bytes(9)])
def test_the_sum_over_segment_and_datagram_is_right(ends: tuple[tuple[str, int], tuple[str, int]], data: bytes) -> None:
    source, target = ends
    made = packets.segment(
        source, target, sequence=-1, acknowledged=1 << 32, flags=packets.ACK, window=7,
        options=b"\2\4\5\xb4\3\3\7", data=data,
    )  # fmt: skip
    assert _sums_up(made, socket.IPPROTO_TCP)
    body = made[40:] if ":" in source[0] else made[20:]
    ports, numbers = struct.unpack_from("!HH", body), struct.unpack_from("!II", body, 4)
    assert (ports, numbers) == ((source[1], target[1]), (0xFFFFFFFF, 0))
    assert body[(body[12] >> 4) * 4 :] == data
    datagram = packets.datagram(source, target, data)
    assert _sums_up(datagram, socket.IPPROTO_UDP)
    assert datagram.endswith(struct.pack("!H", 8 + len(data)) + datagram[-len(data) - 2 :][:2] + data)


def test_a_sum_of_zero_is_written_as_it_is_for_tcp_and_as_its_other_form_for_udp() -> None:
    # What makes the sum zero: the complement of the sum that the rest has.
    plain = packets.datagram(("127.0.0.1", 1), ("127.0.0.1", 2), bytes(2))
    (had,) = struct.unpack_from("!H", plain, 26)
    zero = packets.datagram(("127.0.0.1", 1), ("127.0.0.1", 2), struct.pack("!H", had))
    assert zero[26:28] == b"\xff\xff"


def test_the_shield_drops_both_directions_but_not_what_bears_the_mark() -> None:
    text = rules.shield(5, [80], [(("100.96.0.1", 80), ("100.96.0.2", 4000)), (("::1", 1), ("::1", 2))])
    lines = text.splitlines()
    assert lines.index("add rule inet moorage-shield pre meta mark 5 accept") < min(
        number for number, line in enumerate(lines) if line.endswith("drop")
    )
    assert sum(line.endswith("drop") for line in lines) == 6
    assert "ip saddr 100.96.0.2 ip daddr 100.96.0.1 tcp sport 4000 tcp dport 80 drop" in text
    assert "ip6 saddr ::1 ip6 daddr ::1 tcp sport 2 tcp dport 1 drop" in text
