"""TCP connections not accepted yet: silent, with data, full, half closed, closed; IPv4, IPv6, both at one listener."""

import contextlib
import os
import socket
from collections.abc import Iterator

from kit import check, equal, pattern, run


def listen(host: str) -> socket.socket:
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, 0), family=family, backlog=10)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=10)


class Server:
    """A listener and the connections that wait at it."""

    def __init__(self, host: str, nonce: bytes) -> None:
        self.nonce = nonce
        self.listener = listen(host)
        self.address = (host or "127.0.0.1", self.listener.getsockname()[1])
        clients = [socket.create_connection(self.address) for _ in range(5)]
        self.silent, self.talker, self.ended, gone, self.full = clients
        whole = pattern(nonce, 1 << 24, "full")
        self.talker.sendall(pattern(nonce, 50_000, "talker"))
        self.ended.sendall(pattern(nonce, 100, "ended"))
        self.ended.shutdown(socket.SHUT_WR)
        gone.sendall(pattern(nonce, 200, "gone"))
        self.names = [s.getsockname() for s in (self.silent, self.talker, self.ended, gone, self.full)]
        gone.close()
        self.full.setblocking(False)
        self.sent = 0
        try:
            while True:
                self.sent += self.full.send(whole[self.sent : self.sent + 60_000])
        except BlockingIOError:
            self.full.settimeout(20)

    def look(self) -> None:
        clients = (self.silent, self.talker, self.ended)
        equal([s.getsockname() for s in clients], self.names[:3], "the clients' addresses")
        for client in clients:
            with contextlib.suppress(BlockingIOError):
                equal(client.recv(1, socket.MSG_DONTWAIT), None, "what nobody has sent")

    def end(self) -> None:
        accepted = [self.listener.accept() for _ in self.names]
        plain = [(peer[0].removeprefix("::ffff:"), peer[1]) for _, peer in accepted]
        equal(plain, [name[:2] for name in self.names], "who is accepted, and in which order")
        silent, talker, ended, gone, full = (connection for connection, _ in accepted)
        for connection, _ in accepted:
            connection.settimeout(20)
        for connection, label, size in ((talker, "talker", 50_000), (ended, "ended", 100), (gone, "gone", 200)):
            equal(
                connection.recv(size, socket.MSG_WAITALL), pattern(self.nonce, size, label), f"{label}: what was sent"
            )
        for connection in (ended, gone):
            equal(connection.recv(1), b"", "the end of it")
        got = bytearray()
        while len(got) < self.sent:
            got += full.recv(1 << 18)
        check(got == pattern(self.nonce, 1 << 24, "full")[: self.sent], "unsent and unread data")
        for connection, client in (
            (silent, self.silent),
            (talker, self.talker),
            (ended, self.ended),
            (full, self.full),
        ):
            connection.sendall(b"welcome" * 10_000)
            equal(client.recv(70_000, socket.MSG_WAITALL), b"welcome" * 10_000, "the answer")
        for connection, client in ((silent, self.silent), (talker, self.talker), (full, self.full)):
            client.sendall(b"thanks")
            equal(connection.recv(10), b"thanks", "the thanks")
            client.close()
            equal(connection.recv(10), b"", "the client's end")
        again = socket.create_connection(self.address)
        equal(self.listener.accept()[1][1], again.getsockname()[1], "a new connection")


def program(nonce: bytes) -> Iterator[None]:
    servers = [Server(host, nonce) for host in ("127.0.0.1", "::1", "")]
    yield
    while True:
        for server in servers:
            server.look()
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            for server in servers:
                server.end()
            yield
        yield


run(program)
