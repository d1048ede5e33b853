"""Every RPC and every role: who gets past the check."""

from __future__ import annotations

import pytest

from moorage import roles, skew
from moorage.errors import Forbidden, Incompatible
from moorage.roles import Identity
from moorage.v1 import POOL

COORDINATOR, WORKER = "moorage.v1.Coordinator", "moorage.v1.Worker"
SEE = {
    "Status", "GetJob", "ListJobs", "WatchJob", "GetAttempt", "WatchAttempt", "ListNodes", "DescribeNode",
    "ListCheckpoints", "ListEvents", "WatchDrain", "InspectCheckpoint", "ReadLogs", "Pull", "CheckCompat", "ExamineJob",
}  # fmt: skip
#: What a role may call, beyond the one before it.
MORE = {
    "read": SEE,
    "operate": {
        "Submit",
        "Checkpoint",
        "Park",
        "Move",
        "Restore",
        "Stop",
        "DeleteJob",
        "CheckCheckpoint",
        "PinCheckpoint",
        "Exec",
    },
    "operate-all": set(),
    "administer": {"Prune", "Cordon", "Drain", "CancelDrain", "NodeToken", "RemoveNode"},
}


def methods(service: str) -> list[str]:
    return POOL.methods(service)


def allowed(role: str, service: str) -> set[str]:
    found = set()
    for name in methods(service):
        try:
            roles.check(Identity("somebody", role, 1), f"/{service}/{name}")
        except Forbidden:
            continue
        found.add(name)
    return found


def test_every_rpc_has_a_rule() -> None:
    known = {f"/{service}/{name}" for service in (COORDINATOR, WORKER) for name in methods(service)}
    missing = known - set(roles.RULES)
    assert not missing, f"say in src/moorage/roles.py who may call these: {sorted(missing)}"
    assert not set(roles.RULES) - known, "these are no RPCs any more"


def test_no_role_of_a_person_gets_past_the_check_where_it_should_not() -> None:
    expected: set[str] = set()
    for role, more in MORE.items():
        expected |= more
        # All of them: an RPC that this table does not name would be nobody's decision.
        assert allowed(role, COORDINATOR) == expected, role
        assert not allowed(role, WORKER), role


def test_processes_may_do_what_they_are_for_and_nothing_else() -> None:
    assert allowed("coordinator", WORKER) == set(methods(WORKER))
    assert allowed("coordinator", COORDINATOR) == {"Status"}
    assert allowed("worker", COORDINATOR) == {"Status", "RemoveNode"}
    assert not allowed("worker", WORKER)
    assert allowed("join", COORDINATOR) == {"Status", "Join"}
    assert not allowed("join", WORKER)


def test_a_node_removes_itself_alone() -> None:
    roles.check_leaving(Identity("worker:a", "worker", 1), "a")
    roles.check_leaving(Identity("user:ann", "administer", 1), "b")
    with pytest.raises(Forbidden, match="may not remove node b"):
        roles.check_leaving(Identity("worker:a", "worker", 1), "b")


@pytest.mark.parametrize("role", ["", "root", "administer "])
def test_a_certificate_with_no_known_role_may_do_nothing(role: str) -> None:
    assert not allowed(role, COORDINATOR)
    assert not allowed(role, WORKER)


def test_what_nobody_thought_of_is_for_administrators_alone() -> None:
    with pytest.raises(Forbidden):
        roles.check(Identity("user:a", "operate-all", 1), f"/{COORDINATOR}/SomethingNew")
    with pytest.raises(Forbidden):
        roles.check(Identity("user:a", "administer", 1), f"/{WORKER}/SomethingNew")


@pytest.mark.parametrize("role", roles.PERSONS)
@pytest.mark.parametrize("name", [n for n, r in roles.RULES.items() if r.kind == "data"])
def test_what_a_job_says_and_holds_is_its_owners_alone(role: str, name: str) -> None:
    rule = roles.RULES[name]
    with pytest.raises(Forbidden, match="is its owner's alone"):
        roles.check_owner(Identity("user:bob", role, 1), rule, "user:ann", "j1")
    roles.check_owner(Identity("user:ann", role, 1), rule, "user:ann", "j1")


@pytest.mark.parametrize("name", [n for n, r in roles.RULES.items() if r.kind == "job"])
def test_acting_on_anothers_job_takes_the_role_for_it(name: str) -> None:
    rule = roles.RULES[name]
    for role in ("operate-all", "administer"):
        roles.check_owner(Identity("user:bob", role, 1), rule, "user:ann", "j1")
    for role in ("read", "operate"):
        with pytest.raises(Forbidden, match="operate-all"):
            roles.check_owner(Identity("user:bob", role, 1), rule, "user:ann", "j1")


def test_only_administrators_run_jobs_as_somebody_else_or_as_root() -> None:
    assert roles.check_user(Identity("user:ann", "administer", 1), "0:0")
    assert not roles.check_user(Identity("user:ann", "operate-all", 1), "")
    assert not roles.check_user(Identity("user:ann", "operate", 1), "ann")
    for user in ("root", "0", "bob", "1000", "ann:0"):
        with pytest.raises(Forbidden, match="as ann only"):
            roles.check_user(Identity("user:ann", "operate-all", 1), user)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("0.2.0 0.1", "0.2.7 0.1"),
        ("0.2.0 0.1", "0.1.3 0.0"),
        ("0.2.0 0.1", "0.3.0 0.2"),
        ("0.9.0 0.8", "1.0.0 0.9"),
        ("1.0.0 0.9", "0.9.4 0.8"),
        ("0.1.0 0.0", ""),
        ("0.2.0+dirty 0.1", "0.2.0 0.1"),
    ],
)
def test_neighbouring_releases_work_together(ours: str, theirs: str) -> None:
    skew.check(theirs, "it", ours=ours)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("0.3.0 0.2", "0.1.0 0.0"), ("0.1.0 0.0", "0.3.0 0.2"), ("1.0.0 0.9", "0.8.0 0.7"), ("0.3.0 0.2", "")],
)
def test_releases_further_apart_are_refused_with_both_named(ours: str, theirs: str) -> None:
    with pytest.raises(Incompatible, match=f"this is {ours.split()[0]}: more than one release apart"):
        skew.check(theirs, "node n", ours=ours)


def test_this_release_and_the_one_before_it_are_named() -> None:
    from moorage import __version__

    assert skew.said().split() == [__version__, skew.PREVIOUS]
    assert skew.release(__version__) != skew.PREVIOUS
