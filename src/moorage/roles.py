"""Who may call what. Pure: a table of every RPC, and two decisions.

A certificate carries one role. Those of people, each including the ones before it:

* ``read``: see the cluster and everybody's jobs (without their environment), and read one's own results;
* ``operate``: submit jobs, and do everything with one's own;
* ``operate-all``: checkpoint, move, park, restore and stop everybody's jobs;
* ``administer``: nodes, tokens, the store, the audit trail, and jobs that run as root or as another user.

What a job computes, wrote and says is its owner's alone: no role reads another's logs, files or checkpoints.
``coordinator``, ``worker``, ``join`` (what a join token holds) are the roles of processes.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from moorage.errors import Forbidden

PersonRole = Literal["read", "operate", "operate-all", "administer"]
Role = Literal["read", "operate", "operate-all", "administer", "coordinator", "worker", "join"]
PERSONS: Final[tuple[str, ...]] = get_args(PersonRole)
ROLES: Final[tuple[str, ...]] = get_args(Role)

#: What a call is about: nothing of anybody's; a job that its owner, or whoever may operate all, acts upon; a job's own
#: data; something that only processes say to each other.
Kind = Literal["cluster", "job", "data", "process"]


class Rule(NamedTuple):
    """What one RPC asks for. ``least``: the lowest role of a person, or the one process role, that may call it."""

    kind: Kind
    least: Role
    audited: bool = True  # also when it was allowed; what was refused always is
    also: tuple[str, ...] = ()  # process roles that may call it too


def _see(*also: str) -> Rule:
    return Rule("cluster", "read", audited=False, also=also)


ACT: Final = Rule("job", "operate")
_ADMINISTER: Final = Rule("cluster", "administer")
_ORDER: Final = Rule("process", "coordinator", audited=False)

_COORDINATOR: Final[dict[str, Rule]] = {
    "Status": _see("worker", "coordinator", "join"),
    "GetJob": _see(),
    "ListJobs": _see(),
    "WatchJob": _see(),
    "GetAttempt": _see(),
    "WatchAttempt": _see(),
    "ListNodes": _see(),
    "DescribeNode": _see(),
    "ListCheckpoints": _see(),
    "ListEvents": _see(),
    "Submit": Rule("cluster", "operate"),
    "Checkpoint": ACT,
    "Park": ACT,
    "Move": ACT,
    "Restore": ACT,
    "Stop": ACT,
    "DeleteJob": ACT,
    "CheckCheckpoint": Rule("job", "operate", audited=False),
    "PinCheckpoint": ACT,
    "InspectCheckpoint": Rule("data", "read"),
    "CheckCompat": Rule("data", "read", audited=False),
    "ExamineJob": Rule("data", "read", audited=False),
    "ReadLogs": Rule("data", "read"),
    "Pull": Rule("data", "read"),
    "Exec": Rule("data", "operate"),
    "Prune": _ADMINISTER,
    "Cordon": _ADMINISTER,
    "Drain": _ADMINISTER,
    "CancelDrain": _ADMINISTER,
    "WatchDrain": _see(),
    "NodeToken": _ADMINISTER,
    "RemoveNode": Rule("cluster", "administer", also=("worker",)),  # a node itself alone: see below
    "Join": Rule("process", "join", audited=True),
}
_WORKER: Final[tuple[str, ...]] = (
    "StartPod", "RestorePod", "ReleasePod", "KillPod", "PreparePod", "FreezePod", "SealPod", "CapturePod", "ResumePod",
    "FinishPod", "WatchPods", "ReadLogs", "Exec", "Pull", "Describe", "ExaminePod", "CheckFit",
    "QuiescePod",
)  # fmt: skip

#: By full name of the method.
RULES: Final[dict[str, Rule]] = {
    **{f"/moorage.v1.Coordinator/{name}": rule for name, rule in _COORDINATOR.items()},
    **{f"/moorage.v1.Worker/{name}": _ORDER for name in _WORKER},
}


class Identity(NamedTuple):
    """Who calls: what the certificate says."""

    principal: str = ""
    role: str = ""
    serial: int = 0

    def __str__(self) -> str:
        return f"{self.principal or 'a caller without a name'} ({self.role or 'no role'})"


NOBODY: Final = Identity()
#: The rule of what nobody thought of: administrators alone.
UNKNOWN: Final = _ADMINISTER


class Attempt(NamedTuple):
    """One call for the audit trail. ``job`` and ``owner`` are empty for what is about no job."""

    time: float
    identity: Identity
    method: str  # without its service
    allowed: bool
    peer: str  # the caller's address
    job: str = ""
    owner: str = ""
    trace: str = ""
    reason: str = ""


def rule_of(method: str) -> Rule:
    """The rule of a method. One that nobody thought of is for administrators alone, and for none of a worker's."""
    unknown = _ORDER if method.startswith("/moorage.v1.Worker/") else UNKNOWN
    return RULES.get(method, unknown)


def includes(role: str, least: str) -> bool:
    """Whether a person's ``role`` includes ``least``. False for roles of processes."""
    return role in PERSONS and least in PERSONS and PERSONS.index(role) >= PERSONS.index(least)


def check(identity: Identity, method: str) -> Rule:
    """The method's rule, if the role may call it at all. Raises `Forbidden`."""
    rule = rule_of(method)
    if identity.role == rule.least or identity.role in rule.also or includes(identity.role, rule.least):
        return rule
    name = method.rpartition("/")[2]
    if not identity.role:
        raise Forbidden(f"the certificate of {identity.principal or 'this caller'} carries no role", _ANEW)
    hint = f"it takes the role {rule.least}" if rule.least in PERSONS else f"only a {rule.least} says that"
    raise Forbidden(f"{identity} may not call {name}", hint)


def check_owner(identity: Identity, rule: Rule, owner: str, job: str) -> None:
    """Whether the caller may do that to a job of ``owner``. Raises `Forbidden`."""
    if identity.principal == owner or rule.kind in ("cluster", "process"):
        return
    if rule.kind == "data":
        raise Forbidden(f"job {job} belongs to {owner}, and what it says and holds is its owner's alone", "")
    if not includes(identity.role, "operate-all"):
        raise Forbidden(f"job {job} belongs to {owner}", "it takes the role operate-all to act on it")


def check_user(identity: Identity, user: str) -> bool:
    """Whether the jobs of this caller may run as root; ``user`` is the job's ``--user``. Raises `Forbidden`."""
    if includes(identity.role, "administer"):
        return True
    account = identity.principal.removeprefix("user:")
    if user and user != account:
        raise Forbidden(f"{identity} may run jobs as {account} only, not as {user}", "leave out --user")
    return False


def check_leaving(identity: Identity, node: str) -> None:
    """Raise `Forbidden` when a node wants another one removed."""
    if identity.role == "worker" and identity.principal != f"worker:{node}":
        raise Forbidden(f"{identity} may not remove node {node}", "a node removes itself alone")


def check_audit(identity: Identity) -> None:
    """Raise `Forbidden` unless the caller may read who did what."""
    if not includes(identity.role, "administer"):
        raise Forbidden(f"{identity} may not read the audit trail", "it takes the role administer")


_ANEW: Final = "have it issued anew: moorage certs issue PRINCIPAL --role ROLE"
