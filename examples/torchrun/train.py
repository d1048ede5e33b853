"""A tiny training job in plain torch; it knows nothing of moorage. Every step's loss goes to ``losses.txt``.

Each rank draws a nonce when it starts and prints it at its end: a rank that was restarted would have another one.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    nonce = secrets.token_hex(8)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank {rank} of {dist.get_world_size()} begins with nonce {nonce}", flush=True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(steps):
        batch = torch.randn(32, 8)
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item().hex())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.6f}", flush=True)
        time.sleep(pause)
    weights = [value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()]
    Path(f"rank{rank}.txt").write_text("\n".join([*losses, *weights]) + "\n")
    print(f"rank {rank} ends with nonce {nonce} in process {os.getpid()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
