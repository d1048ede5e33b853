"""The GPUs of this node through NVML (the extra ``gpu``: nvidia-ml-py), else what the driver shows under ``/proc``."""

from __future__ import annotations

import contextlib
import importlib
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from moorage.compat.fingerprint import Gpu

_PROC: Final = Path("/proc/driver/nvidia")


class GpuFacts(NamedTuple):
    """Driver, the newest CUDA that it serves, and the GPUs in the driver's order. All empty on a node without any."""

    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


def look(*, nvml: Any = None, proc: Path = _PROC) -> GpuFacts:
    """The GPUs of this node. ``nvml``: a module to use in place of ``pynvml``. Raises nothing."""
    if not (proc / "version").exists() and nvml is None:
        return GpuFacts()  # no driver: starting NVML would only cost time
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return _from_proc(proc)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return _from_proc(proc)
    try:
        return _ask(nvml)
    except nvml.NVMLError:
        return _from_proc(proc)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _ask(nvml: Any) -> GpuFacts:
    version = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpus.append(
            Gpu(
                model=_text(nvml.nvmlDeviceGetName(handle)),
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            )
        )
    driver = _text(nvml.nvmlSystemGetDriverVersion())
    return GpuFacts(driver, f"{version // 1000}.{version % 1000 // 10}", tuple(gpus))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _from_proc(proc: Path) -> GpuFacts:
    try:
        version = (proc / "version").read_text()
        texts = [path.read_text() for path in sorted((proc / "gpus").glob("*/information"))]
    except OSError:
        return GpuFacts()
    found = re.search(r"Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", version)
    gpus = []
    for text in texts:
        values = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
        gpus.append(Gpu(model=values.get("Model", ""), uuid=values.get("GPU UUID", "")))
    return GpuFacts(found[1] if found else "", "", tuple(gpus))
