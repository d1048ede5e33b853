"""UDP between pods: datagrams that nobody has read yet, small, empty and in fragments, and an exchange all the time."""

import os
import socket
import threading
import time
from collections.abc import Iterator

from kit import call_until, check, equal, pattern, run

RANK = int(os.environ["MOORAGE_RANK"])
HOSTS = ("100.96.0.1", "100.96.0.2")
TALK, KEPT = 29621, 29622
SIZES = (10, 0, 1400, 9000, 1, 40_000)
DONE = b"done"
SECRET = b"known to both ends"


def bound(port: int) -> socket.socket:
    sock = socket.socket(type=socket.SOCK_DGRAM)
    sock.bind((HOSTS[RANK], port))
    return sock


def program(nonce: bytes) -> Iterator[None]:
    talk, kept = bound(TALK), bound(KEPT)
    other = (HOSTS[1 - RANK], TALK)
    asking = socket.socket(type=socket.SOCK_DGRAM)
    asking.settimeout(0.5)

    done = threading.Event()

    def serve() -> None:
        while True:
            data, sender = talk.recvfrom(1000)
            talk.sendto(data, sender)
            if data == DONE:
                done.set()

    threading.Thread(target=serve, daemon=True).start()

    def ask(message: bytes) -> None:
        # As programs that use UDP do: ask again when no answer comes.

        def once() -> None:
            asking.sendto(message, other)
            while asking.recv(1000) != message:
                pass  # the answer to an earlier question

        call_until(once)

    ask(pattern(nonce, 500, 0))
    for number, size in enumerate(SIZES):
        kept.sendto(pattern(SECRET, size, number), (HOSTS[1 - RANK], KEPT))
    step = 0
    yield
    while True:
        step += 1
        ask(pattern(nonce, 500, step))
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            kept.settimeout(60)
            for number, size in enumerate(SIZES):
                data, sender = kept.recvfrom(1 << 16)
                equal((len(data), sender), (size, (HOSTS[1 - RANK], KEPT)), "what has waited, and its sender")
                equal(data, pattern(SECRET, size, number), "what has waited")
            ask(DONE)
            check(done.wait(60), "the other end has not come to its end")
            time.sleep(2)  # its question may come once more
            yield
        yield


run(program)
