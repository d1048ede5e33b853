"""The worker's ties to a pod's guard: spawn or adopt, listen, replace one that died, follow what it tells."""

from __future__ import annotations

import asyncio
import contextlib

from moorage.errors import Fenced, MoorageError, Unavailable
from moorage.worker.guard.client import GuardClient
from moorage.worker.guard.messages import Done, GuardEvent, GuardStatus
from moorage.worker.pod import Pod
from moorage.worker.pod_phase import Change

_RESPAWN_SECONDS = (0.0, 0.2, 1.0, 3.0, 10.0)
_REFRESH_SECONDS = 5.0
_UNFENCE_SECONDS = 20.0


async def spawn(pod: Pod) -> None:
    """Start the pod's guard, or connect to the one that serves it; listen to it from now on.

    Raises `MoorageError` with the guard's words when it cannot start.
    """
    pod.guard = await GuardClient.spawn(pod.folder, pod.guard_config())
    pod.guard_ready.set()
    await _greet(pod)
    if pod.guarding is None:
        pod.guarding = asyncio.create_task(_listen(pod), name=f"guard of {pod.label}")


async def _greet(pod: Pod) -> None:
    """Give a guard the deadline of now (it may have been made with an older one) and take its status."""
    assert pod.guard is not None
    if deadline := pod.node.lease.deadline:
        await pod.guard.deadline(deadline)
    take_status(pod, await pod.guard.status())


async def undo(pod: Pod) -> None:
    """Take down whatever of a pod stands: processes, guard, network, mounts. Keeps the folder. Raises nothing."""
    await pod.stop_listening()
    if pod.guard is not None:
        with contextlib.suppress(MoorageError):
            await pod.guard.kill(reason="it could not be started")
    await pod.dismiss_guard()
    for take_down in (pod.network.remove, pod.unmount):
        try:
            await asyncio.to_thread(take_down)
        except (MoorageError, OSError) as error:
            pod.log.warning("not cleaned up", error=str(error))


async def _listen(pod: Pod) -> None:
    """Hear the guard's events until the pod has no process; put another guard in the place of one that dies."""
    failures = 0
    while True:
        try:
            assert pod.guard is not None
            async for event in pod.guard.events():
                failures = 0
                await _hear(pod, event)
                if pod.gone:  # what is left of it is on disk
                    await pod.dismiss_guard()
                    return
        except Unavailable as error:
            pod.log.info("guard lost", error=str(error))
        except Exception:  # a pod whose guard nobody hears would never be seen to end
            pod.log.exception("guard not heard")
        pod.guard_ready.clear()
        if pod.gone:
            return
        await asyncio.sleep(_RESPAWN_SECONDS[min(failures, len(_RESPAWN_SECONDS) - 1)])
        failures += 1
        try:
            await _replace(pod)
        except (MoorageError, OSError) as error:
            pod.log.warning("guard not replaced", error=str(error), tries=failures)
            pod.record.reason = f"its guard does not start: {error}"
            pod.publish()


async def _replace(pod: Pod) -> None:
    if pod.guard is not None:
        await pod.guard.close()
    pod.guard = await GuardClient.spawn(pod.folder, pod.guard_config())
    await _greet(pod)
    pod.log.info("guard replaced", guard=pod.guard_state.guard_pid if pod.guard_state else 0)
    pod.guard_ready.set()
    await reconcile(pod)


async def _hear(pod: Pod, event: GuardEvent) -> None:
    take_status(pod, event.status)
    if event.kind == "exited":
        failed = [rank for rank in event.status.ranks if rank.rank == event.rank and rank.exit_code]
        pod.publish()
        if failed and pod.record.attempt:
            await _spoil(pod, f"rank {failed[0].rank} exited with code {failed[0].exit_code}")
    elif event.kind in ("ended", "status"):
        await reconcile(pod)
    elif event.kind in ("fenced", "unfenced"):
        pod.record.reason = event.status.reason
        pod.publish()


async def run_bundle(pod: Pod) -> Done:
    """Have the guard start the container.

    On a slow machine the lease that the guard was spawned with may have run out before it was up; then it first asks
    etcd whether the pod is still wanted, and that is waited for. Raises what the guard raises.
    """
    try:
        return await pod.ask(lambda guard: guard.start())
    except Fenced:
        pod.log.info("the guard was slower than the lease")
        take_status(pod, await pod.ask(lambda guard: guard.status()))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pod.unfenced.wait(), _UNFENCE_SECONDS)
        pod.check_alive()
        return await pod.ask(lambda guard: guard.start())


def take_status(pod: Pod, status: GuardStatus) -> None:
    """Remember what the guard said last."""
    pod.guard_state = status
    if status.fenced:
        pod.unfenced.clear()
    else:
        pod.unfenced.set()
    if status.ranks:
        pod.record.ranks = list(status.ranks)


async def reconcile(pod: Pod) -> None:
    """Follow the guard where it knows that no process of the pod is left."""
    status = pod.guard_state
    if status is None or pod.gone or status.phase != "exited":
        return
    if status.killed:
        if not pod.dying:  # else whoever kills it says so when all is done
            pod.change(Change.KILLED, status.reason)
        return
    pod.record.exit_code = status.exit_code or 0
    if status.exit_code is None:
        pod.change(Change.BROKE, status.reason or "its init is gone without an exit code")
        await _spoil(pod, "the pod broke down")
    else:
        pod.change(Change.ENDED, "" if status.exit_code == 0 else f"exit code {status.exit_code}")
        if status.exit_code:
            await _spoil(pod, f"the pod exited with code {status.exit_code}")


async def _spoil(pod: Pod, why: str) -> None:
    if pod.record.attempt and pod.on_spoiled is not None:
        await pod.on_spoiled(why)


async def refresh(pod: Pod) -> None:
    """Read processor time and output anew and tell the watchers if they moved. Raises nothing."""
    guard = pod.guard
    if guard is None or pod.gone or not pod.guard_ready.is_set():
        return
    try:
        take_status(pod, await asyncio.wait_for(guard.status(), _REFRESH_SECONDS))
    except (MoorageError, TimeoutError):
        return
    pod.publish_progress()
