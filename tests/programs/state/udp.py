"""UDP: connected and unconnected, IPv4 and IPv6, options; datagrams that wait, large and empty, and who sent them."""

import contextlib
import os
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
    told = {(socket.SOL_SOCKET, 29): 1, (0, 8): 1, (0, 10): 3, (0, 11): 1, (0, 13): 1, (0, 33): 7, (17, 104): 1}
    for (level, option), value in told.items():
        client.setsockopt(level, option, value)
    any_v4 = socket.socket(type=socket.SOCK_DGRAM)
    any_v4.bind(("", 0))
    any_both = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    any_both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    any_both.bind(("", 0))
    bound = socket.socket(type=socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 0))
    connected = socket.socket(type=socket.SOCK_DGRAM)
    connected.bind(("127.0.0.1", 0))
    bound.connect(connected.getsockname())
    connected.connect(bound.getsockname())
    kept: list[tuple[socket.socket, bytes, int]] = []
    for number, size in enumerate((500, 0, 60_000, 1, 1400)):
        message = pattern(nonce, size, number)
        six_client.sendto(message, ("::1", any_both.getsockname()[1]))
        kept.append((any_both, message, six_client.getsockname()[1]))
        client_port = bound.getsockname()[1]
        bound.send(message)
        kept.append((connected, message, client_port))
        if number % 2:
            any_v4.sendto(message, ("127.0.0.1", any_both.getsockname()[1]))
            kept.append((any_both, message, any_v4.getsockname()[1]))
        six_client.sendto(message, ("::1", six_client.getsockname()[1]))
        kept.append((six_client, message, six_client.getsockname()[1]))
        server.sendto(message, ("127.0.0.1", any_v4.getsockname()[1]))
        kept.append((any_v4, message, names[0][1]))
    for sock in (server, client, six, any_v4, any_both, connected, six_client):
        sock.settimeout(20)
    fresh = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
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
        fresh.sendto(message, six.getsockname())
        equal(six.recv(1000), message, "a datagram over IPv6")
        equal([s.getsockname() for s in (server, client, six)], names, "addresses")
        equal(server.getsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST), 1, "an option")
        equal({key: client.getsockopt(*key) for key in told}, told, "options of what is told, cut and sent to many")
        equal(server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), 200_000, "the buffer size")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            for sock, message, port in kept:
                data, sender = sock.recvfrom(1 << 16)
                equal((len(data), sender[1]), (len(message), port), "the size of what has waited, and its sender")
                equal(data, message, "what has waited")
            for sock in (any_v4, any_both, connected, six_client):
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    equal(sock.recv(1 << 16), None, "what was never sent")
            yield
        yield


run(program)
