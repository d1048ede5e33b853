"""After an answer was lost: which transactions may be sent again, and what the state that is then read says.

A transaction *fences itself* when its success makes one of its own conditions false for good: it creates a key that it
compares to be absent, or writes a key that it compares by mod revision. Of two copies of it at most one succeeds, so it
may be sent again; when the second copy fails, the keys that it would have written tell whether the first one succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moorage.barrier.kv import Compare, DeleteOp, GetOp, KeyValue, Op, PutOp


def _deletes(op: DeleteOp, key: str) -> bool:
    return key.startswith(op.key) if op.prefix else key == op.key


def own_fences(compare: Sequence[Compare], success: Sequence[Op]) -> list[Compare]:
    """The conditions that the transaction's own success makes false for good."""
    puts = {op.key for op in success if isinstance(op, PutOp)}
    deletes = [op for op in success if isinstance(op, DeleteOp)]
    found = []
    for condition in compare:
        if not condition.equal or condition.target == "value":
            continue  # such a condition can become true again
        key, absent = condition.key, condition.value == 0
        if (key in puts and (absent or condition.target == "mod")) or (
            not absent and any(_deletes(op, key) for op in deletes)
        ):
            found.append(condition)
    return found


def read_only(ops: Sequence[Op]) -> bool:
    """Whether the operations change nothing."""
    return all(isinstance(op, GetOp) for op in ops)


def to_read(compare: Sequence[Compare], success: Sequence[Op]) -> list[str]:
    """The keys that `applied` wants to see."""
    puts = [op.key for op in success if isinstance(op, PutOp)]
    return list(dict.fromkeys([*puts, *(condition.key for condition in own_fences(compare, success))]))


def _wrote(put: PutOp, seen: KeyValue | None) -> bool:
    return seen is not None and seen.value == put.value and seen.lease == put.lease


def _ruled_out(fence: Compare, put: PutOp | None, seen: KeyValue | None) -> bool:
    """Whether the key of this fence shows that the first copy was not executed."""
    if put is not None and _wrote(put, seen):
        return False
    if fence.value == 0:
        # It was to be created, and is not there, or is as someone else created it.
        return seen is None or seen.version == 1
    return seen is not None and fence.value == (seen.mod_revision if fence.target == "mod" else seen.create_revision)


def applied(compare: Sequence[Compare], success: Sequence[Op], seen: Mapping[str, KeyValue | None]) -> int | None:
    """At which revision the first copy of a self-fencing transaction was executed, once a second copy has failed.

    ``seen`` holds `to_read`'s keys at the revision at which the second copy failed. 0: not at all. None: it cannot be
    told.
    A key that the first copy created and someone deleted since counts as not executed; another writer's transaction
    that wrote the very same counts as this one.
    """
    puts = {op.key: op for op in success if isinstance(op, PutOp)}
    fences = own_fences(compare, success)
    if any(_ruled_out(fence, puts.get(fence.key), seen.get(fence.key)) for fence in fences):
        return 0
    if not puts or any(isinstance(op, GetOp) for op in success):
        return None
    # All puts of one transaction have one mod revision, so a key that proves ours dates the others.
    proof = [seen.get(fence.key) for fence in fences if fence.key in puts]
    if any(not _wrote(puts[fence.key], seen.get(fence.key)) for fence in fences if fence.key in puts):
        return None
    at = max((kv.mod_revision for key in puts if (kv := seen.get(key)) is not None), default=0)
    if proof:
        at = min(kv.mod_revision for kv in proof if kv is not None)
    for key, put in puts.items():
        kv = seen.get(key)
        if kv is None or (not proof and kv.mod_revision != at):
            return None  # deleted since, or not all from one transaction
        if kv.mod_revision < at or (kv.mod_revision == at and not _wrote(put, kv)):
            return 0 if proof else None
    return at
