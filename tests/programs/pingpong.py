"""Ranks that talk over TCP in lockstep and keep a digest of all that they heard.

Rank 0 listens on ``MASTER_ADDR:MASTER_PORT``, the others connect to it once and for ever. In each step every rank sends
its digest to rank 0, which folds them into the common one and sends that back. So every digest depends on every message
before it, and a test knows the last one beforehand: `expected_digest`.

Each rank appends ``seq digest nonce pid`` to ``rank<R>.txt`` in the working directory after each step. At the end it
prints one line, ``done key=value …``: nonce (random at start), pid, start time of the process as noted at its start
(``started``) and as it is now (``body``: another one after a restore), steps and digest.

Exit codes: 70 a message is missing, doubled or damaged; 71 a connection was lost; 72 no connection within a minute.

``--witness PATH`` (a live mount) gets one line for each step: ``realtime_ns rank nonce body seq``. ``body`` tells one
running process from another even when both were restored from the same checkpoint; see tests/support/judge.py.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import socket
import struct
import time
from typing import NoReturn

_HEADER = struct.Struct("!QII32s")  # seq, rank, length of the padding, digest
_START = b"\0" * 32
_CONNECT_SECONDS = 60.0


def padding(seq: int, rank: int, size: int) -> bytes:
    """Bytes that only the right message has."""
    block = hashlib.sha256(b"%d %d" % (seq, rank)).digest()
    return (block * (size // 32 + 1))[:size]


def fold(seq: int, digests: list[bytes]) -> bytes:
    """The common digest of a step from those of all ranks."""
    return hashlib.sha256(b"%d" % seq + b"".join(digests)).digest()


def advance(own: bytes, common: bytes, rank: int) -> bytes:
    """A rank's next digest."""
    return hashlib.sha256(own + common + b"%d" % rank).digest()


def expected_digest(world: int, steps: int, rank: int) -> str:
    """What the rank prints at the end."""
    digests = [_START] * world
    for seq in range(1, steps + 1):
        common = fold(seq, digests)
        digests = [advance(own, common, number) for number, own in enumerate(digests)]
    return digests[rank].hex()


def fail(code: int, why: str) -> NoReturn:
    print(f"FATAL {why}", flush=True)
    os._exit(code)


def body() -> str:
    """What tells this running process from any other, before or after a restore: pid namespace and start time."""
    with open("/proc/self/stat", "rb") as file:
        started = file.read().rpartition(b")")[2].split()[19].decode()
    return f"{os.stat('/proc/self/ns/pid').st_ino}-{started}"


class Peer:
    """One connection. Any irregularity ends the program."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._name = name

    def send(self, seq: int, rank: int, size: int, digest: bytes) -> None:
        try:
            self._socket.sendall(_HEADER.pack(seq, rank, size, digest) + padding(seq, rank, size))
        except OSError as error:
            fail(71, f"connection to {self._name} lost while sending {seq}: {error}")

    def receive(self, seq: int, rank: int) -> bytes:
        got_seq, got_rank, size, digest = _HEADER.unpack(self._read(_HEADER.size, seq))
        if (got_seq, got_rank) != (seq, rank):
            fail(70, f"expected message {seq} of rank {rank}, got {got_seq} of rank {got_rank}")
        if self._read(size, seq) != padding(seq, rank, size):
            fail(70, f"message {seq} of rank {rank} is damaged")
        return bytes(digest)

    def _read(self, size: int, seq: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._socket.recv(size - len(data))
            except OSError as error:
                fail(71, f"connection to {self._name} lost while waiting for {seq}: {error}")
            if not piece:
                fail(71, f"connection to {self._name} closed while waiting for {seq}")
            data += piece
        return bytes(data)


def listen(world: int, port: int) -> dict[int, Peer]:
    """Rank 0: wait for all others."""
    listener = socket.create_server(("", port), backlog=world)
    listener.settimeout(_CONNECT_SECONDS)
    peers: dict[int, Peer] = {}
    while len(peers) < world - 1:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            fail(72, f"only {len(peers)} of {world - 1} ranks connected")
        connection.settimeout(None)
        rank = struct.unpack("!I", connection.recv(4, socket.MSG_WAITALL))[0]
        peers[rank] = Peer(connection, f"rank {rank}")
    listener.close()
    return peers


def connect(rank: int, address: str, port: int) -> Peer:
    """Any other rank: reach rank 0."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                fail(72, f"rank 0 at {address}:{port} cannot be reached: {error}")
            time.sleep(0.1)
    connection.settimeout(None)
    connection.sendall(struct.pack("!I", rank))
    return Peer(connection, "rank 0")


class Record:
    """What is written about each step."""

    def __init__(self, rank: int, witness: str) -> None:
        self._rank = rank
        self.nonce = os.urandom(8).hex()
        self.started = body()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._own = os.open(f"rank{rank}.txt", flags, 0o644)
        self._witness = os.open(witness, flags, 0o666) if witness else -1

    def step(self, seq: int, digest: bytes) -> None:
        self._append(self._own, f"{seq} {digest.hex()} {self.nonce} {os.getpid()}\n")
        if self._witness >= 0:
            self._append(self._witness, f"{time.time_ns()} {self._rank} {self.nonce} {body()} {seq}\n")

    @staticmethod
    def _append(fd: int, line: str) -> None:
        data = line.encode()
        if os.write(fd, data) != len(data):
            fail(70, "a line was written in part only")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--payload", type=int, default=1000, help="bytes of padding in each message")
    parser.add_argument("--report", type=int, default=10, help="print progress after so many steps")
    parser.add_argument("--witness", default="")
    parser.add_argument("--until", default="", help="a file; once it is there, the number in it is the last step")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    record = Record(rank, options.witness)
    print(f"start rank={rank} nonce={record.nonce} pid={os.getpid()} started={record.started}", flush=True)
    peers = listen(world, port) if rank == 0 and world > 1 else {}
    hub = connect(rank, address, port) if rank > 0 else None
    own = _START
    last = options.steps
    seq = 0
    while seq < last:
        seq += 1
        if hub is not None:
            hub.send(seq, rank, options.payload, own)
            common = hub.receive(seq, 0)
        else:
            heard = [own] + [peers[number].receive(seq, number) for number in range(1, world)]
            common = fold(seq, heard)
            for number in range(1, world):
                peers[number].send(seq, 0, options.payload, common)
        own = advance(own, common, rank)
        record.step(seq, own)
        if seq % options.report == 0:
            print(f"step {seq}", flush=True)
        if options.delay:
            time.sleep(options.delay)
        if options.until and os.path.exists(options.until):
            with open(options.until) as file:
                last = int(file.read())
    print(
        f"done rank={rank} nonce={record.nonce} pid={os.getpid()} started={record.started} body={body()} "
        f"steps={last} digest={own.hex()}",
        flush=True,
    )


if __name__ == "__main__":
    main()
