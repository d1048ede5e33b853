"""Four loops whose time the proxy could change; prints a JSON object with the seconds of each. For `gpu_overhead`."""

import json
import time
from collections.abc import Callable

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    *[layer for _ in range(8) for layer in (torch.nn.Linear(2048, 2048), torch.nn.GELU(), torch.nn.Dropout(0.1))]
).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, capturable=True)
batch = torch.randn(256, 2048, device="cuda")
small = torch.randn(64, 64, device="cuda")


def step() -> None:
    optimizer.zero_grad(set_to_none=False)
    loss = (model(batch) - batch).pow(2).mean()
    loss.backward()
    optimizer.step()


def decode() -> torch.Tensor:
    value = small
    for _ in range(200):
        value = torch.relu(value @ small) * 0.1 + small
    return value


def allocate() -> None:
    for _ in range(4):
        blocks = [torch.empty(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del blocks
        torch.cuda.empty_cache()


stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()


def seconds(work: Callable[[], object], times: int) -> float:
    work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


print(
    json.dumps(
        {
            "training step": seconds(step, 300),
            "graph replay": seconds(graph.replay, 600),
            "decode": seconds(decode, 100),
            "allocation": seconds(allocate, 50),
        }
    )
)
