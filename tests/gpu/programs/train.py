"""Trains a small model on the GPU; prints a nonce, its steps, and one line of JSON with digests of all it did.

Adam, dropout, a CUDA graph for most steps, ordinary steps between, ``--gib`` of device memory that no step touches.
"""

import argparse
import hashlib
import json
import secrets

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--gib", type=float, default=1.0)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--no-graph", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--workers", type=int, default=0)
options = parser.parse_args()

nonce = secrets.token_hex(8)
print(json.dumps({"nonce": nonce}), flush=True)
torch.manual_seed(0)
ballast = torch.empty(int(options.gib * 2**30), dtype=torch.uint8, device="cuda")
if options.gib:
    ballast.random_(0, 256)
layers = [
    layer
    for _ in range(8)
    for layer in (torch.nn.Linear(options.width, options.width), torch.nn.GELU(), torch.nn.Dropout(0.1))
]
model = torch.nn.Sequential(*layers).cuda()
forward = torch.compile(model) if options.compile else model
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=True)
batch = torch.randn(256, options.width, device="cuda")


class Noise(torch.utils.data.Dataset):
    """Reproducible rows, made by the loader's workers."""

    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.randn(options.width, generator=torch.Generator().manual_seed(index))


loader = None
if options.workers:
    loading = torch.utils.data.DataLoader(
        Noise(), batch_size=256, num_workers=options.workers, pin_memory=True, persistent_workers=True
    )
    loader = iter(loading)


def step():
    optimizer.zero_grad(set_to_none=False)
    loss = (forward(batch) - batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss


stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(stream)
if not options.no_graph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()

digest = hashlib.sha256()
for number in range(options.steps):
    if loader is not None and number % 10 == 0:
        batch.copy_(next(loader), non_blocking=True)
    if options.no_graph or number % 10 == 0:
        loss = step()
    else:
        graph.replay()
        loss = captured
    if number % 20 == 0:
        digest.update(loss.detach().cpu().numpy().tobytes())
    if number % 5 == 0:
        torch.cuda.synchronize()
        print("step", number, flush=True)
for parameter in model.parameters():
    digest.update(parameter.detach().cpu().numpy().tobytes())
total = int(ballast.view(torch.int64).sum()) if options.gib else 0
print(json.dumps({"nonce": nonce, "digest": digest.hexdigest()[:32], "ballast": total}), flush=True)
