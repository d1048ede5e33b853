"""TCP over the loopback: unread and unsent data, half closed, urgent settings, IPv4 and IPv6, a listener."""

import os
import socket
from collections.abc import Iterator

from kit import check, equal, pattern, run

OPTIONS = [
    (socket.SOL_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.SOL_TCP, socket.TCP_KEEPIDLE, 77),
    (socket.SOL_TCP, socket.TCP_KEEPINTVL, 11),
    (socket.SOL_TCP, socket.TCP_KEEPCNT, 5),
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
    (socket.SOL_TCP, socket.TCP_USER_TIMEOUT, 3_600_000),
    (socket.SOL_IP, socket.IP_TOS, 16),
    (socket.SOL_SOCKET, socket.SO_PRIORITY, 4),
]


def connect(listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(listener.getsockname()[:2])
    return client, listener.accept()[0]


def program(nonce: bytes) -> Iterator[None]:
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6)]
    pairs = [connect(listener) for listener in listeners]
    for client, _ in pairs:
        client.sendall(pattern(nonce, 10_000, 0))
    for level, option, value in OPTIONS:
        pairs[0][0].setsockopt(level, option, value)
    full = connect(listeners[0])
    full[0].setblocking(False)
    whole, sent = pattern(nonce, 1 << 24), 0
    try:
        while True:
            sent += full[0].send(whole[sent : sent + 60_000])
    except BlockingIOError:
        pass
    half = connect(listeners[0])
    half[0].sendall(b"last words")
    half[0].shutdown(socket.SHUT_WR)
    unbound = socket.socket()
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    address = bound.getsockname()
    names = [(client.getsockname(), client.getpeername()) for client, _ in pairs]
    step = 0
    yield
    while True:
        step += 1
        for client, server in pairs:
            client.sendall(pattern(nonce, 10_000, step))
            equal(server.recv(10_000, socket.MSG_WAITALL), pattern(nonce, 10_000, step - 1), "what was unread")
            server.sendall(b"%d" % step)
            equal(client.recv(100), b"%d" % step, "the answer")
        for level, option, value in OPTIONS:
            equal(pairs[0][0].getsockopt(level, option), value, f"socket option {level} {option}")
        equal([(client.getsockname(), client.getpeername()) for client, _ in pairs], names, "addresses")
        equal(bound.getsockname(), address, "the address of a socket that is only bound")
        if step % 10 == 0:
            fresh = connect(listeners[step // 10 % 2])
            fresh[0].sendall(b"hello")
            equal(fresh[1].recv(5), b"hello", "a new connection")
            for sock in fresh:
                sock.close()
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal((half[1].recv(100), half[1].recv(1)), (b"last words", b""), "the half closed connection")
            half[1].sendall(b"answer")
            equal(half[0].recv(10), b"answer", "the other way")
            got = bytearray()
            while len(got) < sent:
                got += full[1].recv(1 << 18)
            check(got == whole[:sent], "unsent and unread data")
            unbound.connect(listeners[0].getsockname())
            yield
        yield


run(program)
