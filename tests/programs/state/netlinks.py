"""Netlink sockets: with an address of their own, bound to a group of events, asking the kernel all the time."""

import socket
import struct
from collections.abc import Iterator

from kit import check, equal, run

GET_LINK = 18


def ask(sock: socket.socket, number: int) -> None:
    sock.send(struct.pack("=IHHII", 32, GET_LINK, 0x301, number, 0) + bytes(16))


def answers(sock: socket.socket, number: int) -> int:
    count = 0
    while True:
        data = sock.recv(1 << 16)
        at = 0
        while at < len(data):
            length, kind, _, sequence, _ = struct.unpack_from("=IHHII", data, at)
            equal(sequence, number, "the number of the answer")
            if kind == 3:
                return count
            count += 1
            at += (length + 3) & ~3


def program(nonce: bytes) -> Iterator[None]:
    plain = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    plain.bind((0, 0))
    group = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    group.bind((0, 1))
    plain.settimeout(20)
    name, number = plain.getsockname(), 0
    yield
    while True:
        number += 1
        ask(plain, number)
        check(answers(plain, number) >= 1, "the kernel's answer")
        equal(plain.getsockname(), name, "the address")
        yield


run(program)
