"""TCP connections that the listening program has not accepted yet, silent and with data, the client alive or gone."""

import os
import socket
from collections.abc import Iterator

from kit import equal, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=10)
    address = listener.getsockname()
    silent = socket.create_connection(address)
    talker = socket.create_connection(address)
    talker.sendall(pattern(nonce, 5000, "talker"))
    ended = socket.create_connection(address)
    ended.sendall(pattern(nonce, 100, "ended"))
    ended.shutdown(socket.SHUT_WR)
    gone = socket.create_connection(address)
    gone.sendall(pattern(nonce, 200, "gone"))
    names = [s.getsockname() for s in (silent, talker, ended, gone)]
    gone.close()
    yield
    while True:
        equal([s.getsockname() for s in (silent, talker, ended)], names[:3], "the clients' addresses")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            server = {}
            for _ in names:
                connection, peer = listener.accept()
                server[peer] = connection
            equal(set(server), set(names), "who is accepted")
            first, second, third, fourth = (server[name] for name in names)
            equal(second.recv(5000, socket.MSG_WAITALL), pattern(nonce, 5000, "talker"), "what was sent before")
            equal(third.recv(1000, socket.MSG_WAITALL), pattern(nonce, 100, "ended"), "what was sent before the end")
            equal(fourth.recv(1000, socket.MSG_WAITALL), pattern(nonce, 200, "gone"), "what one who is gone has sent")
            for connection, client in ((first, silent), (second, talker), (third, ended)):
                connection.sendall(b"welcome")
                equal(client.recv(10), b"welcome", "the answer")
            for connection, client in ((first, silent), (second, talker)):
                client.sendall(b"thanks")
                equal(connection.recv(10), b"thanks", "the thanks")
            yield
        yield


run(program)
