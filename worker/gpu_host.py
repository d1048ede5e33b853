"""The GPUs and the driver of this host, as far as containers need them. Reads ``/proc`` and ``/dev``; no CUDA call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from moorage.errors import EnvironmentLacking, NotFound, UsageError
from moorage.worker import gpu_health
from moorage.worker.gpu.client import BrokerClient

CONTROL_NODES = (Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), Path("/dev/nvidia-uvm-tools"))
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
_NAME = "libcuda.so.1"


class HostDriver(NamedTuple):
    """``libcuda``: the driver's library itself, no link. ``mounts``: host mounts below ``/`` that hold the driver."""

    libcuda: Path
    mounts: list[Path]


@cache
def driver() -> HostDriver:
    """Raises `EnvironmentLacking` when this host has no CUDA driver."""
    found = _libcuda()
    if found is None:
        raise EnvironmentLacking(f"this node has no {_NAME}", "install the NVIDIA driver, then `ldconfig`")
    real = found.resolve()
    holder = next((path for path in (real, *real.parents) if os.path.ismount(path)), Path("/"))  # noqa: PTH
    return HostDriver(real, [] if holder == Path("/") else [holder])


def _libcuda() -> Path | None:
    listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    for line in listing.splitlines():
        name, _, path = line.partition(" => ")
        if name.split() and name.split()[0] == _NAME and "x86-64" in name:
            return Path(path.strip())
    return None


def information(folder: Path = _GPU_FOLDER) -> list[dict[str, str]]:
    """What the kernel's driver says of each GPU, in bus order: ``GPU UUID``, ``Model``, ``Device Minor``, …"""
    found = []
    for path in sorted(folder.glob("*/information")):
        lines = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        found.append({name.strip(): value.strip() for name, value in lines})
    return found


def offered(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The UUIDs that a node gives to pods, in order. ``known``: all, in bus order; ``wanted``: as in `WorkerConfig`.

    Raises `UsageError` for one that is not there, or is named twice.
    """
    if not wanted:
        return list(known)
    found = [known[int(name)] if name.isdecimal() and int(name) < len(known) else name for name in wanted]
    for name in found:
        if name not in known:
            raise UsageError(f"gpus: this node has no GPU {name}", f"it has {', '.join(known) or 'none'}")
        if found.count(name) > 1:
            raise UsageError(f"gpus: {name} is named twice", "name each GPU once")
    return found


def choose(free: Sequence[str], count: int, before: Sequence[str] = ()) -> list[str]:
    """``count`` of the ``free`` GPUs: those of ``before`` in their order if all are there, so that none changes."""
    if len(before) == count and set(before) <= set(free):
        return list(before)
    return list(free[:count])


def device_node(uuid: str) -> Path:
    """The device node of a GPU. Raises `NotFound`."""
    for gpu in information():
        if gpu.get("GPU UUID") == uuid:
            return Path(f"/dev/nvidia{gpu['Device Minor']}")
    raise NotFound(f"no GPU of this node is {uuid}")


@cache
def split(uuids: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the GPUs that are split by MIG. Asked once: while somebody uses a GPU, that cannot change."""
    nvml = gpu_health.library()
    return gpu_health.split(nvml, list(uuids)) if nvml is not None else ()


class NodeGpus:
    """Which pod has which GPU of this node, which of them had a fault since ``boot``, and the broker.

    ``wanted``: the setting `gpus` of the worker.
    """

    def __init__(self, state: Path, boot: str, wanted: Sequence[str] = ()) -> None:
        self._wanted = wanted
        self.faults = gpu_health.Faults(state / "gpu-faults.json", boot)
        self.broker = BrokerClient(state / "gpu")
        self._taken: dict[str, list[str]] = {}
        self._leaving: set[str] = set()
        self._released = asyncio.Event()

    def free(self) -> list[str]:
        """UUIDs of healthy GPUs that no pod has, in the order in which they are given out."""
        taken = {uuid for uuids in self._taken.values() for uuid in uuids}
        known = [uuid for gpu in information() if (uuid := gpu.get("GPU UUID", ""))]
        return [uuid for uuid in offered(known, self._wanted) if uuid not in taken and uuid not in self.faults]

    def take(self, pod: str, uuids: list[str]) -> None:
        """They are the pod's now."""
        self._taken[pod] = list(uuids)

    def leave(self, pod: str) -> None:
        """The pod is over; `release` follows when its memory was given back, or copied."""
        if pod in self._taken:
            self._leaving.add(pod)

    def release(self, pod: str) -> None:
        """They are nobody's again."""
        self._taken.pop(pod, None)
        self._leaving.discard(pod)
        self._released.set()

    async def enough(self, wanted: int, seconds: float) -> None:
        """Until ``wanted`` GPUs are free, or no pod is about to leave any more, at most ``seconds``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self.free()) < wanted and self._leaving:
                    self._released.clear()
                    await self._released.wait()
