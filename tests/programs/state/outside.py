"""Connections over `ext0`, to the world and from it: they stay when the pod runs on, and end at once after a move."""

import os
import pathlib
import socket
import threading
from collections.abc import Iterator

from kit import call_until, check, equal, run

HOST, _, PORT = os.environ["STATE_OUTSIDE"].partition(":")
MOVES = pathlib.Path(os.environ["STATE_STOP"]).with_name("moves-" + os.environ["MOORAGE_RANK"])
PUBLISHED = 8080


class Ends:
    """How often each kind of connection came to an end."""

    def __init__(self) -> None:
        self.talking = self.idle = 0


def connect() -> socket.socket:
    connection: socket.socket = call_until(lambda: socket.create_connection((HOST, int(PORT)), timeout=60))
    return connection


def program(nonce: bytes) -> Iterator[None]:
    ends = Ends()

    def be_idle() -> None:
        while True:
            with connect() as quiet:
                quiet.settimeout(None)
                try:
                    quiet.recv(1)  # nobody ever sends: only a reset ends this
                except ConnectionError:
                    ends.idle += 1

    def serve(listener: socket.socket) -> None:
        while True:
            with listener.accept()[0] as caller:
                try:
                    while data := caller.recv(100):
                        caller.sendall(data)
                except ConnectionError:
                    pass  # the test looks at the other end

    talking = connect()
    listener = socket.create_server(("", PUBLISHED))
    threading.Thread(target=be_idle, daemon=True).start()
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    step = 0
    yield
    while True:
        step += 1
        message = b"%09d\n" % step
        try:
            talking.sendall(message)
            equal(talking.recv(10, socket.MSG_WAITALL), message, "the echo")
        except ConnectionError:
            ends.talking += 1
            talking.close()
            talking = connect()
        if os.path.exists(os.environ["STATE_STOP"]):
            moves, restores = map(int, MOVES.read_text().split())

            def ended(moves: int = moves, restores: int = restores) -> None:
                # A busy one may also end when its pod is restored on its node: an answer came while there was no pod.
                right = ends.idle == moves <= ends.talking <= restores
                check(right, f"{vars(ends)} after {moves} moves and {restores} restores")

            call_until(ended)
            yield
        yield


run(program)
