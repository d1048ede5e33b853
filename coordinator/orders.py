"""Carrying out the machine's orders outside of checkpoints: place, fence, load, release, kill, finish, alarms.

Each function works until its order is done or has failed, and posts what came of it as an event. All may be cancelled
at any moment and begun again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import structlog

from moorage.barrier import clock
from moorage.coordinator import counters, fit, quiesce, uploads
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine.instructions import Alarm, Fence, Finish, Kill, Load, Order, Place, Release
from moorage.coordinator.machine.state import Seat, Target
from moorage.coordinator.on_pods import Failure, all_pods, fence_of, on_pod
from moorage.coordinator.workers import NodeGone
from moorage.errors import Fenced, Incompatible, MoorageError, NoCapacity, NotFound, Unavailable
from moorage.v1 import worker_pb2
from moorage.v1.types_pb2 import JobSpec

if TYPE_CHECKING:
    from moorage.coordinator.job import Job
    from moorage.coordinator.leader import Leader

log = structlog.get_logger(__name__)

#: Seconds beyond a lease's end: clocks that run at different rates, and the guard's freezing itself.
FENCE_MARGIN = 1.0


async def reported(job: Job, order: Order, work: Awaitable[ev.Event]) -> None:
    """Post the event that ``work`` gives, or what its failure means."""
    try:
        job.post(await work)
    except Failure as failure:
        job.post(failure.event(order))
    except NodeGone as gone:
        job.post(ev.NodeLost(time=time.time(), node=gone.node))


async def place(leader: Leader, job: Job, order: Place) -> None:
    """Choose nodes; as long as there are none, say so when the reason changes and wait for nodes."""
    told = ""
    while True:
        seen = leader.nodes.changed.rung
        plan = job.state.bringup
        misfits = await fit.of_checkpoint(leader, plan.checkpoint) if plan is not None and plan.checkpoint else {}
        try:
            on, wanted = ((), order.on) if order.exact else (order.on, ())
            names = leader.plan(job, on=on, seats=wanted, exclude=order.exclude, misfits=misfits)
            leader.promise(job, names)
            break
        except (NoCapacity, NotFound, Incompatible) as error:
            if str(error) != told:
                told = str(error)
                reason, hint = (error.message, error.hint) if isinstance(error, Incompatible) else (told, "")
                kind = "Incompatible" if isinstance(error, Incompatible) else ""
                job.post(ev.Unplaceable(time=time.time(), of=order, reason=reason, error_kind=kind, hint=hint))
        await leader.nodes.changed.wait(seen, 5.0)
    records = [leader.nodes.live[name] for name in names]
    seats = tuple(Seat(r.node, float(r.lease_seconds), r.lease_kept) for r in records)
    vni = await counters.vni(leader)
    slot = job.state.slot or await counters.slot(leader, job.state.pods)
    job.post(ev.Placed(time=time.time(), of=order, seats=seats, vni=vni, slot=slot))


async def fence(leader: Leader, job: Job, order: Fence) -> None:
    """Kill what can be reached, and wait out what cannot."""
    began = clock.now()
    await all_pods(_fence(leader, job, order, target, began) for target in order.targets)
    job.post(ev.Done(time=time.time(), of=order))


async def _fence(leader: Leader, job: Job, order: Fence, target: Target, began: float) -> None:
    while True:
        leader.require()
        seen = leader.nodes.changed.rung
        request = worker_pb2.KillPodRequest(fence=fence_of(leader, job, target.pod, order.bound), any_incarnation=True)
        try:
            await leader.workers.order(target.node, "kill", request, trace=job.state.trace)
            return
        except NodeGone:
            if await _ran_out(leader, target, began):
                return
        except Fenced:
            await leader.verify()
            raise
        except MoorageError as error:
            # The node is there and cannot say that the pod is dead: nothing else may be assumed.
            log.warning("pod not killed", job=job.id, pod=target.pod, node=target.node, error=str(error))
            await leader.nodes.changed.wait(seen, 1.0)


async def _ran_out(leader: Leader, target: Target, began: float) -> bool:
    """Wait until no process on a lost node can run unfrozen; False when the node is back before that.

    When the worker keeps its lease for as long as pods live, a registration that is gone means that the lease has run
    out, and with it every guard's deadline, which is earlier. Otherwise the lease's whole time is waited. After that
    etcd is asked once more, past whatever the watch may lag behind: a node that had come back would be registered,
    since a worker registers before it gives its guards a new deadline.
    """
    nodes = leader.nodes
    while True:
        seen = nodes.changed.rung
        if target.node in nodes.live:
            return False
        lease = 0.0 if target.lease_kept else target.lease_seconds
        left = max(nodes.gone_since(target.node) + lease, began) + FENCE_MARGIN - clock.now()
        if left <= 0:
            break
        await nodes.changed.wait(seen, left)
    while True:
        try:
            return not await nodes.registered(target.node)
        except Unavailable:
            await asyncio.sleep(0.3)


async def load(leader: Leader, job: Job, order: Load) -> None:
    """Start or restore every pod."""
    await reported(job, order, _load(leader, job, order))


async def _load(leader: Leader, job: Job, order: Load) -> ev.Event:
    state = job.state
    records = [leader.workers.live(seat.node) for seat in state.seats]
    members = [
        worker_pb2.Member(pod=pod, node=record.node, node_address=record.address) for pod, record in enumerate(records)
    ]
    membership = worker_pb2.Membership(vni=state.vni, members=members, slot=state.slot)
    fences = [fence_of(leader, job, pod, order.incarnation) for pod in range(state.pods)]
    if not order.checkpoint:
        spec = _restarted(job)
        await all_pods(
            on_pod(
                leader,
                job,
                pod,
                "start",
                worker_pb2.StartPodRequest(fence=fences[pod], spec=spec, membership=membership),
            )
            for pod in range(state.pods)
        )
        return ev.Done(time=time.time(), of=order)
    async with contextlib.AsyncExitStack() as stack:
        try:
            manifests = await stack.enter_async_context(leader.checkpoints.protected(order.checkpoint))
            if lost := await _out_of_reach(leader, job, order):
                return lost
        except (Unavailable, OSError):
            raise
        except MoorageError as error:
            return ev.Failed(
                time=time.time(), of=order, message=error.message, hint=error.hint, error_kind=type(error).__name__
            )
        await all_pods(
            on_pod(
                leader,
                job,
                pod,
                "restore",
                worker_pb2.RestorePodRequest(
                    fence=fences[pod],
                    spec=job.spec,
                    membership=membership,
                    checkpoint=order.checkpoint,
                    manifest=manifests[pod],
                ),
            )
            for pod in range(state.pods)
        )
    return ev.Done(time=time.time(), of=order)


def _restarted(job: Job) -> JobSpec:
    """The spec with the variable by which a torchrun script learns that it begins again."""
    if not (job.spec.rendezvous and job.state.restarts):
        return job.spec
    spec = JobSpec()
    spec.CopyFrom(job.spec)
    spec.rank_env["TORCHELASTIC_RESTART_COUNT"] = str(job.state.restarts)
    return spec


async def _out_of_reach(leader: Leader, job: Job, order: Load) -> ev.Failed | None:
    """What to say when a pod of the checkpoint was never uploaded and its node is not among the job's any more."""
    record = await leader.checkpoints.get(order.checkpoint)
    pods = await uploads.unreachable(leader, job, record)
    if not pods:
        return None
    nodes = ", ".join(sorted({record.nodes[pod] for pod in pods}))
    return ev.Failed(
        time=time.time(),
        of=order,
        message=f"checkpoint {order.checkpoint} was not in the store yet, and what is missing is on {nodes}",
        hint="bring that node back; --durability remote makes a checkpoint count only when it is in the store",
        error_kind="NotFound",
        fallback=await uploads.fallback(leader, record),
    )


async def release(leader: Leader, job: Job, order: Release) -> None:
    """Let every restored pod run."""

    async def work() -> ev.Event:
        await all_pods(
            on_pod(
                leader,
                job,
                pod,
                "release",
                worker_pb2.PodOrder(fence=fence_of(leader, job, pod, order.incarnation)),
            )
            for pod in range(job.state.pods)
        )
        await quiesce.open_again(leader, job, order.incarnation)
        return ev.Done(time=time.time(), of=order)

    await reported(job, order, work())


async def kill(leader: Leader, job: Job, order: Kill) -> None:
    """End the processes of every pod that can be reached."""
    requests = [
        worker_pb2.KillPodRequest(
            fence=fence_of(leader, job, pod, order.incarnation), grace_seconds=order.grace_seconds
        )
        for pod in range(job.state.pods)
    ]
    await _close(leader, job, order, "kill", requests, extra=order.grace_seconds)


async def finish(leader: Leader, job: Job, order: Finish) -> None:
    """Keep logs and results of every pod that can be reached, and remove it."""
    requests = [
        worker_pb2.PodOrder(fence=fence_of(leader, job, pod, order.incarnation)) for pod in range(job.state.pods)
    ]
    await _close(leader, job, order, "finish", requests)


async def _close(
    leader: Leader, job: Job, order: Kill | Finish, name: str, requests: list[Any], *, extra: float = 0.0
) -> None:
    unreached: list[int] = []
    notes: list[str] = []

    async def one(pod: int) -> None:
        node = job.state.seats[pod].node
        known = job.telemetry.pods.get(pod)
        try:
            reply = await on_pod(leader, job, pod, name, requests[pod], extra=extra)
        except NodeGone:
            unreached.append(pod)
        except Failure as failure:
            if name == "kill":
                raise failure.error from failure  # given again: nothing of it may run on
            notes.append(f"pod {pod} on {node}: {failure.error.message}")
        else:
            told = reply.status.reason
            if name == "finish" and told and (known is None or told != known.reason):
                notes.append(f"pod {pod}: {told}")  # what became of its results, not why it had ended

    await all_pods(one(pod) for pod in range(job.state.pods))
    job.post(ev.Closed(time=time.time(), of=order, unreached=tuple(sorted(unreached)), notes=tuple(notes)))


async def alarm(leader: Leader, job: Job, order: Alarm) -> None:
    """Ring at the given time."""
    while (left := order.at - time.time()) > 0:  # noqa: ASYNC110 - nothing happens that could be waited for
        # In slices: the wall clock may be set, and timers stand still while the machine is suspended.
        await asyncio.sleep(min(left, 5.0))
    job.post(ev.AlarmRang(time=time.time(), of=order))


EXECUTORS: dict[type[Order], Callable[[Any, Any, Any], Awaitable[None]]] = {
    Place: place,
    Fence: fence,
    Load: load,
    Release: release,
    Kill: kill,
    Finish: finish,
    Alarm: alarm,
}
