"""Ranks that compute with all-reduces of the NCCL stand-in (tests/support/nccl_stub.py) on overlapping communicators.

    nccl_ranks.py --live FOLDER --seed N

``live`` is outside of what is checkpointed: ids are exchanged through it, and each rank appends a line for each step to
``witness-<rank>``. It ends after the step that ``live/until`` names, and prints its digest. While ``live/stall-<rank>``
is there this rank does nothing; while ``live/refuse-<rank>`` is, it has what cannot be carried over. Ranks take their
time by chance, so they are ahead of and behind each other.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moorage.nccl_quiesce.wire import Refusal
from tests.support.nccl_stub import Communicator, Nccl


def groups(world: int) -> list[tuple[int, ...]]:
    """Members of each communicator: everybody, and each rank with its neighbour."""
    return [tuple(range(world)), *((rank, rank + 1) for rank in range(world - 1))]


def contribution(step: int, rank: int, group: int) -> int:
    return (step * 7919 + rank * 104729 + group * 31) % 1_000_003


def expected_digest(world: int, steps: int, rank: int) -> str:
    """What a rank has computed after so many steps, undisturbed."""
    digest = hashlib.sha256()
    for step in range(1, steps + 1):
        for number, members in enumerate(groups(world)):
            if rank in members:
                digest.update(str(sum(contribution(step, member, number) for member in members)).encode())
    return digest.hexdigest()


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        return str(probe.getsockname()[0])


def join(nccl: Nccl, live: Path, number: int, members: tuple[int, ...], rank: int) -> Communicator:
    path = live / f"id-{number}"
    if rank == members[0]:
        new = live / f"id-{number}.new"
        new.write_bytes(nccl.unique_id())
        new.rename(path)
    while not path.exists():
        time.sleep(0.01)
    return nccl.init(path.read_bytes(), members.index(rank), len(members))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--live", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    live, rank, world = arguments.live, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chance = random.Random(arguments.seed * 1000 + rank)
    nonce = f"{random.SystemRandom().getrandbits(64):x}"
    nccl = Nccl(rank, own_address())
    mine = [(number, members) for number, members in enumerate(groups(world)) if rank in members]
    communicators = [(number, join(nccl, live, number, members, rank)) for number, members in mine]
    digest, step = hashlib.sha256(), 0
    with (live / f"witness-{rank}").open("a", buffering=1) as witness:
        while not (live / "until").exists() or step < int((live / "until").read_text()):
            step += 1
            results = []
            name = communicators[0][1].name
            refused = (live / f"refuse-{rank}").exists()
            nccl.refusals = [Refusal(name, "ncclDevCommCreate", "it lives on the device")] if refused else []
            for number, communicator in communicators:
                while (live / f"stall-{rank}").exists():
                    time.sleep(0.02)
                results.append(nccl.all_reduce(communicator, contribution(step, rank, number)))
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 0.02)
            for result in results:
                digest.update(str(result.result()).encode())
            witness.write(f"{step} {nonce} {os.getppid()}\n")
    print(f"done steps={step} nonce={nonce} digest={digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
