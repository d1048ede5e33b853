"""Unix connections not accepted yet: their order, data, packets, half closed, closed; a client in an epoll."""

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator

from kit import check, equal, pattern, run

STREAM, PACKETS = socket.SOCK_STREAM, socket.SOCK_SEQPACKET


def connect(address: str, kind: int = STREAM) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, kind)
    client.connect(address)
    return client


def program(nonce: bytes) -> Iterator[None]:
    named, abstract, packets = (socket.socket(socket.AF_UNIX, kind) for kind in (STREAM, STREAM, PACKETS))
    named.bind("unaccepted")
    abstract.bind(f"\0{nonce.hex()} unaccepted")
    packets.bind("unaccepted packets")
    for listener in (named, abstract, packets):
        listener.listen(16)
    clients = []
    for number in range(4):
        clients.append(connect("unaccepted"))
        clients[-1].sendall(pattern(nonce, 10, number))
    ended = connect("unaccepted")
    ended.sendall(b"last words")
    ended.close()
    half = connect("unaccepted")
    half.sendall(b"no more")
    half.shutdown(socket.SHUT_WR)
    silent = connect("unaccepted")
    full = connect(f"\0{nonce.hex()} unaccepted")
    full.setblocking(False)
    whole, sent = pattern(nonce, 1 << 20), 0
    try:
        while True:
            sent += full.send(whole[sent : sent + 3000])
    except BlockingIOError:
        pass
    small = connect("unaccepted packets", PACKETS)
    for number in range(5):
        small.send(pattern(nonce, 100 + number, number))
    small.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 60_000)
    # A client that waits for its answer: in an epoll, and by a thread that reads.
    epoll = select.epoll()
    epoll.register(clients[0], select.EPOLLIN)
    copy = os.dup(clients[0].fileno())
    answers: list[bytes] = []
    servers: list[socket.socket] = []

    def accept(listener: socket.socket) -> socket.socket:
        servers.append(listener.accept()[0])
        return servers[-1]

    reader = threading.Thread(target=lambda: answers.append(clients[1].recv(100)), daemon=True)
    reader.start()
    yield
    while True:
        equal(epoll.poll(0), [], "nothing has been answered yet")
        check(reader.is_alive(), "a thread waits for an answer")
        equal((full.getblocking(), os.get_inheritable(full.fileno())), (False, False), "flags of a client")
        equal(small.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), 120_000, "the buffer size")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            for number in range(4):
                server = accept(named)
                equal(server.recv(100), pattern(nonce, 10, number), f"what client {number} sent")
                pid = struct.unpack("iii", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                equal(pid, os.getpid(), "who the client is")
                server.sendall(b"answer %d" % number)
                if number != 1:
                    equal(clients[number].recv(100, socket.MSG_PEEK), b"answer %d" % number, "its answer")
            equal(epoll.poll(5), [(clients[0].fileno(), select.EPOLLIN)], "the client's epoll")
            equal(os.read(copy, 100), b"answer 0", "a copy of its descriptor")
            reader.join(10)
            equal(answers, [b"answer 1"], "the thread that read")
            server = accept(named)
            equal((server.recv(100), server.recv(100)), (b"last words", b""), "a client that has ended")
            server = accept(named)
            equal((server.recv(100), server.recv(100)), (b"no more", b""), "a half closed one")
            server.sendall(b"still")
            equal(half.recv(100), b"still", "the other way")
            server = accept(named)
            silent.sendall(b"late")
            equal(server.recv(100), b"late", "one that sent nothing before")
            server = accept(abstract)
            got = b""
            while len(got) < sent:
                got += server.recv(1 << 16)
            check(got == whole[:sent], "what was in the full connection")
            server = accept(packets)
            for number in range(5):
                equal(server.recv(1000), pattern(nonce, 100 + number, number), "a packet")
            yield
        yield


run(program)
