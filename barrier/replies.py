"""What etcd's answers mean, above all: whether a request that failed may have been executed."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import grpc

from moorage.errors import Conflict, EnvironmentLacking, Forbidden, MoorageError, NoCapacity, NotFound

_UNSENT_TEXTS = ("etcdserver: no leader", "etcdserver: too many requests", "rpc not supported for learner")
_TOKEN_TEXTS = (
    "etcdserver: invalid auth token",
    "etcdserver: user name is empty",
    "etcdserver: revision of auth store is old",
)
# Codes with which etcd refuses a request before, or instead of, executing it.
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DATA_LOSS,
}

Failure: TypeAlias = Literal["token", "unsent", "refused", "unknown"]


class AnswerLost(Exception):
    """The request was sent; whether etcd executed it is not known."""


class Compacted(Exception):
    """The revision asked for is no longer in etcd's history."""


def classify(code: grpc.StatusCode, details: str) -> Failure:
    """What a failed call means.

    ``token``: not executed, the token is no longer good. ``unsent``: not executed, another try may succeed.
    ``refused``: not executed, and another try would be refused too. ``unknown``: perhaps executed.
    """
    if any(text in details for text in _TOKEN_TEXTS):
        return "token"
    if any(text in details for text in _UNSENT_TEXTS):
        return "unsent"
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED and not re.search(r"etcdserver:|larger than max", details):
        return "unknown"  # gRPC makes this code of a connection that it closed for too many pings
    return "refused" if code in _REFUSALS else "unknown"


def refusal(code: grpc.StatusCode, details: str, where: str, user: str) -> Exception:
    """The error to raise for a request that etcd refused."""
    if code == grpc.StatusCode.OUT_OF_RANGE:
        return Compacted(details)
    if "authentication failed" in details:
        return Forbidden(f"etcd at {where} does not accept user {user!r} with this password")
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED) or "user name is empty" in details:
        who = f"user {user!r}" if user else "an unnamed user"
        return Forbidden(f"etcd at {where} denies {who}: {details}", "grant the user readwrite below /moorage/")
    if code == grpc.StatusCode.NOT_FOUND:
        return NotFound(f"etcd at {where}: {details}")
    if "lease already exists" in details:
        return Conflict(f"etcd at {where}: {details}")
    if "space exceeded" in details:
        return NoCapacity(f"etcd at {where} is full", "compact and defragment it, then disarm its alarm with etcdctl")
    return MoorageError(f"etcd at {where} refused a request: {details}")


def check_version(version: str, where: str) -> None:
    """Raise `EnvironmentLacking` for releases that can lose data after a crash."""
    if re.match(r"3\.5\.[0-2](\D|$)", version):
        raise EnvironmentLacking(f"etcd at {where} is {version}, which can lose data", "upgrade it to 3.5.3 or newer")
