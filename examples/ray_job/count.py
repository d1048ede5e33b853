"""A rank that knows nothing of Ray or moorage: it exchanges numbers with its neighbour, over a socket, and sums them.

Draws a nonce at its start and prints it at its start and end; writes ``sum-RANK.txt``: the nonce and the exact digest.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import time
from pathlib import Path


def connect(rank: int) -> socket.socket:
    """A connection between rank 0, which listens, and rank 1."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        with socket.create_server(address) as listening:
            return listening.accept()[0]
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.1)


def main(rounds: int, gate: Path) -> None:
    """The last rounds wait until the file ``gate`` is there: so long there is time to disturb."""
    rank, nonce = int(os.environ["RANK"]), secrets.token_hex(8)
    print(f"rank {rank} begins with nonce {nonce}", flush=True)
    digest, value = hashlib.sha256(), 0
    with connect(rank) as neighbour, neighbour.makefile("rb") as lines:
        for number in range(rounds):
            while number == rounds - 50 and not gate.exists():
                time.sleep(0.1)
            neighbour.sendall(f"{value + number * (rank + 1)}\n".encode())
            value = (3 * value + int(lines.readline())) % (1 << 61)
            digest.update(f"{number} {value}\n".encode())
            if number % 20 == 0:
                print(f"rank {rank} round {number} value {value}", flush=True)
            time.sleep(0.05)
    Path(f"sum-{rank}.txt").write_text(f"{nonce} {digest.hexdigest()}\n")
    print(f"rank {rank} ends with nonce {nonce}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
