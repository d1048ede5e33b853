"""From the node's own folder into the bucket: before a checkpoint counts, or after (durability local)."""

from __future__ import annotations

import asyncio
import contextlib
import time

import structlog

from moorage.errors import AttemptAborted, CorruptData, MoorageError, NotFound
from moorage.store import TieredStore
from moorage.worker.agent_node import Node
from moorage.worker.pod import Pod
from moorage.worker.pod_record import StagedCapture

log = structlog.get_logger(__name__)

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0


def stored(pod: Pod, staged: StagedCapture, manifest: str) -> None:
    """The pod's checkpoint is in ``node.store``: bring it into the bucket, if there is one, or see that it follows.

    What stops the pod counts only when it is in the bucket: its next place may be another node. Blocking; raises what
    `TieredStore.upload` raises.
    """
    store = pod.node.store
    if not isinstance(store, TieredStore):
        return
    if pod.spec.policy.durability == "local" and pod.record.kind == "resume":
        store.mark_pending(manifest)
        return
    began = time.monotonic()
    size = store.upload(manifest, cancelled=pod.cancel_persist.is_set)
    pod.log.info("uploaded", attempt=staged.attempt, bytes=size, seconds=round(time.monotonic() - began, 2))
    tidy(store)


def tidy(store: TieredStore) -> None:
    """Delete old copies. Raises nothing: what stays is deleted the next time."""
    try:
        store.tidy()
    except (MoorageError, OSError) as error:
        log.warning("old local copies stay", error=str(error))


async def follow(node: Node) -> None:
    """Upload what waits, also from before a restart; never ends by itself."""
    store = node.store
    if not isinstance(store, TieredStore):
        return
    pause = _FIRST_PAUSE
    while True:
        node.upload.clear()
        try:
            waiting = await asyncio.to_thread(store.pending)
            for manifest in waiting:
                await _upload(node, store, manifest)
            pause = _FIRST_PAUSE
            if waiting:
                await asyncio.to_thread(tidy, store)
        except MoorageError as error:
            log.warning("not uploaded; tried again", error=str(error), after_seconds=pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            continue
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(node.upload.wait(), _LONGEST_PAUSE)


async def _upload(node: Node, store: TieredStore, manifest: str) -> None:
    began = time.monotonic()
    try:
        size = await asyncio.to_thread(store.upload, manifest, cancelled=node.closing.is_set)
    except AttemptAborted:
        return
    except (NotFound, CorruptData) as error:
        # Nothing that repeating would cure; a bucket that is gone is told in other words.
        if error.hint and isinstance(error, NotFound):
            raise
        log.error("cannot be uploaded", manifest=manifest, error=str(error))
        await asyncio.to_thread(store.give_up, manifest)
        return
    log.info("uploaded", manifest=manifest, bytes=size, seconds=round(time.monotonic() - began, 2))
