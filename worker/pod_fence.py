"""Which orders a worker still accepts. Pure.

Two numbers only grow: the epoch of the leading coordinator (create revision of its leader key) and the incarnation of
each job. An order that carries a lower one than the worker has seen comes from a coordinator that was replaced, or is
meant for an instance of the job that was given up; carrying it out could let two incarnations run at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moorage.errors import Fenced


class Seen(NamedTuple):
    """The highest numbers that this worker knows, from orders and from etcd."""

    epoch: int = 0
    incarnations: Mapping[str, int] = {}


def admit(seen: Seen, *, epoch: int, job: str, incarnation: int) -> Seen:
    """What the worker knows after an order with this fence. Raises `Fenced` when the order is stale."""
    check_epoch(seen, epoch)
    known = seen.incarnations.get(job, 0)
    if incarnation < known:
        raise Fenced(
            f"the order is for incarnation {incarnation} of job {job}; incarnation {known} is known here",
            "read the job again: it was restored meanwhile",
        )
    return learn(seen, epoch=epoch, job=job, incarnation=incarnation)


def check_epoch(seen: Seen, epoch: int) -> None:
    """Raise `Fenced` when ``epoch`` is that of a coordinator that no longer leads."""
    if epoch < seen.epoch:
        raise Fenced(
            f"the order comes from the coordinator of epoch {epoch}; one of epoch {seen.epoch} leads",
            "this coordinator was replaced and must stop",
        )


def confirm_leader(current: int, epoch: int) -> None:
    """Raise `Fenced` unless ``epoch`` is that of the coordinator that etcd names (``current``; 0: nobody leads)."""
    if current != epoch:
        held = f"etcd names the one of epoch {current}" if current else "nobody leads, says etcd"
        raise Fenced(f"the order comes from the coordinator of epoch {epoch}; {held}", "only the leader gives orders")


def learn(seen: Seen, *, epoch: int = 0, job: str = "", incarnation: int = 0) -> Seen:
    """``seen`` raised by what was read elsewhere (etcd); numbers that are lower change nothing."""
    incarnations = seen.incarnations
    if job and incarnation > incarnations.get(job, 0):
        incarnations = {**incarnations, job: incarnation}
    return Seen(max(seen.epoch, epoch), incarnations)


def forget(seen: Seen, job: str) -> Seen:
    """``seen`` without ``job``, of which no pod is left here; etcd still holds its incarnation."""
    return Seen(seen.epoch, {name: number for name, number in seen.incarnations.items() if name != job})


def confirm(current: int, incarnation: int, job: str) -> None:
    """Raise `Fenced` unless ``incarnation`` is the one that etcd names (``current``; 0: the job is not there)."""
    if current != incarnation:
        held = f"etcd holds incarnation {current}" if current else "etcd does not know the job"
        raise Fenced(f"incarnation {incarnation} of job {job} is not the current one: {held}")
