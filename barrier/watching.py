"""Watching a prefix without losing an event.

The stream may break at any time. What makes the next one complete is one number: the revision after the last event (or
progress notice) that was handed on whole. etcd's own answer at the creation of a watch is never taken for it: between
the start revision and that answer's revision there may be events that have not been sent yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from grpc.aio import EOF  # type: ignore[attr-defined]

from moorage.barrier import wire
from moorage.barrier.etcdpb import rpc_pb2
from moorage.barrier.kv import Event, WatchBatch
from moorage.barrier.replies import classify, refusal
from moorage.barrier.transport import Transport
from moorage.errors import Unavailable

if TYPE_CHECKING:
    from moorage.barrier.client import EtcdClient

log = structlog.get_logger(__name__)

_PATIENCE = 60.0  # seconds of trying to connect before a warning is logged; the watch goes on


class _Relist(Exception):
    """Events were or may have been lost."""


async def watch(client: EtcdClient, prefix: str, since: int) -> AsyncGenerator[WatchBatch, None]:
    """See `EtcdClient.watch`."""
    assert since > 0, "watch from listing.revision + 1"
    following = since
    pause = 0.05
    while True:
        try:
            async with aclosing(_stream(client, prefix, following)) as stream:
                async for batch in stream:
                    following = batch.revision + 1
                    pause = 0.05
                    if batch.events:
                        yield batch
        except _Relist as reason:
            listing = await _list_patiently(client, prefix)
            log.warning("watch lost events, listed again", prefix=prefix, reason=str(reason), since=following)
            following = listing.revision + 1
            yield WatchBatch(listing.revision, (), listing)
        except grpc.aio.AioRpcError as error:
            log.info("watch interrupted", prefix=prefix, since=following, error=error.details())
        except Unavailable as error:
            if client.transport.closed:
                raise
            log.warning("watch waits for etcd", prefix=prefix, since=following, error=str(error))
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)


async def _list_patiently(client: EtcdClient, prefix: str) -> Any:
    while True:
        try:
            return await client.list(prefix)
        except Unavailable as error:
            if client.transport.closed:
                raise
            log.warning("watch waits for etcd", prefix=prefix, error=str(error))


async def _stream(client: EtcdClient, prefix: str, following: int) -> AsyncGenerator[WatchBatch, None]:
    """Batches of one stream, from revision ``following`` on; also empty ones, whose revision is progress."""
    transport: Transport = client.transport
    endpoint = await transport.connected(asyncio.get_running_loop().time() + _PATIENCE)
    metadata = await transport.metadata(endpoint, asyncio.get_running_loop().time() + client.timeout)
    create = rpc_pb2.WatchCreateRequest(
        key=prefix.encode(), range_end=wire.range_end(prefix), start_revision=following, progress_notify=True,
        fragment=True,
    )  # fmt: skip
    parts: list[Event] = []
    try:
        with transport.calling(endpoint, "Watch.Watch", _requests(create), metadata=metadata) as call:
            while (reply := await call.read()) is not EOF:
                if reply.canceled:
                    _cancelled(transport, metadata, endpoint.target, reply)
                    return
                if reply.created:
                    await _check_history(client, prefix, following, reply.header.revision)
                    continue
                parts.extend(wire.event(event) for event in reply.events)
                if reply.fragment:
                    continue  # the rest of the same revision is still to come
                news = tuple(event for event in parts if wire.revision_of(event) >= following)
                parts = []
                # An answer without events is a progress notice: nothing up to its revision is outstanding.
                revision = max(map(wire.revision_of, news)) if news else reply.header.revision
                if revision >= following:
                    following = revision + 1
                    yield WatchBatch(revision, news)
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        meaning = classify(error.code(), details)
        if meaning == "token" and transport.user:
            transport.forget_token(metadata)
        elif meaning == "refused":
            raise refusal(error.code(), details, endpoint.target, transport.user) from error
        else:
            transport.suspect(endpoint)
        raise


async def _requests(create: rpc_pb2.WatchCreateRequest) -> AsyncGenerator[rpc_pb2.WatchRequest, None]:
    yield rpc_pb2.WatchRequest(create_request=create)
    await asyncio.Event().wait()  # the watch lives as long as its stream is open


def _cancelled(transport: Transport, metadata: Any, target: str, reply: rpc_pb2.WatchResponse) -> None:
    """Raise what a cancelled watch means; return if it only takes a new token."""
    reason = reply.cancel_reason
    if reply.compact_revision:
        raise _Relist(f"compacted up to revision {reply.compact_revision}")
    if classify(grpc.StatusCode.OK, reason) == "token" and transport.user:
        transport.forget_token(metadata)
        return
    if "permission denied" in reason:
        raise refusal(grpc.StatusCode.PERMISSION_DENIED, reason, target, transport.user)
    raise _Relist(f"cancelled by etcd: {reason or 'no reason given'}")


async def _check_history(client: EtcdClient, prefix: str, following: int, revision: int) -> None:
    """Notice an etcd whose history is shorter than what was seen of it: it was restored from an older copy."""
    if revision + 1 >= following:
        return
    # A member that lags behind looks the same; a linearizable read tells the two apart.
    if (await client.list(prefix, keys_only=True, limit=1)).revision + 1 < following:
        raise _Relist(f"etcd is at revision {revision}, before {following}: it was restored or replaced")
