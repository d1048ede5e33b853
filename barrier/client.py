"""A thin client of etcd on ``grpc.aio``.

Rules it keeps (docs/decisions/0002 says why no other client is used):

* Reads are repeated on any endpoint until the timeout. A mutation is sent again only when it surely was not executed;
  when its answer was lost, the state is read back; when that does not tell, `Unavailable` says "outcome unknown".
* A watch loses no event: it goes on after the last one seen, and when etcd has dropped some it says so.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self

import structlog

from moorage.barrier import settle, watching, wire
from moorage.barrier.etcdpb import rpc_pb2
from moorage.barrier.kv import (
    Compare,
    Deleted,
    Event,
    KeyValue,
    Listing,
    Op,
    Put,
    PutOp,
    TxnResult,
    WatchBatch,
)
from moorage.barrier.op import get as op_get
from moorage.barrier.replies import AnswerLost, Compacted
from moorage.barrier.transport import Transport
from moorage.errors import Conflict, NotFound, Unavailable
from moorage.trust import TlsFiles

__all__ = [
    "Compare",
    "Deleted",
    "EtcdClient",
    "Event",
    "KeyValue",
    "Listing",
    "Op",
    "Put",
    "TlsFiles",
    "TxnResult",
    "WatchBatch",
]

log = structlog.get_logger(__name__)

_PAGE = 1000  # keys a page of a listing


class EtcdClient:
    """One cluster of etcd. Usable from one event loop; connects on first use.

    ``endpoints`` are ``host:port``, ``http://…`` or ``https://…``. ``timeout`` is in seconds: a read ends within it, a
    mutation whose answer is lost within twice that. Every method may raise `Unavailable` (for a mutation: it was not
    executed, or the message says "outcome unknown"), `Forbidden`, `EnvironmentLacking` (an etcd that can lose data).
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: TlsFiles | None = None,
        user: str = "",
        password: str = "",
        timeout: float = 5.0,
    ) -> None:
        self.timeout = timeout
        self.transport = Transport(endpoints, tls, user, password)

    async def close(self) -> None:
        """Close the connections. Open watches end with an error."""
        await self.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self, method: str, request: Any) -> Any:
        return await self.transport.call(method, request, timeout=self.timeout, idempotent=True)

    async def _once(self, method: str, request: Any) -> Any:
        return await self.transport.call(method, request, timeout=self.timeout, idempotent=False)

    def _unknown(self, what: str, lost: AnswerLost) -> Unavailable:
        return Unavailable(f"etcd at {self.transport.where}: {what}: outcome unknown", f"the answer was lost: {lost}")

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None if it does not exist."""
        reply = await self._read("KV.Range", rpc_pb2.RangeRequest(key=key.encode()))
        return wire.key_value(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str, *, keys_only: bool = False, limit: int = 0) -> Listing:
        """All keys that begin with ``prefix`` (at most ``limit``, if that is not 0), at one revision."""
        while True:
            try:
                return await self._list(prefix, keys_only, limit)
            except Compacted:
                continue  # etcd dropped the revision between two pages

    async def _list(self, prefix: str, keys_only: bool, limit: int) -> Listing:
        start, end = prefix.encode(), wire.range_end(prefix)
        revision = 0
        items: list[KeyValue] = []
        while True:
            size = min(_PAGE, limit - len(items)) if limit else _PAGE
            request = rpc_pb2.RangeRequest(key=start, range_end=end, limit=size, revision=revision, keys_only=keys_only)
            reply = await self._read("KV.Range", request)
            items.extend(map(wire.key_value, reply.kvs))
            # Later pages are read at the revision of the first one.
            revision = revision or reply.header.revision
            if not reply.more or len(items) == limit:
                return Listing(revision, tuple(items))
            start = reply.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write one key; returns the revision. When the answer was lost, a key that holds ``value`` counts as written.

        Raises `NotFound` if the lease is gone.
        """
        try:
            reply = await self._once("KV.Put", rpc_pb2.PutRequest(key=key.encode(), value=value, lease=lease))
        except AnswerLost as lost:
            found = await self.get(key)
            if found is not None and found.value == value and found.lease == lease:
                return found.mod_revision
            raise self._unknown(f"put {key}", lost) from lost
        return int(reply.header.revision)

    async def delete(self, key: str) -> bool:
        """Delete one key; returns whether it existed (when the answer was lost: whether it is gone)."""
        try:
            reply = await self._once("KV.DeleteRange", rpc_pb2.DeleteRangeRequest(key=key.encode()))
        except AnswerLost as lost:
            if await self.get(key) is None:
                return True
            raise self._unknown(f"delete {key}", lost) from lost
        return bool(reply.deleted)

    async def delete_prefix(self, prefix: str) -> int:
        """Delete all keys that begin with ``prefix``; returns how many (0: answer lost, none is left)."""
        request = rpc_pb2.DeleteRangeRequest(key=prefix.encode(), range_end=wire.range_end(prefix))
        try:
            reply = await self._once("KV.DeleteRange", request)
        except AnswerLost as lost:
            if not (await self.list(prefix, keys_only=True, limit=1)).items:
                return 0
            raise self._unknown(f"delete {prefix}*", lost) from lost
        return int(reply.deleted)

    async def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        """Run ``success`` if all of ``compare`` hold, else ``failure``, atomically.

        When the answer was lost, a transaction that fences itself (`settle`) is sent again and judged by what it finds;
        then ``revision`` is that of its writes. Others raise `Unavailable`, "outcome unknown". A condition that can
        become true again (`cmp.value`, or `cmp.exists` of a key that is made anew) makes that judgement unsafe, so
        fence with create or mod revisions. Raises `NotFound` if a lease is gone.
        """
        idempotent = settle.read_only(success) and settle.read_only(failure)
        request = wire.txn(compare, success, failure)
        # A request that a dead leader swallowed is answered by nobody: better ask again soon, where that is safe.
        hasty = not idempotent and bool(settle.own_fences(compare, success)) and settle.read_only(failure)
        try:
            reply = await self.transport.call(
                "KV.Txn", request, timeout=self.timeout, idempotent=idempotent, hasty=hasty
            )
        except AnswerLost as lost:
            return await self._settle(compare, success, failure, lost)
        return wire.txn_result(reply)

    async def _settle(
        self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op], lost: AnswerLost
    ) -> TxnResult:
        what = "transaction on " + ", ".join(op.key for op in success if isinstance(op, PutOp))
        if not settle.own_fences(compare, success) or not settle.read_only(failure):
            raise self._unknown(what, lost) from lost
        keys = settle.to_read(compare, success)
        request = wire.txn(compare, success, [*failure, *map(op_get, keys)])
        try:
            # Of all copies of this request at most one succeeds, so it may be repeated.
            reply = await self.transport.call("KV.Txn", request, timeout=self.timeout, idempotent=True)
        except Unavailable as error:
            raise self._unknown(what, lost) from error
        result = wire.txn_result(reply)
        log.info("etcd answer lost, transaction sent again", what=what, succeeded=result.succeeded)
        if result.succeeded:
            return result
        seen = dict(zip(keys, result.gets[len(failure) :], strict=True))
        revision = settle.applied(compare, success, seen)
        if revision is None:
            raise self._unknown(what, lost) from lost
        if revision:
            return TxnResult(True, revision)
        return TxnResult(False, result.revision, result.gets[: len(failure)])

    def watch(self, prefix: str, *, since: int) -> AsyncGenerator[WatchBatch, None]:
        """Every event under ``prefix`` from revision ``since`` on (inclusive: pass ``listing.revision + 1``).

        Survives restarts of etcd and changes of endpoint. When etcd dropped events, a batch with ``relisted`` says so.
        Never ends by itself; raises only `Forbidden`, `EnvironmentLacking`, or `Unavailable` once the client is closed.
        """
        return watching.watch(self, prefix, since)

    async def lease_grant(self, ttl: int) -> tuple[int, int]:
        """A new lease of ``ttl`` seconds; returns its id and the seconds that etcd gave (it has a minimum)."""
        # The id is chosen here, so that after a lost answer a second grant shows whether the first one was executed.
        lease = secrets.randbits(62) + 1
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl, ID=lease)
        try:
            reply = await self.transport.call(
                "Lease.LeaseGrant", request, timeout=self.timeout, idempotent=False, hasty=True
            )
        except AnswerLost:
            try:
                reply = await self.transport.call("Lease.LeaseGrant", request, timeout=self.timeout, idempotent=True)
            except Conflict:
                left = await self.lease_keepalive(lease)
                return lease, left
        return lease, int(reply.TTL)

    async def lease_keepalive(self, lease: int, *, timeout: float | None = None) -> int:
        """Renew a lease; returns its new seconds, counted from some moment after the call; 0: the lease is gone."""
        reply = await self.transport.call(
            "Lease.LeaseKeepAlive",
            rpc_pb2.LeaseKeepAliveRequest(ID=lease),
            timeout=timeout or self.timeout,
            idempotent=True,
            stream=True,
        )
        return max(0, int(reply.TTL))

    async def lease_revoke(self, lease: int) -> None:
        """End a lease and delete its keys; no error if it is gone already."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease)
        try:
            # Ids are random and never used again, so revoking twice does no harm.
            await self.transport.call("Lease.LeaseRevoke", request, timeout=self.timeout, idempotent=True)
        except NotFound:
            return
