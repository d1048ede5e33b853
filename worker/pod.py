"""`Pod`: one pod on this node as its worker knows it: the record, the guard, the network, the layers.

Only facts and single steps stand here. What an order does with them is in `pod_start`, `restore`, `attempt`, `persist`
and `pod_end`.

Orders to one pod are carried out one at a time, each in a task of its own: a caller that goes away does not stop what
it began, and the same order again joins the one under way. A kill goes ahead of the queue (`dying`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from moorage.barrier import clock
from moorage.errors import Conflict, MoorageError, NotFound, Unavailable
from moorage.v1.types_pb2 import JobSpec, PodStatus, RankStatus
from moorage.worker import pod_record, pod_staging
from moorage.worker.agent_hub import PodKey
from moorage.worker.agent_node import Node
from moorage.worker.guard.client import GuardClient, guard_alive
from moorage.worker.guard.messages import GuardConfig, GuardStatus
from moorage.worker.layers import CaptureIndex, LayerCapture, PodLayers
from moorage.worker.nccl.pod import PodProcesses
from moorage.worker.network import MemberAddress, PodNetwork, PublishedPort
from moorage.worker.pod_phase import GONE_PHASES, Change, follow
from moorage.worker.pod_record import PodRecord
from moorage.worker.pod_user import Opened
from moorage.worker.sandbox.cgroup import PodCgroup
from moorage.worker.sandbox.process import inner_pid

log = structlog.get_logger(__name__)
T = TypeVar("T")

#: How long an operation waits for a guard that has died to be replaced, in seconds.
_GUARD_SECONDS = 20.0


class Pod:
    """One pod. ``record`` is what is on disk; `change` and `save` keep the two equal."""

    def __init__(self, node: Node, record: PodRecord) -> None:
        self.node = node
        self.record = record
        self.folder = pod_record.pod_folder(node.state, record.job, record.incarnation, record.pod)
        self.spec: JobSpec = record.job_spec()
        self.network = self._network()
        self.guard: GuardClient | None = None
        self.guard_state: GuardStatus | None = None
        self.guard_ready = asyncio.Event()
        self.unfenced = asyncio.Event()  # as the guard said last
        self.over = asyncio.Event()  # no process of the pod is left
        self.dying = False
        self.lock = asyncio.Lock()
        self.removing = asyncio.Lock()
        self.bytes_needed = 0  # the last preflight's estimate of a capture
        self.captured_layer: LayerCapture | None = None
        self.index: CaptureIndex | None = None
        self.cancel_persist = threading.Event()
        self.ran_on = asyncio.Event()  # after the attempt under way, or nobody waits for that any more
        self.sessions: dict[int, str] = {}  # exec sessions under way: number and command
        #: What to do when something happens that the attempt under way cannot survive: gets a sentence.
        self.on_spoiled: Callable[[str], Awaitable[None]] | None = None
        self.watcher: asyncio.Task[None] | None = None  # waits for the outcome of the attempt
        self.persisting: asyncio.Task[None] | None = None
        self.guarding: asyncio.Task[None] | None = None  # listens to the guard, replaces it when it dies
        self.log = log.bind(job=record.job, pod=record.pod, incarnation=record.incarnation)
        self._orders: dict[tuple[str, int], asyncio.Task[Any]] = {}
        self.nccl: PodProcesses | None = None  # see pod_nccl
        self.opened: Opened | None = None  # while the pod is brought up
        self._layers: PodLayers | None = None
        self._told = (0.0, 0)
        if self.gone:
            self.over.set()

    def close_opened(self) -> None:
        """The pod stands, or will not: what it names on the host is no longer needed."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.close()

    # -- what it is

    @property
    def key(self) -> PodKey:
        return self.record.job, self.record.incarnation, self.record.pod

    @property
    def label(self) -> str:
        return f"pod {self.record.pod} of job {self.record.job}"

    @property
    def container(self) -> str:
        return f"{self.record.job}-{self.record.incarnation}-{self.record.pod}"

    @property
    def cgroup(self) -> str:
        return f"/moorage-{self.node.config.cluster}/{self.node.name}/{self.container}"

    @property
    def gone(self) -> bool:
        """No process of the pod is left."""
        return self.record.phase in GONE_PHASES

    @property
    def layers(self) -> PodLayers:
        """The root file system. Raises `NotFound` before it was planned."""
        if self._layers is None:
            self._layers = PodLayers.load(self.folder)
        return self._layers

    @layers.setter
    def layers(self, layers: PodLayers) -> None:
        self._layers = layers

    def _network(self) -> PodNetwork:
        membership = self.record.members()
        ports = [
            PublishedPort(port.host_port, port.pod_port, port.protocol or "tcp")
            for port in self.spec.publish
            if port.pod == self.record.pod
        ]
        return PodNetwork(
            cluster=self.node.config.cluster,
            node=self.node.name,
            job=self.record.job,
            pod=self.record.pod,
            incarnation=self.record.incarnation,
            vni=membership.vni,
            slot=membership.slot,
            node_address=self.node.config.address,
            members=[MemberAddress(member.pod, member.node_address) for member in membership.members],
            publish=ports,
            use_rto_max=self.node.config.use_rto_max,
        )

    def guard_config(self) -> GuardConfig:
        """What the pod's guard is started with."""
        return GuardConfig(
            cluster=self.node.config.cluster,
            node=self.node.name,
            job=self.record.job,
            pod=self.record.pod,
            incarnation=self.record.incarnation,
            container=self.container,
            runc_root=str(self.node.runc_root),
            bundle=str(self.folder),
            cgroup=self.cgroup,
            runc=str(self.node.runc),
            criu=str(self.node.criu),
            etcd=self.node.etcd_access,
            cut_links=self.network.host_devices,
            deadline=self.node.lease.deadline,
        )

    # -- what others see

    def status(self) -> PodStatus:
        """The pod now, as a message of its own."""
        record, guard = self.record, self.guard_state
        return PodStatus(
            job=record.job,
            pod=record.pod,
            incarnation=record.incarnation,
            node=self.node.name,
            phase=record.phase,
            ranks=[RankStatus(**msgspec.to_builtins(rank)) for rank in record.ranks],
            reason=record.reason,
            attempt=record.attempt,
            cpu_seconds=guard.cpu_seconds if guard else 0.0,
            output_bytes=guard.output_bytes if guard else 0,
            exit_code=record.exit_code,
        )

    def publish(self) -> None:
        """Tell the watchers how the pod stands."""
        status = self.status()
        self._told = status.cpu_seconds, status.output_bytes
        self.node.hub.publish(status)

    def publish_progress(self) -> None:
        """Tell the watchers, if the pod computed or wrote something since they were told last."""
        guard = self.guard_state
        if guard is not None and (guard.cpu_seconds, guard.output_bytes) != self._told:
            self.publish()

    def save(self) -> None:
        """Write the record down. Raises `OSError`."""
        pod_record.save(self.folder, self.record)

    def change(self, change: Change, reason: str = "") -> None:
        """Follow the table, write it down, tell the watchers. Raises `Conflict` for what the table does not hold."""
        before = self.record.phase
        self.record.phase = follow(before, change)
        if self.gone:
            self.over.set()
        self.record.reason = reason
        self.save()
        self.log.info("pod changed", was=before, phase=self.record.phase, reason=reason, attempt=self.record.attempt)
        self.publish()

    # -- orders

    async def order(self, name: str, number: int, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Carry out ``work`` under the pod's lock, or join the order ``(name, number)`` that is under way.

        The caller may be cancelled without stopping it. Raises what ``work`` raises, `Conflict` when the pod is dying.
        """
        task: asyncio.Task[T] | None = self._orders.get((name, number))
        if task is None:
            task = asyncio.create_task(self._locked(work), name=f"{name} {self.label}")
            self._orders[name, number] = task
            task.add_done_callback(lambda done: self._done(name, number, done))
        return await asyncio.shield(task)

    async def _locked(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self.lock:
            self.check_alive()
            return await work()

    def _done(self, name: str, number: int, task: asyncio.Task[Any]) -> None:
        self._orders.pop((name, number), None)
        if not task.cancelled() and (error := task.exception()) is not None:  # looked at here: the caller may be gone
            self.log.info("order failed", order=name, error=str(error))

    def check_alive(self) -> None:
        """Raise `Conflict` when the pod is being killed; long work calls this between its steps."""
        if self.dying:
            raise Conflict(f"{self.label} is being killed")

    # -- the guard

    async def ask(self, call: Callable[[GuardClient], Awaitable[T]]) -> T:
        """Ask the guard. When it dies meanwhile, wait until another has adopted the pod and ask once more.

        Only for operations that may be repeated. Raises what the guard raises, `Unavailable` if none comes back.
        """
        for attempt in range(2):
            guard = await self.connected()
            try:
                return await call(guard)
            except Unavailable:
                if attempt or self.guarding is None:
                    raise
                if self.guard is guard:
                    self.guard_ready.clear()
        raise AssertionError("unreachable")

    async def ask_once(self, call: Callable[[GuardClient], Awaitable[T]]) -> T:
        """As `ask`, for operations that must not be repeated by themselves."""
        return await call(await self.connected())

    async def connected(self) -> GuardClient:
        """The connection to the guard; waits for one that is being replaced. Raises `Unavailable`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.guard_ready.wait(), _GUARD_SECONDS if self.guarding else 0.0)
        if self.guard is None or not self.guard_ready.is_set():
            raise Unavailable(f"the guard of {self.label} does not answer", f"see {self.folder / 'guard.log'}")
        return self.guard

    async def disconnect(self) -> None:
        """Stop listening and close the connection; the guard lives on."""
        await self.stop_listening()
        watcher, self.watcher = self.watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        if self.guard is not None:
            await self.guard.close()
            self.guard = None
            self.guard_ready.clear()

    async def stop_listening(self) -> None:
        """Hear no more of the guard's events, and put none in its place."""
        guarding, self.guarding = self.guarding, None
        if guarding is not None and guarding is not asyncio.current_task():
            guarding.cancel()
            await asyncio.gather(guarding, return_exceptions=True)

    async def dismiss_guard(self) -> None:
        """End the guard of a pod that has no process any more. Does nothing when there is none."""
        await self.stop_listening()
        guard, self.guard = self.guard, None
        self.guard_ready.clear()
        try:
            if guard is None and guard_alive(self.folder):
                guard = await GuardClient.connect(self.folder)
            if guard is not None:
                await guard.exit()
        except Unavailable:
            pass  # it has ended already
        except MoorageError as error:
            self.log.warning("the guard does not end", error=str(error))
        if guard is not None:
            await guard.close()

    # -- small facts for the orders

    def processes(self) -> list[int]:
        """Host pids of all processes of the pod."""
        return PodCgroup(self.cgroup).processes()

    def inner_pids(self) -> set[int]:
        """The pids of the pod's processes as it numbers them itself."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found.add(inner_pid(Path("/proc", str(pid))))
        return found

    def unmount(self) -> None:
        """Unmount the root file system, if it was ever planned."""
        with contextlib.suppress(NotFound):
            self.layers.unmount()

    def paused(self) -> float:
        """Seconds that the attempt kept the pod standing still, so far if it still does."""
        record = self.record
        return clock.now() - record.frozen_since if record.frozen_since else record.pause_seconds

    @property
    def disk_staging(self) -> Path:
        return self.folder / "staging"

    @property
    def memory_staging(self) -> Path:
        return pod_staging.memory_root(self.node.config.cluster, self.node.name) / self.container

    def staging(self, needed: int) -> Path:
        """A fresh folder (0700) for ``needed`` bytes of images, in memory or on disk. Raises `NoCapacity`."""
        return pod_staging.make(pod_staging.choose(needed, on_disk=self.disk_staging, in_shm=self.memory_staging))
