"""The node agent: all pods of a node, who may order what, and what follows from a session that was lost.

`service` turns gRPC calls into the methods of `Agent`; here is decided whether an order is carried out:

* it must come from the coordinator that leads now, as etcd says, and for an incarnation that is not older than any that
  this worker knows (`pod_fence`);
* the node must have a session in etcd, but for orders that only end a pod;
* orders that let processes run (start, restore, release) are carried out only after etcd has confirmed the incarnation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

import msgspec
import structlog

from moorage.compat import job_from
from moorage.errors import Conflict, MoorageError, NotFound, Unavailable, UsageError
from moorage.v1 import types_pb2, worker_pb2
from moorage.worker import (
    agent_adopt,
    attempt,
    fit,
    pod_end,
    pod_fence,
    pod_fingerprint,
    pod_guard,
    pod_nccl,
    pod_record,
    pod_staging,
    pod_start,
    pod_user,
    preflight_pod,
    restore,
)
from moorage.worker.agent_hub import PodKey
from moorage.worker.agent_node import Node
from moorage.worker.guard.files import guard_alive
from moorage.worker.pod import Pod
from moorage.worker.pod_fence import Seen
from moorage.worker.pod_record import PodRecord
from moorage.worker.sandbox.cgroup import PodCgroup

log = structlog.get_logger(__name__)
_REFRESH_SECONDS = 1.0
_GUARD_SECONDS = 5.0


class Agent:
    """All pods of one node. Made once for a worker; `adopt` first, then orders."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pods: dict[PodKey, Pod] = {}
        self._seen = Seen()
        self._deadlines: set[asyncio.Task[None]] = set()

    # -- the session

    def load(self) -> None:
        """Find the pods that an earlier worker left; their guards are not asked yet. Raises `CorruptData`."""
        for pod in agent_adopt.load(self.node):
            self.pods[pod.key] = pod
        pod_user.sweep(self.node.sources)
        pod_staging.sweep(
            pod_staging.memory_root(self.node.config.cluster, self.node.name),
            {pod.memory_staging.name for pod in self.pods.values()},
        )

    async def hold(self) -> None:
        """Freeze the running pods that have no guard, before anything else: until one is back, nobody would see that
        the node's lease has run out. The guard that adopts such a pod lets it run on, if it may."""
        await asyncio.gather(*(self._hold(pod) for pod in self.pods.values()))

    @staticmethod
    async def _hold(pod: Pod) -> None:
        if pod.record.phase != "running" or guard_alive(pod.folder):
            return
        cgroup = PodCgroup(pod.cgroup)
        if cgroup.processes():
            try:
                await cgroup.freeze()
                log.warning("the pod has no guard and is frozen until one is back", pod=pod.label)
            except MoorageError as error:
                log.warning("the pod has no guard and is not frozen", pod=pod.label, error=str(error))

    async def adopt(self) -> None:
        """Connect to the guards of all pods found, replace dead ones, go on with what the earlier worker had begun."""
        await asyncio.gather(*(agent_adopt.adopt(pod) for pod in self.pods.values()))

    async def new_session(self) -> None:
        """Look at etcd for what changed while there was no session: who leads, and which incarnations are current.

        Pods of incarnations that were given up are ended; their guards would do so too. Raises `Unavailable`.
        """
        self._seen = pod_fence.learn(self._seen, epoch=await self.node.leader())
        for job in {pod.record.job for pod in self.pods.values()}:
            current = await self.node.incarnation(job)
            self._seen = pod_fence.learn(self._seen, job=job, incarnation=current)
            for pod in [pod for pod in self.pods.values() if pod.record.job == job]:
                if pod.record.incarnation < current:
                    self._retire(pod)

    def _retire(self, pod: Pod) -> None:
        async def work() -> None:
            try:
                await pod_end.kill(pod, 0.0, "a newer incarnation of the job exists")
                await self._remove(pod)
            except (MoorageError, OSError) as error:
                log.warning("stale pod not removed", pod=pod.label, error=str(error))

        self._background(work())

    def deadline_moved(self, deadline: float) -> None:
        """Hand the session's new local deadline to all guards."""
        for pod in self.pods.values():
            if pod.guard is not None and not pod.gone:
                self._background(self._tell_deadline(pod, deadline))

    @staticmethod
    async def _tell_deadline(pod: Pod, deadline: float) -> None:
        try:
            if pod.guard is not None:
                await asyncio.wait_for(pod.guard.deadline(deadline), _GUARD_SECONDS)
        except (
            MoorageError,
            TimeoutError,
        ) as error:  # its guard is being replaced, and the next one gets the deadline at its start
            log.info("deadline not told", pod=pod.label, error=str(error))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._deadlines.add(task)
        task.add_done_callback(self._deadlines.discard)

    async def refresh(self) -> None:
        """Keep processor time and output bytes current, until cancelled."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            await asyncio.gather(*(pod_guard.refresh(pod) for pod in list(self.pods.values())))

    async def close(self) -> bool:
        """Let go of all pods; they live on with their guards. Returns whether none of them has a process."""
        await asyncio.gather(*(pod.disconnect() for pod in self.pods.values()), return_exceptions=True)
        return all(pod.gone for pod in self.pods.values())

    # -- who may order what

    async def admit(self, fence: worker_pb2.Fence) -> None:
        """Raise `Fenced` for a stale order, `Unavailable` while the node has no session or etcd says nothing.

        Etcd is asked with every order: a coordinator that was replaced a moment ago may not know it yet, and nobody
        has told this worker of its successor.
        """
        self.node.lease.require()
        pod_fence.admit(self._seen, epoch=fence.epoch, job=fence.job, incarnation=fence.incarnation)
        pod_fence.confirm_leader(await self.node.leader(), fence.epoch)
        # Looked at again: meanwhile another order may have told of a newer incarnation.
        self._seen = pod_fence.admit(self._seen, epoch=fence.epoch, job=fence.job, incarnation=fence.incarnation)

    async def check_leader(self, epoch: int) -> None:
        """Raise `Fenced` when a coordinator that was replaced speaks, as far as can be known: etcd may be away."""
        pod_fence.check_epoch(self._seen, epoch)
        try:
            leader = await self.node.leader()
        except Unavailable as error:
            log.info("who leads is not confirmed", epoch=epoch, reason=str(error))
            return
        pod_fence.confirm_leader(leader, epoch)
        self._seen = pod_fence.learn(self._seen, epoch=epoch)

    def find(self, job: str, incarnation: int, pod: int) -> Pod:
        """Raises `NotFound`."""
        found = self.pods.get((job, incarnation, pod))
        if found is None:
            raise NotFound(f"pod {pod} of job {job}, incarnation {incarnation}, is not on node {self.node.name}")
        return found

    def newest(self, job: str, pod: int) -> Pod:
        """The pod of the highest incarnation. Raises `NotFound`."""
        found = max((p for (j, _, n), p in self.pods.items() if (j, n) == (job, pod)), key=_incarnation, default=None)
        if found is None:
            raise NotFound(f"pod {pod} of job {job} is not on node {self.node.name}")
        return found

    async def _of(self, fence: worker_pb2.Fence) -> Pod:
        await self.admit(fence)
        return self.find(fence.job, fence.incarnation, fence.pod)

    # -- orders

    async def start(self, request: worker_pb2.StartPodRequest) -> worker_pb2.PodReply:
        pod = await self._new(request.fence, request.spec, request.membership)
        timings = await pod.order("start", 0, lambda: self._once(pod, pod_start.start))
        return worker_pb2.PodReply(status=pod.status(), timings=timings)

    async def restore(self, request: worker_pb2.RestorePodRequest) -> worker_pb2.PodReply:
        pod = await self._new(
            request.fence, request.spec, request.membership, manifest=request.manifest, checkpoint=request.checkpoint
        )
        timings = await pod.order("restore", 0, lambda: self._once(pod, restore.restore))
        return worker_pb2.PodReply(status=pod.status(), timings=timings)

    def _older(self, fence: worker_pb2.Fence) -> list[Pod]:
        """Pods of the same number and job whose incarnation was given up."""
        return [
            pod
            for (job, incarnation, number), pod in self.pods.items()
            if (job, number) == (fence.job, fence.pod) and incarnation < fence.incarnation
        ]

    @staticmethod
    async def _once(pod: Pod, work: Callable[[Pod], Awaitable[dict[str, float]]]) -> dict[str, float]:
        """Carry out ``work`` unless an earlier order has done so already."""
        if pod.record.phase == "starting":
            return await work(pod)
        if pod.record.phase == "failed":
            raise Conflict(f"{pod.label} has failed: {pod.record.reason}", "end it, then start it in a new incarnation")
        return {}

    async def _new(
        self,
        fence: worker_pb2.Fence,
        spec: types_pb2.JobSpec,
        membership: worker_pb2.Membership,
        *,
        manifest: str = "",
        checkpoint: str = "",
    ) -> Pod:
        """The pod of this fence, made if it is not there. Raises `Fenced`, `Unavailable`, `Conflict`."""
        await self.admit(fence)
        await self.node.confirm(fence.job, fence.incarnation)
        key = (fence.job, fence.incarnation, fence.pod)
        pod = self.pods.get(key)
        if pod is None:
            record = PodRecord(
                boot=self.node.boot,
                job=fence.job,
                pod=fence.pod,
                incarnation=fence.incarnation,
                spec=spec.SerializeToString(deterministic=True),
                membership=membership.SerializeToString(deterministic=True),
                manifest=manifest,
                checkpoint=checkpoint,
            )
            pod = Pod(self.node, record)
            pod_record.remove_folder(pod.folder)
            pod.save()
            self.pods[key] = pod
            pod.publish()
            for older in self._older(fence):
                self._retire(older)
        elif pod.record.manifest != manifest:
            raise Conflict(f"{pod.label} was made in another way already", "end it first")
        return pod

    async def release(self, request: worker_pb2.PodOrder) -> worker_pb2.PodReply:
        pod = await self._of(request.fence)
        await self.node.confirm(pod.record.job, pod.record.incarnation)
        timings = await pod.order("release", 0, lambda: restore.release(pod))
        return worker_pb2.PodReply(status=pod.status(), timings=timings)

    async def prepare(self, request: worker_pb2.AttemptOrder) -> worker_pb2.PrepareReply:
        pod = await self._of(request.fence)
        return await pod.order("prepare", request.attempt, lambda: attempt.prepare(pod, request))

    async def freeze(self, request: worker_pb2.AttemptOrder) -> worker_pb2.PodReply:
        pod = await self._of(request.fence)
        timings = await pod.order("freeze", request.attempt, lambda: attempt.freeze(pod, request))
        return worker_pb2.PodReply(status=pod.status(), timings=timings)

    async def seal(self, request: worker_pb2.AttemptOrder) -> worker_pb2.PodReply:
        pod = await self._of(request.fence)
        timings = await pod.order("seal", request.attempt, lambda: attempt.seal(pod, request))
        return worker_pb2.PodReply(status=pod.status(), timings=timings)

    async def capture(self, request: worker_pb2.AttemptOrder) -> worker_pb2.CaptureReply:
        pod = await self._of(request.fence)
        timings, size = await pod.order("capture", request.attempt, lambda: attempt.capture(pod, request))
        return worker_pb2.CaptureReply(status=pod.status(), timings=timings, image_bytes=size)

    async def resume(self, request: worker_pb2.AttemptOrder) -> worker_pb2.PodReply:
        pod = await self._of(request.fence)
        await pod.order("resume", request.attempt, lambda: attempt.resume(pod, request))
        return worker_pb2.PodReply(status=pod.status())

    async def quiesce(self, request: worker_pb2.QuiesceRequest) -> worker_pb2.QuiesceReply:
        """One step of a consistent cut, beside the pod's orders: it does not wait for them.

        Who leads is not confirmed for rounds: what a coordinator that was replaced says of its cut is out of date as
        soon as another one has begun.
        """
        fence = request.fence
        if request.step == "round":
            pod_fence.admit(self._seen, epoch=fence.epoch, job=fence.job, incarnation=fence.incarnation)
            pod = self.find(fence.job, fence.incarnation, fence.pod)
        else:
            pod = await self._of(fence)
        return await pod_nccl.quiesce(pod, request)

    async def kill(self, request: worker_pb2.KillPodRequest) -> worker_pb2.PodReply:
        """End the pod of the fence's incarnation (``any_incarnation``: and all before it); never refused for being old.

        What is not of the job's current incarnation any more is removed; the rest stays for `finish`.
        """
        fence = request.fence
        await self.check_leader(fence.epoch)
        own = self.pods.get((fence.job, fence.incarnation, fence.pod))
        doomed = ([own] if own else []) + (self._older(fence) if request.any_incarnation else [])
        await asyncio.gather(*(self._kill(pod, request.grace_seconds) for pod in sorted(doomed, key=_incarnation)))
        status = types_pb2.PodStatus(
            job=fence.job, pod=fence.pod, incarnation=fence.incarnation, node=self.node.name, phase="killed"
        )
        return worker_pb2.PodReply(status=own.status() if own else status)

    async def _kill(self, pod: Pod, grace: float) -> None:
        await pod_end.kill(pod, grace, "ordered by the coordinator")
        try:
            current = await self.node.incarnation(pod.record.job)
        except MoorageError as error:
            log.info("folder kept", pod=pod.label, reason=str(error))
            return
        if current != pod.record.incarnation:
            await self._remove(pod)

    async def _remove(self, pod: Pod) -> None:
        async with pod.removing:
            if self.pods.get(pod.key) is pod:
                await pod_end.remove(pod)
                del self.pods[pod.key]
        if not any(job == pod.record.job for job, _, _ in self.pods):
            self._seen = pod_fence.forget(self._seen, pod.record.job)

    async def finish(self, request: worker_pb2.PodOrder) -> worker_pb2.PodReply:
        """The job has ended: archive logs, write results back, remove."""
        fence = request.fence
        await self.admit(fence)
        pod = self.pods.get((fence.job, fence.incarnation, fence.pod))
        status = types_pb2.PodStatus(
            job=fence.job, pod=fence.pod, incarnation=fence.incarnation, node=self.node.name, phase="exited"
        )
        if pod is None:
            return worker_pb2.PodReply(status=status)
        status = pod.status()
        status.reason = await pod_end.finish(pod) or status.reason
        await self._remove(pod)
        return worker_pb2.PodReply(status=status)

    async def examine(self, request: worker_pb2.ExamineRequest) -> worker_pb2.ExamineReply:
        """Look at a pod and touch nothing. Beside its orders: it does not wait for them."""
        fence = request.fence
        await self.admit(fence)
        pod = self.find(fence.job, fence.incarnation, fence.pod)
        found = await preflight_pod.look(pod)
        data = b""
        if request.fingerprint:
            label = pod.spec.labels.get("model", "")
            seen = await asyncio.to_thread(pod_fingerprint.scan, [] if pod.gone else pod.processes(), label=label)
            data = msgspec.json.encode(await asyncio.to_thread(pod_fingerprint.build, pod, seen))
        return worker_pb2.ExamineReply(refusals=attempt.refusals(found.objections), fingerprint=data)

    async def fit(self, request: worker_pb2.FitRequest) -> worker_pb2.FitReply:
        """How this node stands to what a pod needs. Raises `UsageError` for a fingerprint that is none."""
        try:
            job = job_from(msgspec.json.decode(request.fingerprint, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise UsageError(f"this is no fingerprint: {error}") from None
        found = await asyncio.to_thread(fit.verdict, self.node, job)
        return worker_pb2.FitReply(lines=[worker_pb2.FitLine(**msgspec.structs.asdict(line)) for line in found.lines])

    def watch(self) -> AsyncIterator[types_pb2.PodStatus]:
        """All pods now, one empty status, then every change."""
        return self.node.hub.watch(self._statuses)

    def _statuses(self) -> Iterable[types_pb2.PodStatus]:
        return [pod.status() for pod in self.pods.values()]


def _incarnation(pod: Pod) -> int:
    return pod.record.incarnation
