"""What this node has: processors, memory, GPUs, kernel; and its registration record."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Container, Sequence
from pathlib import Path

import msgspec

import moorage
from moorage.compat import NodeFingerprint
from moorage.config import WorkerConfig
from moorage.records import NodeRecord
from moorage.worker import gpu_host

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


def memory(text: str) -> dict[str, int]:
    """Bytes by name from the text of ``/proc/meminfo`` (``MemTotal``, ``MemAvailable``, …)."""
    found: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, *unit = rest.split() or ["0"]
        if number.isdigit():
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


def memory_total() -> int:
    """Bytes of memory of this machine."""
    return memory(Path("/proc/meminfo").read_text()).get("MemTotal", 0)


def memory_available() -> int:
    """Bytes that programs can still take without swapping."""
    return memory(Path("/proc/meminfo").read_text()).get("MemAvailable", 0)


def gpu_name(information: str) -> str:
    """``UUID model`` from the text of ``/proc/driver/nvidia/gpus/<bus>/information``."""
    values = dict(line.split(":", 1) for line in information.splitlines() if ":" in line)
    return " ".join(part for part in (values.get("GPU UUID", "").strip(), values.get("Model", "").strip()) if part)


def gpus(folder: Path = _GPU_FOLDER) -> list[str]:
    """One entry ``UUID model`` for each NVIDIA GPU of the driver, in bus order; empty without a driver."""
    return [gpu_name(path.read_text()) for path in sorted(folder.glob("*/information"))]


def _offered(known: Sequence[str], wanted: Sequence[str]) -> list[str]:
    by_uuid = {gpu.partition(" ")[0]: gpu for gpu in known}
    return [by_uuid[uuid] for uuid in gpu_host.offered(list(by_uuid), wanted)]


def driver(version: Path = _DRIVER_FILE) -> str:
    """The version of the NVIDIA kernel driver; empty without one."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", version.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


def endpoint(config: WorkerConfig, port: int) -> str:
    """The ``host:port`` under which others reach the worker: its own address, the port that it listens on."""
    host = f"[{config.address}]" if ":" in config.address else config.address
    return f"{host}:{port}"


def record(
    config: WorkerConfig,
    *,
    session: str,
    port: int,
    ready: bool,
    fingerprint: NodeFingerprint | None = None,
    store: str = "",
    faulty: Container[str] = (),
) -> NodeRecord:
    """This node's registration. ``session`` is random for each start, ``port`` the one that the server bound, ``store``
    the nonce of the store that was opened, ``faulty`` the UUIDs of GPUs that are out of service."""
    return NodeRecord(
        node=config.node,
        address=config.address,
        endpoint=endpoint(config, port),
        session=session,
        pid=os.getpid(),
        version=moorage.__version__,
        lease_seconds=config.lease_seconds,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=memory_total(),
        gpus=[gpu for gpu in _offered(gpus(), config.gpus) if gpu.partition(" ")[0] not in faulty],
        kernel=platform.release(),
        labels=dict(config.labels),
        ready=ready,
        lease_kept=True,
        driver=driver(),
        slots=config.slots,
        fingerprint=msgspec.to_builtins(fingerprint or NodeFingerprint()),
        store=store,
    )
