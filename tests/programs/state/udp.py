"""UDP: connected and unconnected, IPv4 and IPv6, options. Datagrams that wait are dropped by a restore, as UDP may."""

import socket
from collections.abc import Iterator

from kit import equal, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    server = socket.socket(type=socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(type=socket.SOCK_DGRAM)
    client.connect(server.getsockname())
    six = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    six.bind(("::1", 0))
    six_client = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
    names = [s.getsockname() for s in (server, client, six)]
    for sock in (server, client, six):
        sock.settimeout(20)
    step = 0
    yield
    while True:
        step += 1
        message = pattern(nonce, 500, step)
        client.send(message)
        data, sender = server.recvfrom(1000)
        equal((data, sender), (message, names[1]), "a datagram and its sender")
        server.sendto(b"%d" % step, sender)
        equal(client.recv(100), b"%d" % step, "the answer")
        six_client.sendto(message, six.getsockname())
        equal(six.recv(1000), message, "a datagram over IPv6")
        equal([s.getsockname() for s in (server, client, six)], names, "addresses")
        equal(server.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST), 1, "an option")
        equal(server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), 200_000, "the buffer size")
        yield


run(program)
