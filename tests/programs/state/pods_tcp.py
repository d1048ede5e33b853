"""TCP between pods: unread and unsent data both ways, half closed, not accepted yet (silent, talking, half closed)."""

import os
import socket
import threading
from collections.abc import Iterator

from kit import call_until, check, equal, pattern, run

RANK = int(os.environ["MOORAGE_RANK"])
SERVER = ("100.96.0.1", 29611)
WAITING = ("100.96.0.1", 29612)
NAMES = ("steady", "unread", "full", "half")
SECRET = b"known to both ends"


def stopped() -> bool:
    return os.path.exists(os.environ.get("STATE_STOP", "stop"))


def fill(sock: socket.socket, label: str) -> int:
    """Send until nothing goes any more; bytes sent."""
    whole, sent = pattern(SECRET, 1 << 24, label), 0
    sock.settimeout(0.5)
    try:
        while True:
            sent += sock.send(whole[sent : sent + 60_000])
    except TimeoutError:
        sock.settimeout(60)
        return sent


def whole(sock: socket.socket, size: int, label: str) -> None:
    got = bytearray()
    while len(got) < size and (part := sock.recv(1 << 18)):
        got += part
    check(got == pattern(SECRET, 1 << 24, label)[:size], f"{label}: {len(got)} bytes of {size}")


def tell(sock: socket.socket, number: int) -> None:
    sock.sendall(b"%09d\n" % number)


def told(sock: socket.socket) -> int:
    return int(sock.recv(10, socket.MSG_WAITALL) or b"0")


def server() -> Iterator[None]:
    listener, waiting = socket.create_server(SERVER, backlog=9), socket.create_server(WAITING, backlog=9)
    found = [listener.accept()[0] for _ in NAMES]
    for sock in found:
        sock.settimeout(60)
    steady, unread, full, half = found
    unread.sendall(pattern(SECRET, 10_000, "to the client"))
    sent = fill(full, "full to the client")
    equal(told(steady), 1, "the client is ready")
    wrong: list[str] = []

    def echo() -> None:
        try:
            while (step := told(steady)) > 0:
                tell(steady, step)
        except (OSError, ValueError) as error:
            wrong.append(f"{type(error).__name__} {error}")

    thread = threading.Thread(target=echo)
    thread.start()
    yield
    while True:
        check(not wrong, f"the steady connection: {wrong}")
        if stopped():
            thread.join(60)  # the client has said that it begins to end
            check(not wrong and not thread.is_alive(), f"the steady connection: {wrong}")
            tell(steady, sent)
            size = told(steady)
            whole(full, size, "full to the server")
            data = unread.recv(10_000, socket.MSG_WAITALL)
            equal(data, pattern(SECRET, 10_000, "to the server"), "what was unread")
            equal((half.recv(100), half.recv(1)), (b"last words", b""), "the half closed connection")
            half.sendall(b"answer")
            waiting.settimeout(60)
            silent, talker, ended = (waiting.accept()[0] for _ in range(3))
            for sock in (silent, talker, ended):
                sock.settimeout(60)
            data = talker.recv(30_000, socket.MSG_WAITALL)
            equal(data, pattern(SECRET, 30_000, "talker"), "what came before it was accepted")
            equal((ended.recv(100), ended.recv(1)), (b"ended", b""), "what came before the end")
            for sock in (silent, talker, ended):
                sock.sendall(b"welcome")
            equal((silent.recv(10), talker.recv(10)), (b"thanks", b"thanks"), "the thanks")
            tell(steady, 7)
            yield
        yield


def client() -> Iterator[None]:
    found = []
    for _ in NAMES:  # one after the other, so that the server knows which is which
        found.append(call_until(lambda: socket.create_connection(SERVER, timeout=60)))
    steady, unread, full, half = found
    unread.sendall(pattern(SECRET, 10_000, "to the server"))
    sent = fill(full, "full to the server")
    half.sendall(b"last words")
    half.shutdown(socket.SHUT_WR)
    silent, talker, ended = (call_until(lambda: socket.create_connection(WAITING, timeout=60)) for _ in range(3))
    talker.sendall(pattern(SECRET, 30_000, "talker"))
    ended.sendall(b"ended")
    ended.shutdown(socket.SHUT_WR)
    names = [sock.getsockname() for sock in (*found, silent, talker, ended)]
    step = 1
    tell(steady, step)
    yield
    while True:
        step += 1
        tell(steady, step)
        equal(told(steady), step, "the answer")
        equal([sock.getsockname() for sock in (*found, silent, talker, ended)], names, "addresses")
        if stopped():
            tell(steady, 0)
            size = told(steady)
            tell(steady, sent)
            whole(full, size, "full to the client")
            data = unread.recv(10_000, socket.MSG_WAITALL)
            equal(data, pattern(SECRET, 10_000, "to the client"), "what was unread")
            equal(half.recv(10), b"answer", "the other way of the half closed connection")
            for sock in (silent, talker, ended):
                equal(sock.recv(7, socket.MSG_WAITALL), b"welcome", "the welcome of one that waited")
            silent.sendall(b"thanks")
            talker.sendall(b"thanks")
            equal(told(steady), 7, "the server's last word")
            yield
        yield


def program(nonce: bytes) -> Iterator[None]:
    return client() if RANK else server()


run(program)
