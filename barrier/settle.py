"""After an answer was lost: which transactions may be sent again, and what the state that is then read says.

A transaction *fences itself* when its success makes one of its own conditions false for good: it creates a key that it
compares to be absent, or writes a key that it compares by mod revision. Of two copies of it at most one succeeds, so it
may be sent again; when the second copy fails, the keys that it would have written tell whether the first one succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moorage.barrier.kv import Compare, DeleteOp, GetOp, KeyValue, Op, PutOp


def _deletes(op: Op, key: str) -> bool:
    return isinstance(op, DeleteOp) and (key.startswith(op.key) if op.prefix else key == op.key)


def own_fences(compare: Sequence[Compare], success: Sequence[Op]) -> list[Compare]:
    """The conditions that the transaction's own success makes false for good."""
    puts = {op.key for op in success if isinstance(op, PutOp)}
    found = []
    for condition in compare:
        if not condition.equal or condition.target == "value":
            continue  # such a condition can become true again
        key, absent = condition.key, condition.value == 0
        deletes = any(_deletes(op, key) for op in success)
        writes = condition.target == "mod" or absent
        if (key in puts and writes) or (deletes and not absent):
            found.append(condition)
    return found


def read_only(ops: Sequence[Op]) -> bool:
    """Whether the operations change nothing."""
    return all(isinstance(op, GetOp) for op in ops)


def to_read(compare: Sequence[Compare], success: Sequence[Op]) -> list[str]:
    """The keys that `applied` wants to see."""
    puts = [op.key for op in success if isinstance(op, PutOp)]
    return list(dict.fromkeys([*puts, *(condition.key for condition in own_fences(compare, success))]))


def _fence_says(fence: Compare, put: PutOp | None, seen: KeyValue | None) -> bool | None:
    if put and seen and seen.value == put.value and seen.lease == put.lease:
        return True
    if fence.value == 0:  # it was to be created: someone else's key is there, or a fence of another kind failed
        return False
    if seen and fence.value == (seen.mod_revision if fence.target == "mod" else seen.create_revision):
        return False  # untouched
    return True if put is None and seen is None else None


def applied(compare: Sequence[Compare], success: Sequence[Op], seen: Mapping[str, KeyValue | None]) -> bool | None:
    """Whether the first copy of a self-fencing transaction was executed, once a second copy has failed.

    ``seen`` holds `to_read`'s keys at the revision at which the second copy failed. ``None``: cannot be told.
    A key that the first copy created and someone deleted since counts as not executed.
    """
    puts = {op.key: op for op in success if isinstance(op, PutOp)}
    says = [_fence_says(fence, puts.get(fence.key), seen.get(fence.key)) for fence in own_fences(compare, success)]
    if False in says:
        return False
    if not says or None in says or any(isinstance(op, GetOp) for op in success):
        return None
    # The fences' keys look like ours. If another writer made them, the transaction's other keys give it away.
    written = [kv.mod_revision for key in puts if (kv := seen.get(key)) is not None]
    at = min((kv.mod_revision for f in own_fences(compare, success) if (kv := seen.get(f.key))), default=0)
    for key, put in puts.items():
        kv = seen.get(key)
        if kv is None:
            return None
        if kv.value == put.value and kv.lease == put.lease and kv.mod_revision == at:
            continue
        if kv.mod_revision < at:
            return False  # not written together with the fence's key
    return True if written or not puts else None
