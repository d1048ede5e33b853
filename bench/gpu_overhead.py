"""What the libcuda proxy costs a program, with and without it, paired; and the speed of hashing on the GPU.

Needs an NVIDIA GPU and root (the proxy is bind-mounted over the driver's library in a mount namespace of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import ROOT, Report, Target, commit, gpu, machine, versions
from moorage.worker import gpu_host, pod_gpu
from moorage.worker.gpu.cuda_device import CudaDevice
from moorage.worker.gpu.memory import PodMemory
from moorage.worker.sandbox import native

WORK = ROOT / "bench" / "programs" / "gpu_work.py"
MOST = {
    "training step": 1.01,
    "graph replay": 1.01,
    "decode": 1.01,
    "allocation": 1.05,
    "allocation of 2 MiB": 1.05,
    "allocation of 32 MiB": 1.05,
    "allocation of 512 MiB": 1.05,
    "allocation of many sizes": 1.05,
}
#: What is told beside them: no program does nothing but that.
TOLD = ("allocation of new sizes",)


def plain() -> dict[str, float]:
    done = subprocess.run([sys.executable, str(WORK)], stdout=subprocess.PIPE, check=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


async def proxied(folder: Path) -> dict[str, float]:
    """The same behind the proxy, with a broker that keeps every descriptor."""
    memory = PodMemory("the bench", folder / "gpu.sock", 1)
    memory.listen()
    real, proxy = gpu_host.driver().libcuda, native.find(pod_gpu.PROXY, "intercept", variable="MOORAGE_LIBCUDA_PROXY")
    under = pod_gpu.REAL
    script = (
        f"mkdir -p {pod_gpu.FOLDER} && touch {under} && mount --bind {real} {under} && mount --bind {proxy} {real} "
        f"&& exec {sys.executable} {WORK}"
    )
    process = await asyncio.create_subprocess_exec(
        "unshare", "-m", "--propagation", "private", "sh", "-c", script,
        stdout=asyncio.subprocess.PIPE, env=os.environ | {"MOORAGE_GPU_SOCKET": str(folder / "gpu.sock")},
    )  # fmt: skip
    output, _ = await process.communicate()
    await memory.close()
    if process.returncode:
        raise RuntimeError("the proxied program failed")
    return dict(json.loads(output.decode().splitlines()[-1]))


def hashing(gib: int = 16) -> float:
    """Bytes a second that are hashed, in 2 MiB chunks, digests brought to the host."""
    device = CudaDevice(0)
    region, descriptor = device.create(gib << 30, rdma=False)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        device.digests([region], bytes(32))
        best = min(best, time.perf_counter() - began)
    device.close(region)
    os.close(descriptor)
    return (gib << 30) / best


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    options = parser.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in (*MOST, *TOLD)}
    figures: dict[str, Any] = {"hash_bytes_per_second": hashing()}
    with tempfile.TemporaryDirectory() as folder:
        plain()  # warms the machine
        for number in range(options.rounds):
            one = plain() if number % 2 else asyncio.run(proxied(Path(folder)))
            other = asyncio.run(proxied(Path(folder))) if number % 2 else plain()
            bare, behind = (one, other) if number % 2 else (other, one)
            for name in ratios:
                ratios[name].append(behind[name] / bare[name])
    figures |= {f"{name} ratio": values for name, values in ratios.items()}
    targets = [
        Target(f"{name}, times slower", statistics.median(ratios[name]), "", "<=", most) for name, most in MOST.items()
    ]
    targets.append(Target("hashing", figures["hash_bytes_per_second"] / 1e12, "TB/s", ">=", 1.2))
    report = Report(
        bench="gpu_overhead", figures=figures, targets=targets, versions=versions("cuda-core", "torch"),
        machine=machine() | gpu(), commit=options.commit or commit(),
    )  # fmt: skip
    report.write()
    report.show()
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
