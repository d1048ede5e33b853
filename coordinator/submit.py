"""Taking a job in: what a spec must be, whose name it takes, and what becomes of the job that had it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import time
from typing import TYPE_CHECKING

from moorage import roles
from moorage.coordinator.machine import JobPolicy, new_job
from moorage.coordinator.machine import events as ev
from moorage.coordinator.persist import Persistence
from moorage.errors import Conflict, NotFound, UsageError
from moorage.hooks import KINDS
from moorage.roles import Identity
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2
from moorage.v1.types_pb2 import JobSpec

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
#: Where a mount would take the place of what pid 1 and the pod are made of.
_RESERVED = re.compile(r"/|/dev|/(\.moorage[^/]*|proc|sys)(/.*)?")
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
#: No job is this large; more is a mistake in a flag.
_MAX_PODS = 8192
_MAX_RANKS = 1024


def policy_of(spec: JobSpec) -> JobPolicy:
    """The spec's policy with its defaults filled in. Raises `UsageError`."""
    policy = spec.policy
    for name in ("checkpoint_every_seconds", "attempt_deadline_seconds", "hang_seconds"):
        value = getattr(policy, name)
        if not 0 <= value < 1e9:
            raise UsageError(f"policy.{name} is {value:g}", "give seconds, not less than 0")
    if policy.durability not in ("", "local", "remote"):
        raise UsageError(f"durability {policy.durability!r} does not exist", "local or remote")
    if len(policy.keeper) > 80 or not policy.keeper.isprintable():
        raise UsageError("policy.keeper is no name", "give up to 80 printable characters")
    return JobPolicy(
        checkpoint_every_seconds=policy.checkpoint_every_seconds,
        keep_last=policy.keep_last or 3,
        on_failure="fail" if policy.on_failure == types_pb2.ON_FAILURE_FAIL else "restore",
        max_restarts=policy.max_restarts,
        cold_start=policy.if_incompatible == types_pb2.IF_INCOMPATIBLE_COLD_START,
        attempt_deadline_seconds=policy.attempt_deadline_seconds or 120.0,
        hang_seconds=policy.hang_seconds,
        elastic=policy.elastic,
        keeper=policy.keeper,
        durability="local" if policy.durability == "local" else "remote",
    )


def complete(spec: JobSpec, owner: str, job: str, *, as_root: bool = False) -> JobSpec:
    """A copy of ``spec`` with owner, name and numbers filled in; ``as_root``: whether it may run as root.

    Raises `UsageError` for one that cannot run.
    """
    full = JobSpec()
    full.CopyFrom(spec)
    full.owner = owner
    full.as_root = as_root
    full.name = full.name or job
    full.pods = full.pods or 1
    full.ranks_per_pod = full.ranks_per_pod or 1
    if not _NAME.fullmatch(full.name):
        raise UsageError(
            f"the name {full.name!r} cannot be used",
            "use up to 63 letters, digits, '-', '.' and '_', with a letter or digit at both ends",
        )
    if not full.command:
        raise UsageError("no command is given", "moorage run -- COMMAND...")
    if full.pods > _MAX_PODS or full.ranks_per_pod > _MAX_RANKS:
        raise UsageError(f"{full.pods} pods of {full.ranks_per_pod} ranks are too many")
    if full.working_directory and not full.working_directory.startswith("/"):
        raise UsageError(f"the working directory {full.working_directory!r} is not absolute")
    for mount in full.mounts:
        if not (mount.source.startswith("/") and mount.destination.startswith("/")):
            raise UsageError(f"mount {mount.source}:{mount.destination} is not absolute", "give --mount /SRC:/DST[:ro]")
        mount.destination = "/" + os.path.normpath(mount.destination).lstrip("/")
        if _RESERVED.fullmatch(mount.destination):
            raise UsageError(
                f"nothing can be mounted at {mount.destination} of a pod",
                "what is there makes the pod: name a folder of your own",
            )
    for kind, number in full.hooks.items():
        if kind not in KINDS or not 0 < number <= 64:
            raise UsageError(f"signal {number} for the event {kind!r} cannot be sent", f"events: {', '.join(KINDS)}")
    for port in full.publish:
        if port.pod >= full.pods:
            raise UsageError(f"port {port.host_port} is to be published for pod {port.pod} of {full.pods}")
    policy_of(full)
    return full


def new_id(request: str = "") -> str:
    """A job id that no other job has, by chance. The same request gets the same id, whichever coordinator it meets."""
    if not request:
        return "j" + "".join(secrets.choice(_ALPHABET) for _ in range(7))
    digest = hashlib.blake2b(request.encode(), digest_size=7).digest()
    return "j" + "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in digest)


async def submit(leader: Leader, request: pb.SubmitRequest, caller: Identity, owner: str, trace: str) -> Job:
    """Create the job, or find the one that stands for it.

    Raises `UsageError`, `NoCapacity`, `NotFound` (a named node is not there), `Conflict` (the name is taken),
    `Forbidden` (as another user, or over another's job).
    """
    as_root = roles.check_user(caller, request.spec.user)
    async with leader.submitting:
        if (known := _repeated(leader, request.request_id)) is not None:
            return known
        job = new_id(request.request_id)
        if job in leader.jobs:
            job = new_id()
        spec = complete(request.spec, owner, job, as_root=as_root)
        spec.policy.durability = spec.policy.durability or leader.config.durability
        if (holder := _holder(leader, spec.name)) is not None:
            if request.if_exists in (types_pb2.IF_EXISTS_RESUME, types_pb2.IF_EXISTS_REPLACE):
                roles.check_owner(caller, roles.ACT, holder.spec.owner, holder.state.name)
            resumed = await _meet(leader, holder, request, trace)
            if resumed is not None:
                return resumed
        on = tuple(request.on)
        leader.plan_for(spec, on=on)
        return await _create(leader, job, spec, request.request_id, trace, on)


def _repeated(leader: Leader, request: str) -> Job | None:
    if not request:
        return None
    for job in leader.jobs.values():
        if any(done.id == request and done.verb == "submit" for done in job.state.requests):
            return job
    return None


def _holder(leader: Leader, name: str) -> Job | None:
    try:
        job = leader.find(name)
    except NotFound:
        return None
    return job if job.state.name == name else None


async def _meet(leader: Leader, holder: Job, request: pb.SubmitRequest, trace: str) -> Job | None:
    """What ``if_exists`` says about the job that has the name; None: make a new one."""
    state = holder.state
    now = time.time()
    if request.if_exists == types_pb2.IF_EXISTS_RESUME:
        back = state.phase in ("parked", "failed", "stopped") and bool(state.base or state.latest)
        if back:
            await holder.ask(ev.RestoreAsked(time=now, request=request.request_id, trace=trace))
        return holder if back or state.phase not in ("failed", "stopped") else None
    if request.if_exists == types_pb2.IF_EXISTS_REPLACE:
        if not state.over:
            await holder.ask(ev.StopAsked(time=now))
            while not holder.state.over:
                change = asyncio.ensure_future(holder.changed.wait(holder.changed.rung, 1.0))
                await leader.while_leading(change)
        return None
    if not state.over:
        raise Conflict(
            f"job {state.name} exists and is {state.phase}",
            "choose another --name, or say --if-exists resume or replace",
        )
    return None


async def _create(leader: Leader, job: str, spec: JobSpec, request: str, trace: str, on: tuple[str, ...]) -> Job:
    if (written := await leader.load(job)) is not None:
        return written  # the answer to its creation was lost
    held = await leader.etcd.get(leader.keys.name(spec.name))
    state, found = new_job(
        job=job,
        name=spec.name,
        owner=spec.owner,
        pods=spec.pods,
        policy=policy_of(spec),
        now=time.time(),
        trace=trace,
        request=request,
        policies=leader.policies,
        on=on,
    )
    persistence = Persistence(leader.etcd, leader.keys, leader.leadership, job, 0)
    await persistence.create(state, spec.SerializeToString(deterministic=True), found, held)
    return leader.add(state, spec, persistence)
