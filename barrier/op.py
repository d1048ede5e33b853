"""Operations of a transaction: ``op.put("k", b"v")``."""

from __future__ import annotations

from moorage.barrier.kv import DeleteOp, GetOp, PutOp


def put(key: str, value: bytes, lease: int = 0) -> PutOp:
    """Write ``key``, bound to ``lease`` unless that is 0."""
    return PutOp(key, value, lease)


def delete(key: str) -> DeleteOp:
    """Delete one key; nothing happens if it does not exist."""
    return DeleteOp(key)


def delete_prefix(prefix: str) -> DeleteOp:
    """Delete all keys that begin with ``prefix``: one operation, however many keys there are."""
    return DeleteOp(prefix, prefix=True)


def get(key: str) -> GetOp:
    """Read one key; the result stands in `TxnResult.gets`."""
    return GetOp(key)
