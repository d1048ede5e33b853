"""All-reduce of many sizes, timed when told: each rank reads FOLDER/do-RANK (``sweep ROUNDS`` or ``end``).

The answer to a sweep, FOLDER/done, is one line of JSON: seconds an operation by bytes, the largest of all ranks; and
bytes a second that each GPU moves within its own memory, by copies and by a kernel. FOLDER/ready says that all ranks
are there. MOST: the largest size.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
folder, most, cuda = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] != ["cpu"]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
# The host's part of a small operation depends on the processors: those who are compared have the same.
cores = sorted(os.sched_getaffinity(0))
share = max(1, min(8, len(cores) // size))
os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
if cuda:
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")
SIZES = [n for n in (8 << (3 * k) for k in range(10)) if n <= most]
data = torch.zeros(max(SIZES), dtype=torch.uint8, device=device)
other = torch.empty_like(data)


def wait():
    if cuda:
        torch.cuda.synchronize()


def timed(work, times):
    for _ in range(3):
        work()
    wait()
    dist.barrier()
    wait()
    began = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - began) / times


def sweep(rounds):
    found = {}
    for bytes_ in SIZES:
        times = max(8, min(400, int(2e9 / (bytes_ + 1e6))))
        work = functools.partial(dist.all_reduce, data[:bytes_].view(torch.float32))
        found[str(bytes_)] = min(timed(work, times) for _ in range(rounds))
    found["copy"] = data.numel() * 2 / timed(lambda: other.copy_(data), 10)
    # A copy may be a copy engine's; this is a kernel.
    whole = (other.view(torch.float32), data.view(torch.float32))
    found["kernel"] = data.numel() * 2 / timed(lambda: torch.mul(whole[1], 2.0, out=whole[0]), 10)
    everybody = [None] * size
    dist.all_gather_object(everybody, found)
    slowest = {str(bytes_): max(one[str(bytes_)] for one in everybody) for bytes_ in SIZES}
    return {"seconds": slowest} | {name: [one[name] for one in everybody] for name in ("copy", "kernel")}


def say(name, text=""):
    if rank == 0:
        (folder / f"{name}.new").write_text(text)
        (folder / f"{name}.new").rename(folder / name)


sweep(1)
say("ready", json.dumps({"pid": os.getpid()}))
while True:
    # Outside of NCCL: nothing runs on a GPU while nobody measures.
    order = folder / f"do-{rank}"
    if not order.exists():
        time.sleep(0.002)
        continue
    words = order.read_text().split()
    order.unlink()
    if words[0] == "end":
        break
    say("done", json.dumps(sweep(int(words[1]))))
dist.destroy_process_group()
