"""The preflight of one pod: its processes, its sockets, the space that a capture takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from moorage.errors import EnvironmentLacking
from moorage.worker import inventory, pod_gpu, pod_nccl, pod_staging, preflight_outside
from moorage.worker.network import namespace
from moorage.worker.pod import Pod
from moorage.worker.preflight import Objection, Process, examine, exec_sessions, space
from moorage.worker.preflight_proc import lives, read_processes
from moorage.worker.preflight_ties import Fact, judge
from moorage.worker.sandbox import criu
from moorage.worker.sandbox.cgroup import PodCgroup

#: What CRIU's images and the copies hold beside the memory itself.
_OVERHEAD_BYTES = 16 << 20
STANDING_SECONDS = 60.0


class Found(NamedTuple):
    """What stands in the way, and the bytes that a capture takes and that are free for it."""

    objections: list[Objection]
    bytes_needed: int
    bytes_free: int


async def look(pod: Pod, seconds: float = STANDING_SECONDS) -> Found:
    """Look at the running pod without touching it. Also sets `Pod.bytes_needed`.

    ``seconds``: how long a checkpoint may keep the pod standing.
    """
    objections, on_gpu = await pod_gpu.look(pod)
    found = await asyncio.to_thread(_look, pod, on_gpu, seconds)
    found.objections[:0] = [*objections, *await pod_nccl.look(pod)]
    pod.bytes_needed = found.bytes_needed
    return found


def _ties(pod: Pod, processes: list[Process], pids: list[int], seconds: float) -> list[Fact]:
    init = pod.guard_state.init_pid if pod.guard_state else 0
    # The guard's word may still be on its way when the pod has just begun: its pid 1 is the oldest one then.
    init = init or min((process.host_pid for process in processes if process.pid == 1), default=0)
    peers = namespace.run_in(pod.network.netns_path, preflight_outside.read_unix_peers)
    # The proxy of the GPU driver speaks to the broker, and lets go of it when it is told that a checkpoint begins.
    return preflight_outside.look(
        processes,
        pids,
        init,
        peers,
        seconds,
        with_broker=pod_gpu.has(pod),
        own_ends=pod_nccl.ends(pod),
        frozen_stays=not PodCgroup(pod.cgroup).unified,
    )


def _look(pod: Pod, on_gpu: frozenset[int], seconds: float) -> Found:
    objections = exec_sessions(list(pod.sessions.values())) + _library()
    pids = [] if pod.gone else pod.processes()
    processes = pod_gpu.without_driver(read_processes(pids), on_gpu)
    objections += examine(processes)
    if not pod.gone:
        objections += judge(_ties(pod, processes, pids, seconds))
    needed = (
        len(on_gpu) * pod_gpu.DRIVER_BYTES
        + (0 if pod.gone else memory_bytes(pids))
        + _changed_bytes(pod)
        + _OVERHEAD_BYTES
    )
    disk = pod_staging.free_bytes(pod.folder)
    memory = pod_staging.free_bytes(pod_staging.SHARED_MEMORY)
    if not pod_staging.in_memory(
        needed, total=inventory.memory_total(), available=inventory.memory_available(), shm_free=memory
    ):
        objections += space(needed, disk, f"{pod.node.state} on node {pod.node.name}")
    free = pod.node.store.free_bytes()
    objections += space(needed, free, f"store {pod.node.config.store}")
    return Found(objections, needed, min(free, max(disk, memory)))


def _library() -> list[Objection]:
    """An objection when moorage was installed anew, or in part, under this worker."""
    try:
        criu.usable()
        return []
    except EnvironmentLacking as error:
        return [Objection("what is preloaded into CRIU", error.message, error.hint or "", type(error).__name__)]


def memory_bytes(pids: list[int]) -> int:
    """Bytes of private and shared memory of these processes that CRIU has to write: what is resident, not of files.

    Pages that processes share after a fork are counted for each, as CRIU writes them for each.
    """
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            if lives(Path(f"/proc/{pid}")):
                raise
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        for name in ("RssAnon", "RssShmem", "VmSwap"):
            total += int(fields.get(name, "0 kB").split()[0]) * 1024
    return total


def _changed_bytes(pod: Pod) -> int:
    """Bytes of all that the pod wrote, holes not counted: an upper bound of what a capture copies."""
    uppers = [pod.folder / "upper", *(pod.folder / "mounts").glob("*/upper")]
    return sum(_allocated(upper) for upper in uppers)


def _allocated(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512  # noqa: PTH118
    return total
