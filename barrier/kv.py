"""Plain data that goes into etcd and comes out of it: no protobuf above this line of the code."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd holds it. ``version`` counts its puts since it was created; ``lease`` 0 means none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class Listing(msgspec.Struct, frozen=True):
    """All keys under a prefix at ``revision``, in key order. Watch on from ``revision + 1``."""

    revision: int
    items: tuple[KeyValue, ...]


class PutOp(msgspec.Struct, frozen=True):
    key: str
    value: bytes
    lease: int = 0


class DeleteOp(msgspec.Struct, frozen=True):
    """Deletes one key, or with ``prefix`` all keys that begin with ``key``."""

    key: str
    prefix: bool = False


class GetOp(msgspec.Struct, frozen=True):
    key: str


Op: TypeAlias = PutOp | DeleteOp | GetOp


class Compare(msgspec.Struct, frozen=True):
    """``target`` of ``key`` ``is`` (or with ``equal=False`` is not) ``value``. A missing key has revisions 0."""

    key: str
    target: Literal["create", "mod", "value"]
    value: int | bytes
    equal: bool = True


class TxnResult(msgspec.Struct, frozen=True):
    """Which branch ran, at which revision, and what the gets of that branch read, in their order."""

    succeeded: bool
    revision: int
    gets: tuple[KeyValue | None, ...] = ()


class Put(msgspec.Struct, frozen=True):
    """Event: a key was written."""

    kv: KeyValue


class Deleted(msgspec.Struct, frozen=True):
    """Event: a key was deleted, or its lease ended."""

    key: str
    mod_revision: int


Event: TypeAlias = Put | Deleted


class WatchBatch(msgspec.Struct, frozen=True):
    """News under a prefix, complete up to ``revision``.

    ``relisted`` is set when events were lost (compaction, cancel): it holds all that exists now, replaces what the
    watcher knew, and ``events`` is empty.
    """

    revision: int
    events: tuple[Event, ...] = ()
    relisted: Listing | None = None
