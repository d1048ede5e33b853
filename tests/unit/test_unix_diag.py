"""What the kernel tells of unix sockets, and which of their connections have to be made again."""

from __future__ import annotations

import os
import socket
import struct

from moorage.worker import unaccepted, unix_diag
from moorage.worker.extra_record import Early
from moorage.worker.unix_diag import UnixSocket


def test_an_answer_is_read() -> None:
    head = struct.pack("=BBBBIII", socket.AF_UNIX, socket.SOCK_STREAM, unix_diag.LISTENING, 0, 77, 0, 0)
    waiting = struct.pack("=HH3I", 16, 3, 5, 0, 6)
    queues = struct.pack("=HHII", 12, 4, 3, 128)
    assert unix_diag.parse(head + waiting + queues) == UnixSocket(77, 1, 10, waiting=(5, 0, 6), backlog=128)
    head = struct.pack("=BBBBIII", socket.AF_UNIX, socket.SOCK_SEQPACKET, 1, 0, 5, 0, 0)
    more = struct.pack("=HHI", 8, 2, 9) + struct.pack("=HHBxxx", 5, 6, 2) + struct.pack("=HHII", 12, 4, 0, 512)
    assert unix_diag.parse(head + more) == UnixSocket(5, 5, 1, peer=9, unread=512, shutdown=2)


def test_the_kernel_is_asked_for_what_waits() -> None:
    name = f"\0unix-diag-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(name)
        listener.listen(2)
        client.connect(name)
        client.sendall(b"hello")
        with socket.socket(socket.AF_UNIX) as ended:
            ended.connect(name)
        own, other = (os.fstat(sock.fileno()).st_ino for sock in (listener, client))
        table = unix_diag.read()
        assert table[own].waiting == (other, 0) and table[other].unread > 0
        assert own in {one.inode for one in unaccepted.awaited(table)}


def test_only_connections_that_criu_cannot_save_are_made_again() -> None:
    def table(*clients: UnixSocket, closed: int = 0) -> dict[int, UnixSocket]:
        waiting = (*(client.inode for client in clients), *(0 for _ in range(closed)))
        listener = UnixSocket(1, 1, unix_diag.LISTENING, waiting=waiting)
        return {one.inode: one for one in (listener, *clients)}

    def judged(found: dict[int, UnixSocket]) -> tuple[int, int]:
        return len(unaccepted.awaited(found)), len(unaccepted.in_order(found))

    silent, other = UnixSocket(2, 1, 1), UnixSocket(3, 1, 1)
    assert judged(table()) == (0, 0)
    assert judged(table(silent)) == (0, 0)
    assert judged(table(silent, other)) == (0, 1), "CRIU saves them, and restores them in any order"
    assert judged(table(silent._replace(unread=1))) == (1, 0)
    assert judged(table(silent, other._replace(shutdown=2))) == (1, 0)
    assert judged(table(silent, closed=1)) == (1, 0)


def test_what_criu_has_connected_is_right_only_if_nothing_has_to_stand_in_a_row() -> None:
    one = Early((1, 3), (2, 4), 1, [b"x"])
    assert unaccepted.settled([one, Early((1, 5), (2, 6), 1)])
    assert not unaccepted.settled([one, Early((1, 3), (2, 6), 1)])
    assert not unaccepted.settled([Early((1, 3), None, 1)])
