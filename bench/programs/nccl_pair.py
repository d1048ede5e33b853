"""One rank that works through the libnccl proxy and without it in turns, in one process: `nccl_pair.py BLOCKS SECONDS`.

Two communicators of all ranks: one made through the proxy (``NCCL_PROXY``), one by NVIDIA's own library
(``MOORAGE_REAL_LIBNCCL``), both called through ctypes, as inference engines do. A block is a number of all-reduces of
one size, or of training steps whose gradients are summed by all-reduces; blocks with and without the proxy take turns,
and who begins changes each time; of each kind there are BLOCKS pairs, or as many as fit into SECONDS. Rank 0 prints one
line of JSON: for each kind the seconds of all blocks, and how much of that the calls took until they had returned.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

FLOAT32, SUM = 7, 0
P, Z, N = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
SIZES = {"all-reduce of 4 KiB": (1 << 10, 100), "all-reduce of 256 KiB": (1 << 16, 50)}
STEPS = 10


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


class Communicator:
    """Of all ranks, by one library."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.ncclGetUniqueId.argtypes = [P]
        self.library.ncclCommInitRank.argtypes = [P, N, UniqueId, N]
        self.library.ncclAllReduce.argtypes = [P, P, Z, N, N, P, P]
        identity = UniqueId()
        if rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(identity))
        shared = [bytes(identity)]
        dist.broadcast_object_list(shared, 0)
        ctypes.memmove(ctypes.byref(identity), shared[0], 128)
        self.handle = P()
        self.call("ncclCommInitRank", ctypes.byref(self.handle), dist.get_world_size(), identity, rank)

    def call(self, name: str, *arguments: object) -> None:
        """Ends the process when NCCL says no."""
        if result := getattr(self.library, name)(*arguments):
            raise SystemExit(f"{name} answered {result}")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place, on the current stream."""
        at = ctypes.c_void_p(tensor.data_ptr())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("ncclAllReduce", at, at, tensor.numel(), FLOAT32, SUM, self.handle, stream)


Work = Callable[[Communicator], None]
rank = int(os.environ["RANK"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
torch.zeros(1, device="cuda")
dist.init_process_group("gloo")
pair = [Communicator(os.environ["NCCL_PROXY"]), Communicator(os.environ["MOORAGE_REAL_LIBNCCL"])]
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = torch.randn(256, 1024, device="cuda")


def train(communicator: Communicator) -> None:
    """One step."""
    optimizer.zero_grad(set_to_none=False)
    (model(batch) - batch).pow(2).mean().backward()
    for parameter in model.parameters():
        communicator.all_reduce(parameter.grad)
    optimizer.step()


def reduces(data: torch.Tensor) -> Work:
    """Nothing but all-reduces."""

    def work(communicator: Communicator) -> None:
        communicator.all_reduce(data)

    return work


def block(work: Work, communicator: Communicator, times: int) -> tuple[float, float]:
    """Seconds for one, from when all ranks begin: until the calls have returned, and until all is done."""
    torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        work(communicator)
    issued = time.perf_counter() - began
    torch.cuda.synchronize()
    return issued / times, (time.perf_counter() - began) / times


def goes_on(until: float) -> bool:
    """Rank 0 looks at its clock for all."""
    said = [time.monotonic() < until]
    dist.broadcast_object_list(said, 0)
    return bool(said[0])


kinds = [(name, reduces(torch.zeros(count, device="cuda")), times) for name, (count, times) in SIZES.items()]
found = {}
for name, work, times in [*kinds, ("training step", train, STEPS)]:
    spans: list[list[tuple[float, float]]] = [[], []]  # behind the proxy, without it
    for one in pair:
        block(work, one, times)  # connects, warms
    until = time.monotonic() + float(sys.argv[2])
    for number in range(int(sys.argv[1])):
        if not goes_on(until):
            break
        for index in [0, 1] if number % 2 else [1, 0]:
            spans[index].append(block(work, pair[index], times))
    found[name] = spans
if rank == 0:
    print(json.dumps(found), flush=True)
dist.barrier()
os._exit(0)
