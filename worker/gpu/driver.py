"""The driver's own checkpoint of a process: context, streams, modules, graphs, small allocations.

Through cuda-core, from the broker: the process that calls needs no context of its own, but one `cuInit`, which takes
long on big machines.
"""

from __future__ import annotations

from typing import Any

from moorage.errors import DeviceFailed, EnvironmentLacking

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"


def load() -> Any:
    """cuda-core's module of checkpoints, which takes long to import. Raises `EnvironmentLacking`."""
    try:
        from cuda.core import checkpoint
    except ImportError as error:
        raise EnvironmentLacking(
            f"the driver checkpoint needs cuda-core 1.2 or newer: {error}", "pip install 'moorage[gpu]'"
        ) from None
    return checkpoint


class DriverProcess:
    """One process that uses CUDA. Every call is idempotent and blocks."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process: Any = load().Process(pid)

    @property
    def state(self) -> str:
        """``running``, ``locked``, ``checkpointed`` or ``failed``."""
        return str(self._process.state)

    def lock(self, seconds: float) -> None:
        """No thread submits any more. Raises `DeviceFailed`, also when that takes longer than ``seconds``."""
        if self.state == RUNNING:
            self._do("lock", timeout_ms=max(1, round(seconds * 1000)))

    def checkpoint(self) -> None:
        """What is on the device moves to the process's own memory; it must be locked."""
        if self.state == LOCKED:
            self._do("checkpoint")

    def restore(self, mapping: dict[str, str] | None = None) -> None:
        """Back to the device; ``mapping`` from old to new GPU UUIDs. It stays locked."""
        if self.state == CHECKPOINTED:
            self._do("restore", **({"gpu_mapping": mapping} if mapping else {}))

    def unlock(self) -> None:
        """The process may go on."""
        if self.state == LOCKED:
            self._do("unlock")

    def _do(self, step: str, **arguments: Any) -> None:
        try:
            getattr(self._process, step)(**arguments)
        except Exception as error:  # cuda-core has exceptions of its own for each binding
            raise DeviceFailed(f"driver checkpoint of process {self.pid}: {step} failed: {error}") from error
