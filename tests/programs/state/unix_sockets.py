"""Unix sockets: stream, datagram, packets, with data unread, a full buffer, half closed, not yet accepted, no name."""

import os
import socket
from collections.abc import Iterator

from kit import check, equal, pattern, run

AF, STREAM, DGRAM, PACKETS = socket.AF_UNIX, socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET


def program(nonce: bytes) -> Iterator[None]:
    pairs = {kind: socket.socketpair(AF, kind) for kind in (STREAM, DGRAM, PACKETS)}
    for left, _ in pairs.values():
        left.sendall(pattern(nonce, 100, 0))
    full = socket.socketpair(AF, STREAM)
    full[0].setblocking(False)
    whole, sent = pattern(nonce, 1 << 21), 0
    try:
        while True:
            sent += full[0].send(whole[sent : sent + 4000])
    except BlockingIOError:
        pass
    half = socket.socketpair(AF, STREAM)
    half[0].sendall(b"last words")
    half[0].shutdown(socket.SHUT_WR)
    listener = socket.socket(AF, STREAM)
    listener.bind("stream")
    listener.listen(8)
    client = socket.socket(AF, STREAM)
    client.connect("stream")
    accepted, _ = listener.accept()
    early = socket.socket(AF, STREAM)
    early.connect("stream")  # not accepted before the end
    server = socket.socket(AF, DGRAM)
    server.bind("datagrams")
    friend = socket.socket(AF, DGRAM)
    friend.bind("friend")
    friend.connect("datagrams")
    friend.send(pattern(nonce, 60, 0))
    removed = socket.socket(AF, DGRAM)
    removed.bind("removed")
    speaker = socket.socket(AF, DGRAM)
    speaker.connect("removed")
    os.unlink("removed")
    abstract = socket.socket(AF, DGRAM)
    abstract.bind("\0" + nonce.hex())
    friend.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 50_000)
    step = 0
    yield
    while True:
        step += 1
        for kind, (left, right) in pairs.items():
            left.sendall(pattern(nonce, 100, step))
            equal(right.recv(100), pattern(nonce, 100, step - 1), f"what was in the socket of {kind!r}")
        client.sendall(b"%d" % step)
        equal(accepted.recv(100), b"%d" % step, "the accepted connection")
        friend.send(pattern(nonce, 60, step))
        message, sender = server.recvfrom(100)
        equal((message, sender), (pattern(nonce, 60, step - 1), "friend"), "a datagram and its sender")
        speaker.send(b"still")
        equal(removed.recv(10), b"still", "a socket whose name was removed")
        with socket.socket(AF, DGRAM) as stranger:
            stranger.sendto(b"by name", "\0" + nonce.hex())
        equal(abstract.recv(10), b"by name", "a socket with an abstract name")
        equal(friend.getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED), 1, "SO_PASSCRED")
        equal(server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), 100_000, "the buffer size")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            early.sendall(pattern(nonce, 50, "early"))
            late, _ = listener.accept()
            equal(late.recv(100), pattern(nonce, 50, "early"), "the connection that waited to be accepted")
            late.sendall(b"welcome")
            equal(early.recv(10), b"welcome", "the answer")
            equal((half[1].recv(100), half[1].recv(1)), (b"last words", b""), "the half closed socket")
            half[1].sendall(b"answer")
            equal(half[0].recv(10), b"answer", "the other way")
            got = b""
            while len(got) < sent:
                got += full[1].recv(1 << 16)
            check(got == whole[:sent], "what was in the full socket")
            yield
        yield


run(program)
