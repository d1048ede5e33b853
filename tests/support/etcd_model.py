"""etcd's semantics in memory: revisions, transactions, watches, compaction. And clients of it that a test drives.

A `ModelClient` has the methods of `EtcdClient` that the barrier uses. Each operation passes `gate` twice: before it
takes effect and after it did, before the caller learns of it. A test that lets a gate suspend decides the order of all
operations of all processes, and a process that is never let go on has died there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from moorage.barrier.kv import (
    Compare,
    Deleted,
    DeleteOp,
    Event,
    GetOp,
    KeyValue,
    Listing,
    Op,
    Put,
    PutOp,
    TxnResult,
    WatchBatch,
)

Gate = Callable[[str], Awaitable[None]]
MAX_OPS = 128


class ModelEtcd:
    """The state of one etcd. ``history`` holds ``(revision, events)`` since the last compaction."""

    def __init__(self) -> None:
        self.revision = 1
        self.keys: dict[str, KeyValue] = {}
        self.history: list[tuple[int, tuple[Event, ...]]] = []
        self.largest_txn = 0

    def holds(self, compare: Compare) -> bool:
        kv = self.keys.get(compare.key)
        if compare.target == "value":
            return kv is not None and (kv.value == compare.value) == compare.equal
        actual = 0 if kv is None else kv.create_revision if compare.target == "create" else kv.mod_revision
        return (actual == compare.value) == compare.equal

    def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        for part in (compare, success, failure):
            self.largest_txn = max(self.largest_txn, len(part))
            assert len(part) <= MAX_OPS, "etcd refuses so large a transaction"
        puts = [op.key for op in success if isinstance(op, PutOp)]
        assert len(puts) == len(set(puts)), "etcd refuses two puts of one key in one transaction"
        deletes = [op for op in success if isinstance(op, DeleteOp)]
        torn = [k for k in puts for d in deletes if (k.startswith(d.key) if d.prefix else k == d.key)]
        assert not torn, "etcd refuses a put beside a delete of the same key"
        succeeded = all(map(self.holds, compare))
        events: list[Event] = []
        gets: list[KeyValue | None] = []
        at = self.revision + 1
        for op in success if succeeded else failure:
            if isinstance(op, GetOp):
                gets.append(self.keys.get(op.key))
            elif isinstance(op, PutOp):
                old = self.keys.get(op.key)
                created, version = (old.create_revision, old.version + 1) if old else (at, 1)
                self.keys[op.key] = KeyValue(op.key, op.value, created, at, version, op.lease)
                events.append(Put(self.keys[op.key]))
            elif isinstance(op, DeleteOp):
                gone = [key for key in self.keys if (key.startswith(op.key) if op.prefix else key == op.key)]
                for key in sorted(gone):
                    del self.keys[key]
                    events.append(Deleted(key, at))
        if events:
            self.revision = at
            self.history.append((at, tuple(events)))
        return TxnResult(succeeded, self.revision, tuple(gets))

    def compact(self) -> None:
        self.history.clear()

    def list(self, prefix: str) -> Listing:
        found = sorted((kv for key, kv in self.keys.items() if key.startswith(prefix)), key=lambda kv: kv.key)
        return Listing(self.revision, tuple(found))

    def since(self, prefix: str, revision: int) -> WatchBatch | None:
        """What a watch from ``revision`` on has to tell now; None: nothing."""
        oldest = self.history[0][0] if self.history else self.revision + 1
        if revision < oldest and revision <= self.revision:
            listing = self.list(prefix)
            return WatchBatch(listing.revision, (), listing)
        found = [
            event
            for at, events in self.history
            if at >= revision
            for event in events
            if (event.key if isinstance(event, Deleted) else event.kv.key).startswith(prefix)
        ]
        return WatchBatch(self.revision, tuple(found)) if found else None


async def _open(name: str) -> None:
    return None


class ModelClient:
    """One process's client of a `ModelEtcd`. ``gate`` gets ``<operation>.before`` and ``<operation>.after``."""

    def __init__(self, etcd: ModelEtcd, gate: Gate = _open) -> None:
        self.etcd = etcd
        self._gate = gate

    async def txn(self, compare: Sequence[Compare], success: Sequence[Op], failure: Sequence[Op] = ()) -> TxnResult:
        writes = not all(isinstance(op, GetOp) for op in (*success, *failure))
        name = "txn" if writes else "read"
        await self._gate(f"{name}.before")
        result = self.etcd.txn(compare, success, failure)
        await self._gate(f"{name}.after")
        return result

    async def get(self, key: str) -> KeyValue | None:
        await self._gate("read.before")
        result = self.etcd.keys.get(key)
        await self._gate("read.after")
        return result

    async def list(self, prefix: str) -> Listing:
        await self._gate("read.before")
        result = self.etcd.list(prefix)
        await self._gate("read.after")
        return result

    async def watch(self, prefix: str, *, since: int) -> AsyncGenerator[WatchBatch, None]:
        while True:
            await self._gate("watch")
            batch = self.etcd.since(prefix, since)
            if batch is not None:
                since = batch.revision + 1
                yield batch
