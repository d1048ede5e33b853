"""Doing file work on the host with the rights of a job's owner, in one thread of a worker that runs as root."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from moorage.worker.layers import syscalls


class Owner(msgspec.Struct, frozen=True):
    """Whose rights. ``groups`` are the supplementary ones."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@contextmanager
def acting_as(owner: Owner) -> Iterator[None]:
    """Within the block this thread opens, creates and removes files as ``owner`` and with no more rights.

    Use it in a thread that ends soon after, so that nothing else can ever run with the wrong rights. Raises
    PermissionError if this process may not.
    """
    before = sorted(os.getgroups())
    try:
        syscalls.set_thread_groups(sorted({owner.gid, *owner.groups}))
        syscalls.set_thread_fsids(owner.uid, owner.gid)
        yield
    finally:
        syscalls.set_thread_fsids(os.geteuid(), os.getegid())
        syscalls.set_thread_groups(before)


def owner_of(uid: int, gid: int, groups: Sequence[int]) -> Owner:
    """An `Owner` from plain numbers."""
    return Owner(uid, gid, tuple(groups))
