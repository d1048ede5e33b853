"""The coordinator while it leads: all jobs, the nodes, the store. Made anew for each term of leadership."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
import structlog

from moorage.barrier.client import EtcdClient
from moorage.barrier.crl import Publisher
from moorage.barrier.election import Leadership
from moorage.config import CoordinatorConfig
from moorage.coordinator import attempt_orders, ended, fit, orders, planner, restored, uploads, watch_pods
from moorage.coordinator.audit import Audit
from moorage.coordinator.capacity import NOTHING, Need, need_of
from moorage.coordinator.checkpoints import Checkpoints
from moorage.coordinator.cordons import Cordons
from moorage.coordinator.drain.drains import Drains
from moorage.coordinator.job import Job
from moorage.coordinator.machine import JobState, Policies
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine.instructions import Order, Say
from moorage.coordinator.machine.state import decode
from moorage.coordinator.nodes import Nodes
from moorage.coordinator.persist import LeadershipLost, Persistence, read_generation
from moorage.coordinator.workers import Workers
from moorage.errors import MoorageError, NotFound, Unavailable
from moorage.records import AttemptStart, Keys, NodeRecord
from moorage.store import Store
from moorage.v1.types_pb2 import JobSpec

log = structlog.get_logger(__name__)
T = TypeVar("T")

_EXECUTORS = {**orders.EXECUTORS, **attempt_orders.EXECUTORS}


class Leader:
    """One term. `run` ends with `LeadershipLost`, or when it is cancelled; nothing is written or ordered after that."""

    def __init__(
        self,
        config: CoordinatorConfig,
        etcd: EtcdClient,
        store: Store,
        leadership: Leadership,
        policies: Policies | None = None,
        told: Callable[[Say], None] = lambda say: None,
    ) -> None:
        self.config = config
        self.etcd = etcd
        self.store = store
        self.leadership = leadership
        self.policies = policies or Policies()
        self.told = told  # gets every sentence of a job's story once it is written
        self.keys = Keys(config.cluster)
        self.nodes = Nodes(etcd, self.keys)
        self.workers = Workers(self.nodes, config.tls)
        self.jobs: dict[str, Job] = {}
        self.checkpoints = Checkpoints(self)
        self.accept_older = False  # give up what an etcd that was restored from an older backup has forgotten
        self.cordons = Cordons(self)
        self.drains = Drains(self)
        self.loaded = asyncio.Event()
        self.submitting = asyncio.Lock()
        self.joining = asyncio.Lock()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._watchers: dict[str, asyncio.Task[Any]] = {}
        self._over = asyncio.Event()
        self.older: restored.OlderEtcdError | None = None
        self._promised: dict[str, tuple[int, tuple[str, ...]]] = {}
        self.audit = Audit(etcd, self.keys, leadership)
        self.crl = Publisher(etcd, self.keys, config.authority)

    def refuse(self, older: restored.OlderEtcdError) -> None:
        """Lead no more: etcd is not to be believed."""
        self.older = older
        self.stop()

    @property
    def remote_store(self) -> bool:
        """Whether the store lies in a bucket, and the nodes have copies."""
        return self.config.store.startswith("s3://")

    @property
    def epoch(self) -> int:
        return self.leadership.epoch

    @property
    def leading(self) -> bool:
        """Whether this is the leader for certain, and has taken everything up."""
        return self.loaded.is_set() and not self._over.is_set() and not self.leadership.lost.is_set()

    def stop(self) -> None:
        """End the term."""
        self._over.set()

    async def run(self) -> None:
        """Take up all jobs and lead. Raises `LeadershipLost` when the term is over."""
        try:
            await self._until_lost(self._take_up())
            self.spawn(self.nodes.follow(), "nodes")
            self.spawn(self.checkpoints.housekeeping(), "housekeeping")
            self.spawn(self.audit.run(), "audit")
            self.spawn(self.crl.run(), "revocations")
            self.spawn(uploads.complete(self), "uploads")
            self.spawn(ended.look_after(self), "jobs that are over")
            self.loaded.set()
            log.info("leading", epoch=self.epoch, jobs=len(self.jobs), nodes=sorted(self.nodes.live))
            await self._until_lost(self._over.wait())
            if self.older:
                raise self.older
            raise LeadershipLost
        finally:
            self._over.set()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.workers.close()

    async def _until_lost(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do ``work``; raise `LeadershipLost` as soon as leadership is."""
        doing = asyncio.ensure_future(work)
        lost = asyncio.ensure_future(self.leadership.lost.wait())
        try:
            await asyncio.wait({doing, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise LeadershipLost
            doing.result()
        finally:
            for task in (doing, lost):
                task.cancel()
            await asyncio.gather(doing, lost, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Do ``work`` beside; if it breaks down, the term ends."""

        async def guarded() -> None:
            try:
                await work
            except LeadershipLost:
                self.stop()
            except Exception:
                # A coordinator that lacks a part must not go on leading: another one, or this one again, takes over.
                log.exception("part of the coordinator broke down", part=name)
                self.stop()

        task = asyncio.create_task(guarded(), name=name)
        self._tasks[task] = name
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    # -- taking up

    async def _take_up(self) -> None:
        await self.nodes.list()
        if self.accept_older:
            await restored.accept(self)
        else:
            await restored.check(self)
        await self.cordons.load()
        listing = await self.etcd.list(self.keys.jobs, keys_only=True)
        names = [
            key.removeprefix(self.keys.jobs).removesuffix("/state")
            for key in (kv.key for kv in listing.items)
            if key.endswith("/state") and key.count("/") == self.keys.jobs.count("/") + 1
        ]
        for job in names:
            await self.load(job)
        # Only now: what a node says of a pod would be lost on a job that is not there yet.
        self.nodes.on_lost = self._node_lost
        self.nodes.on_live = self._node_live
        for record in list(self.nodes.live.values()):
            self._node_live(record)
        await self.drains.take_up()

    async def load(self, name: str) -> Job | None:
        """Take up a job that etcd holds; None if there is none, or none that can be read. Raises `Unavailable`."""
        state_kv, spec_kv = await self.etcd.get(self.keys.state(name)), await self.etcd.get(self.keys.spec(name))
        if state_kv is None or spec_kv is None:
            return None
        try:
            state = decode(state_kv.value)
            spec = JobSpec.FromString(spec_kv.value)
        except (MoorageError, msgspec.DecodeError) as error:
            # One job that cannot be read must not keep the others from being looked after.
            log.error("a job that cannot be read is left alone", job=name, error=str(error))
            return None
        return self.add(state, spec, Persistence(self.etcd, self.keys, self.leadership, name, state_kv.mod_revision))

    def add(self, state: JobState, spec: JobSpec, persistence: Persistence) -> Job:
        """Begin to drive a job."""
        job = Job(self, state, spec, persistence, self.policies)
        self.jobs[state.job] = job
        for node in state.nodes:
            if node not in self.nodes.live:
                job.post(ev.NodeLost(time=time.time(), node=node))
        self.spawn(job.run(), f"job {state.job}")
        if state.policy.hang_seconds > 0:
            self.spawn(watch_pods.watch_for_hangs(self, job), f"hangs of {state.job}")
        return job

    # -- nodes

    def _node_lost(self, node: str) -> None:
        if watcher := self._watchers.pop(node, None):
            watcher.cancel()
        for job in self.jobs.values():
            if node in job.state.nodes:
                job.post(ev.NodeLost(time=time.time(), node=node))

    def _node_live(self, record: NodeRecord) -> None:
        if watcher := self._watchers.pop(record.node, None):
            watcher.cancel()
        self._watchers[record.node] = self.spawn(watch_pods.watch_node(self, record.node), f"pods of {record.node}")

    def plan(self, job: Job | None, **options: Any) -> list[str]:
        """A node for each pod of ``job``. Raises `NoCapacity`, `NotFound`, `Incompatible`."""
        assert job is not None
        return self.plan_for(job.spec, without=job.id, prefer=job.state.nodes, **options)

    def other_store(self, record: NodeRecord) -> bool:
        """Whether the node's worker opened another store, such as a folder of its own host under the same name."""
        return record.store not in ("", self.store.nonce)

    def plan_for(
        self,
        spec: JobSpec,
        *,
        without: str = "",
        on: Sequence[str] = (),
        exclude: Sequence[str] = (),
        prefer: Sequence[str] = (),
        seats: Sequence[str] = (),
        misfits: fit.Misfits | None = None,
    ) -> list[str]:
        """A node for each pod of ``spec``, as the nodes stand now. Raises `NoCapacity`, `NotFound`, `Incompatible`."""
        used = self.used(without=without)
        places = [
            planner.Place(
                node=record.node,
                ready=record.ready,
                other_store=self.other_store(record),
                cordoned=record.node in self.cordons,
                gpus=len(record.gpus),
                slots=record.slots,
                cpus=record.cpus,
                memory=record.memory_bytes,
                pods=used.get(record.node, NOTHING).pods,
                gpus_used=used.get(record.node, NOTHING).gpus,
                cpus_used=used.get(record.node, NOTHING).cpus,
                memory_used=used.get(record.node, NOTHING).memory,
            )
            for record in self.nodes.live.values()
        ]
        wish = planner.Wish(
            pods=spec.pods,
            gpus_per_pod=spec.gpus_per_pod,
            cpus_per_pod=spec.cpus,
            memory_per_pod=spec.memory_bytes,
            on=list(on),
            allowed=list(spec.nodes),
            exclude=list(exclude),
            prefer=list(prefer),
            seats=list(seats),
            misfits=misfits or {},
        )
        return planner.place(wish, places)

    def promise(self, job: Job, names: Sequence[str]) -> None:
        """Count these seats of the job's next incarnation as taken until it has them."""
        self._promised[job.id] = (job.state.incarnation, tuple(names))

    def seats(self, job: Job) -> tuple[str, ...]:
        """The node of each pod of the job, as it is or is about to be."""
        incarnation, names = self._promised.get(job.id, (-1, ()))
        placing = job.state.bringup is not None and job.state.bringup.step == "placing"
        if placing and incarnation == job.state.incarnation:
            return names
        return tuple(seat.node for seat in job.state.seats)

    def used(self, *, without: str = "") -> dict[str, Need]:
        """What the pods of all jobs but ``without`` take, by node."""
        found: dict[str, Need] = {}
        for job in self.jobs.values():
            if job.id != without:
                need = need_of(job.spec)
                for node in self.seats(job):
                    found[node] = found.get(node, NOTHING) + need
        return found

    # -- orders and their surroundings

    async def carry_out(self, job: Job, order: Order) -> None:
        """Carry out an order of a job's machine."""
        await _EXECUTORS[type(order)](self, job, order)

    def require(self) -> None:
        """Raise `LeadershipLost` once the session's local deadline has passed, whoever else knows of it."""
        if self.leadership.lost.is_set():
            raise LeadershipLost

    async def verify(self) -> None:
        """After a worker or etcd said that this leader is stale: raise `LeadershipLost` if it is."""
        self.require()
        try:
            kv = await self.etcd.get(self.leadership.key)
        except Unavailable:
            return  # the session's deadline decides
        if kv is None or kv.create_revision != self.epoch:
            raise LeadershipLost

    async def while_leading(self, answer: asyncio.Future[T]) -> T:
        """Wait for ``answer``. Raises `Unavailable` when the term ends before."""
        over = asyncio.ensure_future(self._over.wait())
        try:
            futures: list[asyncio.Future[Any]] = [answer, over]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.cancelled():
                raise Unavailable("this coordinator leads no more", "ask again: another one takes over")
            return answer.result()
        finally:
            over.cancel()
            if not answer.done():
                # Its end is awaited too: a generator that still runs its last step cannot be closed.
                answer.cancel()
                await asyncio.wait([answer])

    async def streaming(self, source: AsyncIterator[T]) -> AsyncIterator[T]:
        """What ``source`` yields. Raises `Unavailable` when the term ends before it does."""
        items = aiter(source)
        try:
            while True:
                try:
                    item = await self.while_leading(asyncio.ensure_future(anext(items)))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    async def read_generation(self) -> int:
        """The store's prune generation. Raises `Unavailable`."""
        return await read_generation(self.etcd, self.keys)

    async def read_start(self, job: str, attempt: int) -> AttemptStart:
        """An attempt's start. Raises `NotFound`, `Unavailable`."""
        kv = await self.etcd.get(self.keys.start(job, attempt))
        if kv is None:
            raise NotFound(f"job {job} has no attempt {attempt}")
        return msgspec.json.decode(kv.value, type=AttemptStart)

    def committed(self, job: Job) -> None:
        """A checkpoint of the job was committed: see what is to be forgotten."""
        self.checkpoints.committed.ring()
        self.spawn(self.checkpoints.after_commit(job), f"retention of {job.id}")

    # -- looking up

    def find(self, reference: str) -> Job:
        """The job of this id, or the newest of this name. Raises `NotFound`."""
        if reference in self.jobs:
            return self.jobs[reference]
        named = [job for job in self.jobs.values() if job.state.name == reference]
        if not named:
            raise NotFound(f"no job {reference!r}", "moorage jobs --all lists all of them")
        return max(named, key=lambda job: job.state.created)
