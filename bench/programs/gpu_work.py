"""Loops whose time the proxy could change; prints a JSON object with the seconds of each. For `gpu_overhead`."""

import ctypes
import json
import random
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


cuda = ctypes.CDLL("libcuda.so.1")
cuda.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
cuda.cuMemFree_v2.argtypes = [ctypes.c_uint64]


def take(mib: int) -> int:
    """Memory from the driver itself, in MiB."""
    pointer = ctypes.c_uint64()
    if status := cuda.cuMemAlloc_v2(ctypes.byref(pointer), mib << 20):
        raise RuntimeError(f"cuMemAlloc answered {status}")
    return pointer.value


def give(pointer: int) -> None:
    if status := cuda.cuMemFree_v2(pointer):
        raise RuntimeError(f"cuMemFree answered {status}")


def pairs(mib: int) -> Callable[[], None]:
    return lambda: give(take(mib))


def mixed() -> None:
    """Many sizes, with some memory in use all the time."""
    draw = random.Random(1)
    held = [take(2 * draw.randint(1, 32)) for _ in range(16)]
    for _ in range(100):
        give(held.pop(draw.randrange(len(held))))
        held.append(take(2 * draw.randint(1, 32)))
    for pointer in held:
        give(pointer)


def never_again() -> None:
    """Each size only once: nothing that was freed before fits."""
    global largest
    for _ in range(10):
        largest += 2
        give(take(largest))


largest = 600
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
            "training step": seconds(step, 150),
            "graph replay": seconds(graph.replay, 300),
            "decode": seconds(decode, 50),
            "allocation": seconds(allocate, 20),
            "allocation of 2 MiB": seconds(pairs(2), 200),
            "allocation of 32 MiB": seconds(pairs(32), 200),
            "allocation of 512 MiB": seconds(pairs(512), 50),
            "allocation of many sizes": seconds(mixed, 3),
            "allocation of new sizes": seconds(never_again, 2),
        }
    )
)
