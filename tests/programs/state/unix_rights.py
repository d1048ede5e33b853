"""Descriptors in flight: files, pipes, sockets in a unix socket's queue; a listening one with a connection waiting."""

import os
import socket
from collections.abc import Iterator

from kit import equal, pattern, run


def program(nonce: bytes) -> Iterator[None]:
    left, right = socket.socketpair()
    dgram_left, dgram_right = socket.socketpair(type=socket.SOCK_DGRAM)
    file = os.open("file", os.O_RDWR | os.O_CREAT)
    os.write(file, pattern(nonce, 1000))
    os.lseek(file, 123, os.SEEK_SET)
    read, write = os.pipe()
    os.write(write, b"in the pipe")
    inner = socket.socketpair()
    inner[0].sendall(b"in the socket")

    def post(sock: socket.socket, text: bytes, fds: list[int]) -> None:
        socket.send_fds(sock, [text], fds)
        for fd in fds:
            os.close(fd)

    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    client.sendall(b"not accepted")
    third, fourth = socket.socketpair()
    third.sendall(b"before")
    post(third, b"listener", [listener.detach()])
    post(left, b"file", [file])
    post(dgram_left, b"both", [read, inner[1].detach()])
    yield
    while True:
        text, fds, _, _ = socket.recv_fds(right, 100, 4)
        equal((text, len(fds)), (b"file", 1), "a message with a descriptor")
        equal(os.lseek(fds[0], 0, os.SEEK_CUR), 123, "the offset of a file in flight")
        equal(os.pread(fds[0], 1000, 0), pattern(nonce, 1000), "its content")
        post(left, b"file", fds)
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            text, fds, _, _ = socket.recv_fds(dgram_right, 100, 4)
            equal((text, len(fds)), (b"both", 2), "a datagram with descriptors")
            equal(os.read(fds[0], 100), b"in the pipe", "the pipe")
            equal(fourth.recv(6), b"before", "what was sent before the listener")
            text, passed, _, _ = socket.recv_fds(fourth, 100, 4)
            equal((text, len(passed)), (b"listener", 1), "a message with a listener")
            with socket.socket(fileno=passed[0]) as listening, listening.accept()[0] as accepted:
                equal(accepted.recv(100), b"not accepted", "the connection that waited")
                accepted.sendall(b"welcome")
                equal(client.recv(100), b"welcome", "the answer")
            with socket.socket(fileno=fds[1]) as other:
                equal(other.recv(100), b"in the socket", "the socket")
                other.sendall(b"back")
                equal(inner[0].recv(10), b"back", "the way back")
            yield
        yield


run(program)
