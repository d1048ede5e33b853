"""A plain torch DDP training job on the handwritten digits that scikit-learn ships. It knows nothing of moorage.

Shuffling, dropout, momentum and persistent data loader workers: enough state that a restart from scratch, a lost
random number or a repeated batch changes every later loss. Each rank draws a random nonce when it starts; no seed
can bring the same one back, so a rank that prints at its end the nonce of its start was never started again.

Writes ``steps-rank<r>.txt`` (one line a step: number and the loss, exact) and ``result-rank<r>.json`` into the working
directory, and, when ``--trail`` names a folder, a line a step there too: a live folder outside what is checkpointed
shows what was executed, also the steps that a restore repeats.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def start_time() -> str:
    """When this process started, in clock ticks of its own time namespace (field 22 of /proc/self/stat)."""
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--trail", type=Path)
    options = parser.parse_args()

    nonce, pid, started = secrets.token_hex(16), os.getpid(), start_time()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trail = options.trail.joinpath(f"rank{rank}.txt").open("a", buffering=1) if options.trail else None
    print(f"rank {rank} starts: nonce {nonce} pid {pid} start time {started}", flush=True)
    if trail:
        trail.write(f"start {time.time():.6f} {nonce} {pid} {started}\n")

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=32, sampler=sampler, num_workers=2, persistent_workers=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, options.width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(options.width, options.width),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(options.width, 10),
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    torch.manual_seed(100 + rank)  # every rank drops other units

    step = 0
    with Path(f"steps-rank{rank}.txt").open("w", buffering=1) as log:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = torch.nn.functional.cross_entropy(ddp(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                exact = float(loss.item()).hex()
                log.write(f"{step} {exact}\n")
                if trail:
                    trail.write(f"{step} {time.time():.6f} {exact}\n")
                step += 1
            print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.6f}", flush=True)

    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    result = {
        "rank": rank,
        "steps": step,
        "digest": digest,
        "nonce": nonce,
        "pid": pid,
        "pid_now": os.getpid(),
        "start_time": started,
        "start_time_now": start_time(),
    }
    Path(f"result-rank{rank}.json").write_text(json.dumps(result) + "\n")
    print(f"rank {rank} ends: nonce {nonce} pid {pid} start time {started} digest {digest}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
