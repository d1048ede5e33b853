"""What follows from a GPU's fault: it is cordoned, and the pods that have it end and are restored elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from moorage.errors import MoorageError
from moorage.worker import gpu_health, pod_end
from moorage.worker.pod import Pod

log = structlog.get_logger(__name__)


async def follow(
    nvml: Any, faults: gpu_health.Faults, pods: Callable[[], Iterable[Pod]], changed: Callable[[], Awaitable[None]]
) -> None:
    """Until cancelled. ``changed`` tells the cluster which GPUs this node has from now on.

    A fault that an earlier worker saw, and whose pods it did not end, is followed up first.
    """
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    stop = threading.Event()

    def tell(uuid: str, reason: str) -> None:
        loop.call_soon_threadsafe(found.put_nowait, (uuid, reason))

    for pod in pods():
        for uuid in pod.record.gpus:
            if uuid in faults and not pod.gone:
                found.put_nowait((uuid, faults.reason(uuid)))
    watching = asyncio.create_task(asyncio.to_thread(gpu_health.watch, nvml, tell, stop), name="NVML")
    try:
        while True:
            uuid, reason = await found.get()
            await _cordon(uuid, reason, faults, list(pods()), changed)
    finally:
        stop.set()
        await asyncio.gather(watching, return_exceptions=True)


async def _cordon(
    uuid: str, reason: str, faults: gpu_health.Faults, pods: list[Pod], changed: Callable[[], Awaitable[None]]
) -> None:
    try:
        if faults.add(uuid, reason):
            log.error("a GPU is out of service", gpu=uuid, reason=reason)
    except OSError as error:
        log.error("a GPU's fault cannot be written down", gpu=uuid, reason=reason, error=str(error))
    try:
        await changed()  # before its pods end: nothing may be placed on it again
    except MoorageError as error:
        log.warning("the cluster does not know yet", gpu=uuid, error=str(error))  # the next session's record says so
    hit = [pod for pod in pods if uuid in pod.record.gpus and not pod.gone]
    await asyncio.gather(*(_end(pod, f"GPU {uuid}: {reason}") for pod in hit))


async def _end(pod: Pod, reason: str) -> None:
    try:
        await pod_end.break_off(pod, reason)
    except (MoorageError, OSError) as error:
        pod.log.error("the pod does not end", reason=reason, error=str(error))
