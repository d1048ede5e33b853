"""UDP that is held back (UDP_CORK, MSG_MORE), connected and not, IPv4 and IPv6; the option itself."""

import os
import socket
from collections.abc import Iterator

from kit import equal, pattern, run

SOL_UDP, UDP_CORK = 17, 1


def program(nonce: bytes) -> Iterator[None]:
    server = socket.socket(type=socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    both = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    both.bind(("::", 0))
    server.settimeout(5)
    both.settimeout(5)
    senders = []
    for number, (family, target, connected, option) in enumerate(
        (
            (socket.AF_INET, server.getsockname(), True, True),
            (socket.AF_INET, server.getsockname(), False, False),
            (socket.AF_INET6, ("::1", both.getsockname()[1]), True, False),
            (socket.AF_INET6, ("::1", both.getsockname()[1]), False, True),
            (socket.AF_INET6, ("::ffff:127.0.0.1", server.getsockname()[1]), False, False),
        )
    ):
        sender = socket.socket(family, socket.SOCK_DGRAM)
        if connected:
            sender.connect(target)
        if option:
            sender.setsockopt(SOL_UDP, UDP_CORK, 1)
        for piece in range(3):
            sender.sendto(pattern(nonce, 1 + 5000 * number, piece), 0 if option else socket.MSG_MORE, target)
        senders.append((sender, option, server if "." in target[0] else both, target))
    empty = socket.socket(type=socket.SOCK_DGRAM)
    empty.setsockopt(SOL_UDP, UDP_CORK, 1)
    yield
    while True:
        equal([sender.getsockopt(SOL_UDP, UDP_CORK) for sender, *_ in senders], [1, 0, 0, 1, 0], "UDP_CORK")
        equal(empty.getsockopt(SOL_UDP, UDP_CORK), 1, "UDP_CORK of a socket that holds nothing back")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            for number, (sender, option, receiver, target) in enumerate(senders):
                if option:
                    sender.setsockopt(SOL_UDP, UDP_CORK, 0)
                else:
                    sender.sendto(b"end", target)
                wanted = b"".join(pattern(nonce, 1 + 5000 * number, piece) for piece in range(3))
                data, name = receiver.recvfrom(1 << 16)
                equal(data, wanted + (b"" if option else b"end"), f"what sender {number} held back")
                equal(name[1], sender.getsockname()[1], "who sent it")
            yield
        yield


run(program)
