"""Serve what the ranks wrote, from the pod's journal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

from moorage.errors import NotFound
from moorage.v1.worker_pb2 import LogChunk
from moorage.worker.guard.messages import JOURNAL_FILE
from moorage.worker.journal import Batch, Entry, JournalReader
from moorage.worker.journal_frames import Kind
from moorage.worker.pod import Pod

#: Frames of one stream that follow each other are sent as one chunk of at most this many bytes.
_CHUNK_BYTES = 256 << 10
_OUTPUT = (Kind.STDOUT, Kind.STDERR)


def chunks(batch: Batch, pod: int) -> Iterator[LogChunk]:
    """A batch as messages, neighbours of the same rank and stream joined. Pure.

    A gap (frames that were lost, or are no longer kept) is a chunk with ``truncated`` set before what follows it.
    """
    truncated = batch.truncated
    joined: list[Entry] = []
    size = 0
    for entry in batch.entries:
        frame = entry.frame
        if frame.kind not in _OUTPUT:
            truncated = truncated or frame.kind == Kind.LOST
            continue
        first = joined[0].frame if joined else frame
        if truncated or (frame.kind, frame.rank) != (first.kind, first.rank) or size > _CHUNK_BYTES:
            yield from _chunk(joined, pod)
            joined, size = [], 0
        if truncated:
            yield LogChunk(pod=pod, rank=frame.rank, truncated=True, offset=entry.offset, time=frame.time_ns / 1e9)
            truncated = False
        joined.append(entry)
        size += len(frame.payload)
    yield from _chunk(joined, pod)


def _chunk(entries: list[Entry], pod: int) -> Iterator[LogChunk]:
    if entries:
        first = entries[0].frame
        yield LogChunk(
            pod=pod,
            rank=first.rank,
            is_stderr=first.kind == Kind.STDERR,
            time=first.time_ns / 1e9,
            data=b"".join(entry.frame.payload for entry in entries),
            offset=entries[-1].next_offset,
        )


async def read(pod: Pod, *, offset: int, rank: int, follow: bool) -> AsyncIterator[LogChunk]:
    """The journal from ``offset`` on; ``rank`` -1: of all ranks. With ``follow`` until no process of the pod is left.

    Raises `NotFound` when the pod has no journal (yet).
    """
    try:
        reader = JournalReader(pod.folder / JOURNAL_FILE)
    except FileNotFoundError:
        raise NotFound(f"{pod.label} has no output yet") from None
    wanted = None if rank < 0 else rank
    with reader:
        async for batch in _batches(reader, offset, wanted, pod.over if follow else None):
            for chunk in chunks(batch, pod.record.pod):
                yield chunk


async def _batches(
    reader: JournalReader, offset: int, rank: int | None, over: asyncio.Event | None
) -> AsyncIterator[Batch]:
    if over is not None:
        async for batch in _until(reader.follow(offset, rank=rank), over):
            offset = batch.next_offset
            yield batch
    while True:
        batch = await asyncio.to_thread(reader.read, offset, rank=rank)
        if batch.entries or batch.truncated:
            yield batch
        if batch.next_offset == offset:
            return
        offset = batch.next_offset


async def _until(batches: AsyncIterator[Batch], over: asyncio.Event) -> AsyncIterator[Batch]:
    """What ``batches`` yields, until ``over`` is set while nothing new is there."""
    ended = asyncio.ensure_future(over.wait())
    following: asyncio.Future[Batch] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(batches))
            await asyncio.wait({following, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                return
            yield following.result()
    finally:
        ended.cancel()
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if (close := getattr(batches, "aclose", None)) is not None:
            await close()
