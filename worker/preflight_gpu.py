"""What of a job's GPU state the driver cannot save, from a report of what its processes use. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from moorage.worker.preflight import Objection


@dataclass(frozen=True)
class GpuProcess:
    """What one process of a pod has made through the CUDA driver, as the proxy in it counts.

    ``managed_bytes``: of managed memory (``cuMemAllocManaged``). ``imported``: the calls by which it holds memory or
    semaphores that another program made (``cuMemImportFromShareableHandle``, ``cuIpcOpenMemHandle``, …).
    """

    pid: int  # inside the pod
    name: str
    managed_bytes: int = 0
    imported: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


@dataclass(frozen=True)
class GpuReport:
    """What a pod uses of a node's GPUs. ``mig``: GPUs that are split; ``mps``: whether it speaks to an MPS server."""

    processes: tuple[GpuProcess, ...] = ()
    mig: tuple[str, ...] = field(default=())
    mps: bool = False


def examine_gpu(report: GpuReport) -> list[Objection]:
    """Everything that the driver cannot save; empty when all can be."""
    return list(_objections(report))


def _objections(report: GpuReport) -> Iterator[Objection]:
    for gpu in report.mig:
        yield Objection(f"GPU {gpu}", "it is split by MIG, of which the driver saves nothing", "use whole GPUs")
    if report.mps:
        yield Objection(
            "the pod's CUDA processes",
            "they share the GPU through an MPS server, of which the driver saves nothing",
            "stop nvidia-cuda-mps-control and start the job without it",
        )
    for process in report.processes:
        if process.managed_bytes:
            yield Objection(
                f"{process}, cuMemAllocManaged",
                f"{process.managed_bytes / 2**20:.0f} MiB of managed memory, which the driver does not save",
                "use cudaMalloc, or free it before the checkpoint",
            )
        for call in process.imported:
            yield Objection(
                f"{process}, {call}",
                "it holds a handle that was imported from outside the pod",
                "close the imported handle before the checkpoint, or let its owner be in the same pod",
            )
