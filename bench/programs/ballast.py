"""Holds device memory and makes steps; changes parts of the memory when told. For `bench.gpu_checkpoint`.

``ballast.py FOLDER GIB [HOST_GIB PINNED_GIB [ZERO_GIB]]``, the last on the device, all zeros; device memory is on
BALLAST_GPUS (1) GPUs by turns. Orders come as FOLDER/do
(``touch SHARE SEED`` or ``all``) and are answered with FOLDER/done. FOLDER/ready says that the memory stands,
FOLDER/gap holds the longest time between two steps since the last order ``gap``, in seconds; FOLDER/sum, after an order
``sum``, a digest of all memory.
"""

import os
import sys
import time

import torch

folder, gib = sys.argv[1], int(sys.argv[2])
host = torch.randint(0, 256, (int(float(sys.argv[3]) * 2**30),), dtype=torch.uint8) if len(sys.argv) > 3 else None
pinned = torch.zeros(int(float(sys.argv[4]) * 2**30), dtype=torch.uint8, pin_memory=True) if len(sys.argv) > 4 else None
CHUNK = 2 << 20


def say(name: str, text: str = "") -> None:
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(text)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")


devices = [torch.device("cuda", number) for number in range(int(os.environ.get("BALLAST_GPUS", "1")))]
generators = [torch.Generator(device).manual_seed(1 + number) for number, device in enumerate(devices)]
blocks = [torch.empty(2**30, dtype=torch.uint8, device=devices[number % len(devices)]) for number in range(gib)]
for block in blocks:
    block.view(torch.int64).random_(generator=generators[block.device.index])
zeros = [torch.zeros(2**30, dtype=torch.uint8, device="cuda") for _ in range(int(sys.argv[5] if sys.argv[5:] else 0))]
counters = [torch.zeros(1 << 20, device=device) for device in devices]


def synchronize() -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def obey(words: list[str]) -> None:
    if words[0] == "touch":
        chunks = gib * 512
        chosen = torch.randperm(chunks, generator=torch.Generator().manual_seed(int(words[2])))
        for number in chosen[: max(1, round(chunks * float(words[1])))].tolist():
            part = blocks[number // 512][number % 512 * CHUNK :][:CHUNK]
            part.view(torch.int64).random_(generator=generators[part.device.index])
    elif words[0] == "all":
        for block in blocks:
            block.add_(1)
    elif words[0] == "sum":
        say("sum", " ".join(str(int(block.view(torch.int64).sum())) for block in blocks + zeros))
    synchronize()


synchronize()
say("ready")
longest, last = 0.0, time.time()
while not os.path.exists(f"{folder}/end"):
    for counter in counters:
        counter.add_(1.0)
    synchronize()
    now = time.time()
    longest, last = max(longest, now - last), now
    if os.path.exists(f"{folder}/do"):
        with open(f"{folder}/do") as file:
            words = file.read().split()
        os.remove(f"{folder}/do")
        if words[0] == "gap":
            say("gap", str(longest))
            longest = 0.0
        else:
            obey(words)
        say("done")
        last = time.time()
    time.sleep(0.001)
