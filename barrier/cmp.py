"""Conditions of a transaction: ``cmp.absent("k")``. A transaction succeeds if all of its conditions hold."""

from __future__ import annotations

from moorage.barrier.kv import Compare


def absent(key: str) -> Compare:
    """The key does not exist."""
    return Compare(key, "create", 0)


def exists(key: str) -> Compare:
    """The key exists."""
    return Compare(key, "create", 0, equal=False)


def create_revision(key: str, revision: int) -> Compare:
    """The key exists and was created at ``revision``: no other key of that name ever has this create revision."""
    return Compare(key, "create", revision)


def mod_revision(key: str, revision: int) -> Compare:
    """The key was last written at ``revision`` (0: it does not exist)."""
    return Compare(key, "mod", revision)


def value(key: str, value: bytes) -> Compare:
    """The key exists and holds ``value``."""
    return Compare(key, "value", value)
