"""GPU faults, as NVML tells them: a serious Xid, an ECC error that was not corrected, a GPU that fell off the bus.

What a fault is: decided by pure functions. Listening: one thread that waits for NVML's events.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from moorage.worker.guard.files import write_private

log = structlog.get_logger(__name__)

#: Xids after which the GPU, not the program, is to blame (NVIDIA's Xid catalog). All others are a program's own
#: (13, 31, 43, 45, 68, 109, …), or are healed by the driver (63, 92, 94).
SERIOUS: Final = {
    48: "an ECC error that was not corrected",
    62: "its controller halted",
    64: "memory rows could not be remapped",
    74: "an NVLink error",
    79: "it fell off the bus",
    95: "an ECC error that was not contained",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "an ECC error that was not recovered from",
    143: "it could not be initialised",
}
_WAIT_MS: Final = 1000
_PROC: Final = Path("/proc/driver/nvidia/version")


def xid_reason(xid: int) -> str:
    """Why the GPU is not to be used any more after this Xid; empty: it is."""
    return f"Xid {xid}: {SERIOUS[xid]}" if xid in SERIOUS else ""


class Faults:
    """The GPUs of this node that had a fault since the machine was started. Kept in a file, for the next worker.

    A restart of the machine forgets them, and so does deleting the file and restarting the worker.
    """

    class _Record(msgspec.Struct):
        boot: str
        faults: dict[str, str] = {}

    def __init__(self, path: Path, boot: str) -> None:
        self._path = path
        self._record = self._Record(boot)
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode(path.read_bytes(), type=self._Record)
            if found.boot == boot:
                self._record = found

    def __contains__(self, uuid: object) -> bool:
        return uuid in self._record.faults

    def reason(self, uuid: str) -> str:
        """What happened to the GPU; empty: nothing."""
        return self._record.faults.get(uuid, "")

    def add(self, uuid: str, reason: str) -> bool:
        """False: it is known to be at fault already. Raises `OSError`."""
        if uuid in self._record.faults:
            return False
        self._record.faults[uuid] = reason
        write_private(self._path, msgspec.json.encode(self._record))
        return True


def library(proc: Path = _PROC) -> Any:
    """NVML's module; None on a node without driver or without the extra ``gpu``."""
    if not proc.exists():
        return None
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        log.warning("GPU faults are not seen: nvidia-ml-py is not installed", hint="pip install 'moorage[gpu]'")
        return None


def watch(nvml: Any, found: Callable[[str, str], None], stop: threading.Event) -> None:
    """Call ``found(uuid, reason)`` for every fault of any GPU, until ``stop``. Raises nothing."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        log.warning("GPU faults are not seen: NVML does not start", error=str(error))
        return
    try:
        _Watch(nvml, found).run(stop)
    except nvml.NVMLError as error:
        log.warning("GPU faults are not seen any more", error=str(error))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


class _Watch:
    def __init__(self, nvml: Any, found: Callable[[str, str], None]) -> None:
        self._nvml = nvml
        self._found = found
        self._handles: dict[str, Any] = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            self._handles[_text(nvml.nvmlDeviceGetUUID(handle))] = handle

    def run(self, stop: threading.Event) -> None:
        nvml = self._nvml
        events = nvml.nvmlEventSetCreate()
        wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
        listening = False
        for uuid, handle in self._handles.items():
            try:
                nvml.nvmlDeviceRegisterEvents(handle, wanted & nvml.nvmlDeviceGetSupportedEventTypes(handle), events)
                listening = True
            except nvml.NVMLError as error:
                log.warning("a GPU tells no faults", gpu=uuid, error=str(error))
        try:
            while not stop.is_set():
                if listening:
                    self._wait(events)
                else:
                    stop.wait(_WAIT_MS / 1000)
                self._look_for_lost()
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)

    def _wait(self, events: Any) -> None:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_GPU_IS_LOST):
                raise
            return
        if event.eventType & nvml.nvmlEventTypeDoubleBitEccError:
            reason = "an ECC error that was not corrected"
        else:
            reason = xid_reason(int(event.eventData))
        uuid = _text(nvml.nvmlDeviceGetUUID(event.device))
        if reason:
            self._found(uuid, reason)
        else:
            log.info("a program's GPU error", gpu=uuid, xid=int(event.eventData))

    def _look_for_lost(self) -> None:
        for uuid, handle in list(self._handles.items()):
            try:
                self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError as error:
                if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
                    del self._handles[uuid]
                    self._found(uuid, "it fell off the bus")


def split(nvml: Any, uuids: list[str]) -> tuple[str, ...]:
    """Those of the GPUs that are split by MIG. Raises nothing."""
    found = []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        for uuid in uuids:
            with contextlib.suppress(nvml.NVMLError):  # most GPUs do not know MIG
                current, _ = nvml.nvmlDeviceGetMigMode(nvml.nvmlDeviceGetHandleByUUID(uuid))
                if current:
                    found.append(uuid)
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
