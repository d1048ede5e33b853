"""Processes with NCCL that share a GPU, where the driver cannot switch between them once they were checkpointed.

Seen with driver 580 (docs/gpu.md): a process that the driver has restored cannot be interrupted inside a kernel. NCCL's
kernels wait for those of other ranks; if these wait for the same GPU, all of them die with Xid 109 some seconds later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from moorage.worker.preflight import Objection

#: Major versions of the driver with which this was seen.
TROUBLED: Final = frozenset({580})


class Member(NamedTuple):
    """A process that has communicators with others. ``pid``: on the host; ``name``: for people."""

    pid: int
    name: str


def objections(driver: str, users: Mapping[str, Collection[int]], members: Iterable[Member]) -> list[Objection]:
    """One for each GPU that several members use. ``driver``: its version. ``users``: host pids by GPU. Pure."""
    major = driver.partition(".")[0]
    if not major.isdigit() or int(major) not in TROUBLED:
        return []
    known = list(members)
    found = []
    for gpu, pids in sorted(users.items()):
        here = [member.name for member in known if member.pid in pids]
        if len(here) > 1:
            found.append(
                Objection(
                    f"{' and '.join(here)} share {gpu}",
                    f"driver {driver} cannot switch between restored processes inside of a kernel, and NCCL's kernels "
                    "wait for each other: they would die (Xid 109) after the checkpoint",
                    "give each rank a GPU of its own",
                )
            )
    return found


def users(nvml: Any, gpus: Iterable[str]) -> dict[str, set[int]]:
    """Host pids that work on each of these GPUs, as NVML tells; GPUs that it says nothing of are left out.

    A process that NVML lists for several (it has another rank's memory mapped) works on the one where it has most.
    """
    listed: dict[str, dict[int, int]] = {}
    if nvml is None:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        for uuid in gpus:
            with contextlib.suppress(nvml.NVMLError):
                running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid))
                listed[uuid] = {process.pid: getattr(process, "usedGpuMemory", None) or 0 for process in running}
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return {uuid: {pid for pid in pids if _works_on(pid, uuid, listed)} for uuid, pids in listed.items()}


def _works_on(pid: int, gpu: str, listed: Mapping[str, Mapping[int, int]]) -> bool:
    return all(listed[gpu][pid] > pids[pid] for uuid, pids in listed.items() if uuid != gpu and pid in pids)
