"""What of a job's GPU state cannot be saved, from what the proxies in its processes have noted. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from moorage.worker.preflight import Objection

#: What the broker says of a block whose descriptor is lost.
LOST: Final = "memory whose descriptor is not here any more"


class Noted(NamedTuple):
    """One thing that a process has: the call that made it, and its size in bytes (0: it has none)."""

    process: str
    api: str
    size: int = 0


class _Saying(NamedTuple):
    why: str
    cure: str


_IMPORTED = _Saying(
    "it holds a handle that was imported from outside the pod",
    "close the imported handle before the checkpoint, or let its owner be in the same pod",
)
_SAYINGS: Final = {
    "cuMemAllocManaged": _Saying(
        "{size} of managed memory, which the driver does not save", "use cudaMalloc, or free it before the checkpoint"
    ),
    "cuMemImportFromShareableHandle": _IMPORTED,
    "cuIpcOpenMemHandle": _IMPORTED,
    "cuIpcGetMemHandle": _Saying(
        "it shares a small allocation through legacy CUDA IPC, which the driver does not save",
        "allocate what is shared in blocks of at least 2 MiB",
    ),
    "cuMemCreate": _Saying(
        "{size} of memory that is on the host, or of a handle type that cannot be kept",
        "create it on the device, with no handle type or with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    ),
    "cuMulticastCreate": _Saying(
        "multicast objects (NVLink SHARP), which the driver does not save", "run NCCL with NCCL_NVLS_ENABLE=0"
    ),
    "cuMemMapArrayAsync": _Saying("a sparse array, whose memory cannot be taken from it", "use an ordinary array"),
    LOST: _Saying(
        "{size} of device memory that nobody can hand out any more: broker and keeper died at the same time",
        "restore the job from its last checkpoint",
    ),
}
_OTHER = _Saying("the driver cannot save it", "use plain device memory (cudaMalloc), or free it before the checkpoint")


@dataclass(frozen=True)
class GpuReport:
    """What a pod uses of a node's GPUs. ``mig``: those of them that are split; ``mps``: its processes use MPS."""

    noted: tuple[Noted, ...] = ()
    mig: tuple[str, ...] = ()
    mps: bool = False


def examine_gpu(report: GpuReport) -> list[Objection]:
    """Everything that cannot be saved; empty when all can be."""
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
    for noted in report.noted:
        saying = _SAYINGS.get(noted.api, _OTHER)
        yield Objection(f"{noted.process}, {noted.api}", saying.why.format(size=_size(noted.size)), saying.cure)


def _size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 1 << 20 else f"{size} bytes"
