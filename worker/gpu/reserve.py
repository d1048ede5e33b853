"""Device memory that is kept free for the driver's own restore of a pod: without it that fails, and for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

import structlog

from moorage.errors import DeviceFailed, NoCapacity
from moorage.worker.gpu.device import CHUNK, Device, Region

log = structlog.get_logger(__name__)

#: For what the driver takes beside what it saved, in bytes.
MORE: Final = 64 << 20
_LEFT = 64 << 20  # for the broker's own work between saving and bringing back


def share(saved: int, devices: int) -> int:
    """Bytes to have free on each of ``devices`` GPUs when the driver put ``saved`` bytes into host memory. Pure."""
    if saved <= 0 or devices <= 0:
        return 0
    return -(-(saved // devices + MORE) // CHUNK) * CHUNK


class Reserve:
    """Room on the devices of one pod, taken from when the driver has saved its processes until it brings them back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[tuple[Device, Region]] = []

    def hold(self, devices: Sequence[Device], size: int, *, strict: bool) -> None:
        """Take ``size`` bytes on each device; nothing if that was done.

        ``strict``: raises `NoCapacity` where a device has less. Otherwise what there is must do: it was the pod's own.
        """
        with self._lock:
            if self._held or not size:
                return
            for device in devices:
                free = device.free_bytes()
                if strict and size > free:
                    self._give_back()
                    raise NoCapacity(
                        f"GPU {device.index}: the driver needs {size >> 20} MiB for what it saved itself, and "
                        f"{free >> 20} MiB are free",
                        "free memory on that GPU, or restore on another one",
                    )
                possible = min(size, free - _LEFT) // CHUNK * CHUNK
                if possible > 0:
                    try:
                        self._held.append((device, device.scratch(possible)))
                    except NoCapacity as error:
                        log.warning("no room is kept for the driver", gpu=device.index, error=error.message)

    def give_back(self) -> None:
        """The driver takes it now, or nobody needs it any more. Calling it again does nothing."""
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        while self._held:
            device, region = self._held.pop()
            with contextlib.suppress(DeviceFailed):
                device.close(region)
