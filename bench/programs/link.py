"""Prints what the link brings in bytes a second: from pinned host memory to the device, and back.

A process of its own, so that no context of the bench stands beside the jobs.
"""

import json
import os
import time
from collections.abc import Callable

from moorage.worker.gpu.cuda_device import CudaDevice

SIZE = 1 << 30
TIMES = 4

device = CudaDevice(0)
slot = device.pin(SIZE)
region, descriptor = device.create(SIZE, rdma=False)


def rate(begin: Callable[[], None]) -> float:
    """The best of some tries."""
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(TIMES):
            begin()
        device.wait()
        best = max(best, TIMES * SIZE / (time.perf_counter() - began))
    return best


print(
    json.dumps(
        {
            "to_device": rate(lambda: device.to_device(slot, [(0, region.address, SIZE)])),
            "to_host": rate(lambda: device.to_host(slot, [(0, region.address, SIZE)])),
        }
    )
)
device.close(region)
os.close(descriptor)
