"""What the errors of etcd and gRPC mean. The texts are etcd's own."""

from __future__ import annotations

import grpc
import pytest

from moorage.barrier.replies import Compacted, check_version, classify, refusal
from moorage.errors import Conflict, EnvironmentLacking, Forbidden, MoorageError, NoCapacity, NotFound

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details", "meaning"),
    [
        (Code.UNAVAILABLE, "etcdserver: no leader", "unsent"),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", "unsent"),
        (Code.UNAVAILABLE, "etcdserver: rpc not supported for learner", "unsent"),
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", "token"),
        (Code.INVALID_ARGUMENT, "etcdserver: user name is empty", "token"),
        (Code.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", "token"),
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", "refused"),
        (Code.NOT_FOUND, "etcdserver: requested lease not found", "refused"),
        (Code.INVALID_ARGUMENT, "etcdserver: too many operations in txn request", "refused"),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", "refused"),
        (Code.RESOURCE_EXHAUSTED, "grpc: received message larger than max (3 vs. 2)", "refused"),
        (Code.RESOURCE_EXHAUSTED, "GOAWAY received; too_many_pings", "unknown"),
        (Code.UNAVAILABLE, "etcdserver: leader changed", "unknown"),
        (Code.UNAVAILABLE, "etcdserver: request timed out", "unknown"),
        (Code.UNAVAILABLE, "etcdserver: request timed out, possibly due to previous leader failure", "unknown"),
        (Code.UNAVAILABLE, "Socket closed", "unknown"),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", "unknown"),
        (Code.CANCELLED, "RST_STREAM with error code 8", "unknown"),
        (Code.INTERNAL, "raft proposal dropped", "unknown"),
        (Code.UNKNOWN, "", "unknown"),
    ],
)
def test_a_failure_is_known_to_be_without_effect_only_where_etcd_says_so(
    code: Code, details: str, meaning: str
) -> None:
    assert classify(code, details) == meaning


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (Code.PERMISSION_DENIED, "etcdserver: permission denied", Forbidden),
        (Code.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password", Forbidden),
        (Code.UNAUTHENTICATED, "etcdserver: invalid auth token", Forbidden),
        (Code.NOT_FOUND, "etcdserver: requested lease not found", NotFound),
        (Code.FAILED_PRECONDITION, "etcdserver: lease already exists", Conflict),
        (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", NoCapacity),
        (Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Compacted),
        (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", MoorageError),
    ],
)
def test_a_refusal_becomes_an_error_that_names_the_place(code: Code, details: str, kind: type[Exception]) -> None:
    error = refusal(code, details, "127.0.0.1:2379", "me")
    assert type(error) is kind
    assert kind is Compacted or "127.0.0.1:2379" in str(error)


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2", "3.5.0-alpha.0", "3.5.2+git"])
def test_a_release_that_can_lose_data_is_refused(version: str) -> None:
    with pytest.raises(EnvironmentLacking, match="can lose data"):
        check_version(version, "etcd")


@pytest.mark.parametrize("version", ["3.4.27", "3.5.3", "3.5.20", "3.5.30", "3.6.1", "", "unknown"])
def test_other_releases_are_taken(version: str) -> None:
    check_version(version, "etcd")
