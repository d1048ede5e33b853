"""Serving what a job's ranks wrote, wherever it is: at the pods' workers, or in the store once they are gone.

A pod's journal goes on through checkpoint and restore with the offsets it had. After a restore the reader goes on where
the checkpoint stood, so what is computed again is shown again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import structlog

from moorage.barrier import clock
from moorage.coordinator import journal_export
from moorage.coordinator.machine.state import RESTING
from moorage.coordinator.workers import NodeGone
from moorage.errors import CorruptData, MoorageError, NotFound, Unavailable, UsageError
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1.worker_pb2 import LogChunk, ReadLogsRequest

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

#: How long a pod that is neither there nor gone for good is waited for, in seconds.
PATIENCE = 10.0


async def read(leader: Leader, job: Job, request: pb.LogsRequest) -> AsyncIterator[LogChunk]:
    """All output from the positions on; with ``follow`` until the job is over. Raises `UsageError` for a wrong rank."""
    per_pod = job.spec.ranks_per_pod
    ranks = job.state.pods * per_pod
    if request.rank >= ranks:
        raise UsageError(f"job {job.state.name} has no rank {request.rank}", f"its ranks are 0 to {ranks - 1}")
    pods = range(job.state.pods) if request.rank < 0 else [request.rank // per_pod]
    known = {position.pod: (position.incarnation, position.offset) for position in request.positions}
    readers = [_Reader(leader, job, pod, request.rank, *known.get(pod, (0, 0))) for pod in pods]
    if request.follow:
        async for chunk in _merged(readers):
            yield chunk
        return
    found = [chunk for reader in readers async for chunk in reader.now()]
    for chunk in sorted(found, key=lambda chunk: chunk.time):
        yield chunk


async def _merged(readers: list[_Reader]) -> AsyncIterator[LogChunk]:
    """The chunks of all pods as they come."""
    queue: asyncio.Queue[LogChunk | BaseException | None] = asyncio.Queue(16)

    async def pump(reader: _Reader) -> None:
        try:
            async for chunk in reader.follow():
                await queue.put(chunk)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(reader)) for reader in readers]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Reader:
    """One pod's output. ``offset`` counts in the journal of ``incarnation`` (0: nothing read yet)."""

    def __init__(self, leader: Leader, job: Job, pod: int, rank: int, incarnation: int, offset: int) -> None:
        self._leader = leader
        self._job = job
        self._pod = pod
        self._rank = rank
        self._incarnation = incarnation
        self._offset = offset
        self._missed = False  # a pod was to be there and was not

    async def follow(self) -> AsyncIterator[LogChunk]:
        """Until the job is over, across restores."""
        while True:
            seen = self._job.changed.rung
            state = self._job.state
            async for chunk in self._once(follow=True):
                yield chunk
            if state.over:
                return
            await self._job.changed.wait(seen, 2.0)

    async def now(self) -> AsyncIterator[LogChunk]:
        """What there is. A pod that is being brought up or taken down is waited for: the log of a job that is just
        ending is to have its last line."""
        give_up = clock.now() + PATIENCE
        while True:
            seen = self._job.changed.rung
            async for chunk in self._once(follow=False):
                yield chunk
            if not self._missed:
                return
            if clock.now() > give_up:
                break
            await self._job.changed.wait(seen, 0.5)
        async for chunk in self._stored():
            yield chunk

    async def _once(self, *, follow: bool) -> AsyncIterator[LogChunk]:
        state = self._job.state
        self._missed = False
        try:
            if state.seats and not (state.bringup and state.bringup.step in ("placing", "fencing")):
                await self._enter(state.incarnation)
                async for chunk in self._live(state.seats[self._pod].node, follow=follow):
                    yield chunk
                return
        except (NodeGone, NotFound, Unavailable) as error:
            # The pod is being brought up or taken down, or its worker starts again.
            log.debug("no live output", job=self._job.id, pod=self._pod, reason=str(error))
            self._missed = state.phase not in RESTING
        if state.phase in RESTING or not (follow or self._missed):
            async for chunk in self._stored():
                yield chunk

    async def _live(self, node: str, *, follow: bool) -> AsyncIterator[LogChunk]:
        request = ReadLogsRequest(
            job=self._job.id,
            pod=self._pod,
            rank=self._rank,
            follow=follow,
            offset=self._offset,
            incarnation=self._incarnation,
        )
        async for chunk in self._leader.workers.replies(node, "ReadLogs", request):
            yield self._note(chunk)

    def _note(self, chunk: LogChunk) -> LogChunk:
        chunk.pod, chunk.incarnation = self._pod, self._incarnation
        self._offset = max(self._offset, chunk.offset)
        return chunk

    async def _enter(self, incarnation: int) -> None:
        """Begin to read another incarnation: where its checkpoint stood, or at its very beginning."""
        if incarnation == self._incarnation:
            return
        if self._incarnation:
            origin = self._job.state.origin
            self._offset = min(self._offset, await self._end_of(origin)) if origin else 0
        self._incarnation = incarnation

    async def _end_of(self, checkpoint: str) -> int:
        try:
            data = await self._journal_in(checkpoint)
            return journal_export.bounds(data)[1] if data else 0
        except MoorageError as error:
            log.info("end of the saved log is not known", checkpoint=checkpoint, error=str(error))
            return self._offset

    async def _journal_in(self, checkpoint: str) -> bytes:
        store = self._leader.store
        name = (await self._leader.checkpoints.pod_manifests(checkpoint))[self._pod]

        def read() -> bytes:
            journal = store.read_pod_manifest(name).journal
            return b"" if journal is None else store.read_bytes(journal)

        return await asyncio.to_thread(read)

    async def _stored(self) -> AsyncIterator[LogChunk]:
        """From the archive of the job's end, else from the newest checkpoint."""
        state = self._job.state
        data = b""
        if state.over:
            incarnation, data = await asyncio.to_thread(self._archive, state.incarnation)
            if data:
                await self._enter(incarnation)
        if not data and (checkpoint := state.base or state.latest):
            data = await self._journal_in(checkpoint)
            self._incarnation = state.incarnation if self._incarnation else 0
        if not data:
            return

        def parsed() -> list[LogChunk]:
            return list(journal_export.chunks(data, pod=self._pod, rank=self._rank, offset=self._offset))

        try:
            # Not on the loop: the lease is kept there, and a long log takes seconds.
            found = await asyncio.to_thread(parsed)
        except CorruptData as error:
            raise CorruptData(f"the log of pod {self._pod} of job {self._job.id}: {error.message}") from None
        for chunk in found:
            yield self._note(chunk)

    def _archive(self, incarnation: int) -> tuple[int, bytes]:
        """What `FinishPod` kept, and of which incarnation. The end of a job raises the incarnation once more."""
        for number in (incarnation - 1, incarnation, incarnation - 2):
            try:
                return number, self._leader.store.get_object(f"logs/{self._job.id}/{number}/{self._pod}")
            except NotFound:
                continue
        return 0, b""
