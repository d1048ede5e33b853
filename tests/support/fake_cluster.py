"""A cluster for tests of the coordinator: a real etcd, a real store, real gRPC, fake workers, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio

from moorage import rpc
from moorage.config import CoordinatorConfig, EtcdConfig
from moorage.coordinator.daemon import Coordinator
from moorage.coordinator.machine import Policies
from moorage.errors import Unavailable
from moorage.records import Keys
from moorage.store import Store
from moorage.trust import TlsFiles, create_authority, issue
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2
from moorage.v1.coordinator_pb2_grpc import CoordinatorAsyncStub
from tests.support.etcd import Etcd
from tests.support.fake_worker import FakeNode, FakePod

WAIT = 60.0


class FakeCluster:
    """``async with FakeCluster(etcd, folder, nodes=3) as cluster``."""

    _numbers = 0

    def __init__(
        self, etcd: Etcd, folder: Path, *, nodes: int = 3, policies: Policies | None = None, **settings: Any
    ) -> None:
        FakeCluster._numbers += 1
        self.name = f"test-{FakeCluster._numbers}"
        self.etcd = etcd
        self.folder = folder / self.name
        self.keys = Keys(self.name)
        self.policies = policies
        self.settings = settings  # of the coordinators
        self.store = str(self.folder / "store")
        self.nodes: dict[str, FakeNode] = {}
        self.coordinators: dict[str, tuple[Coordinator, asyncio.Task[None], grpc.aio.Channel]] = {}
        self._count = nodes
        self._channels: list[grpc.aio.Channel] = []
        self._working: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeCluster:
        create_authority(self.folder / "ca", "test")
        self._tls = {name: self._issue(name) for name in ("coordinator", "worker:n", "user:ann")}
        await asyncio.to_thread(Store.open, self.store, create=True)
        await self.start_coordinator("c1")
        for index in range(self._count):
            await self.add_node(f"n{index}")
        self._working = asyncio.create_task(self._work())
        await self.poll_live(self._count)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._working is not None:
            self._working.cancel()
        for name in list(self.coordinators):
            await self.stop_coordinator(name)
        for node in self.nodes.values():
            await node.stop()
        for channel in self._channels:
            await channel.close(None)

    def _issue(self, principal: str) -> TlsFiles:
        role = "administer" if principal.startswith("user:") else None
        return issue(self.folder / "ca", self.folder / principal.replace(":", "-"), principal, role=role)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            for pod in self.pods():
                pod.work()

    # -- parts

    async def add_node(self, name: str) -> FakeNode:
        node = FakeNode(name, cluster=self.name, etcd=self.etcd.client, store=self.store, tls=self._tls["worker:n"])
        self.nodes[name] = node
        await node.start()
        return node

    async def start_coordinator(self, name: str) -> None:
        config = CoordinatorConfig(
            cluster=self.name,
            listen="127.0.0.1:0",
            advertise=name,
            store=self.store,
            tls=self._tls["coordinator"],
            etcd=EtcdConfig(endpoints=self.etcd.endpoints),
            lease_seconds=5,
            **self.settings,
        )
        coordinator = Coordinator(config, self.policies)
        task = asyncio.create_task(coordinator.run())
        while not coordinator.port:
            if task.done():
                task.result()
            await asyncio.sleep(0.01)
        channel = rpc.aio_channel(f"127.0.0.1:{coordinator.port}", self._tls["user:ann"])
        self.coordinators[name] = coordinator, task, channel

    async def stop_coordinator(self, name: str) -> None:
        """It ends with whatever it was doing, in the middle of it."""
        _, task, channel = self.coordinators.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._channels.append(channel)  # closed at the end: a call under way must meet the death, not a closed channel

    def pods(self) -> list[FakePod]:
        return [pod for node in self.nodes.values() for pod in node.pods.values()]

    def pod(self, job: str, number: int) -> FakePod:
        """The pod of the newest incarnation."""
        found = [pod for pod in self.pods() if (pod.job, pod.pod) == (job, number)]
        return max(found, key=lambda pod: pod.incarnation)

    def incarnations_that_run(self, job: str) -> set[int]:
        """What the witness sees: more than one would be a catastrophe."""
        return {pod.incarnation for pod in self.pods() if pod.job == job and pod.runs}

    # -- calls, to whichever coordinator leads

    async def call_as(self, principal: str, method: str, request: Any) -> Any:
        """One call to the first coordinator, with another certificate."""
        coordinator = next(iter(self.coordinators.values()))[0]
        channel = rpc.aio_channel(f"127.0.0.1:{coordinator.port}", self._tls[principal])
        self._channels.append(channel)
        stub = CoordinatorAsyncStub(channel)
        return await rpc.unary(getattr(stub, method), request, what="coordinator", timeout=WAIT)

    async def call(self, method: str, request: Any) -> Any:
        """One call, made again while no coordinator answers."""
        async with asyncio.timeout(WAIT):
            while True:
                for name in list(self.coordinators):
                    stub = CoordinatorAsyncStub(self.coordinators[name][2])
                    with contextlib.suppress(Unavailable, KeyError):
                        return await rpc.unary(getattr(stub, method), request, what="coordinator", timeout=WAIT)
                await asyncio.sleep(0.05)

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """A stream from the leader; not repeated."""
        await self.call("ListJobs", pb.ListJobsRequest())
        for _, _, channel in list(self.coordinators.values()):
            call = getattr(CoordinatorAsyncStub(channel), method)(request)
            try:
                async for reply in call:
                    yield reply
            except grpc.aio.AioRpcError as error:
                raise rpc.translate(error, "coordinator") from error
            finally:
                call.cancel()
            return

    async def poll(self, reached: Callable[[], bool | Awaitable[bool]]) -> None:
        """Wait until ``reached``."""
        async with asyncio.timeout(WAIT):
            while True:
                found = reached()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.02)

    async def poll_live(self, count: int) -> None:
        """Wait until the leader sees so many live nodes."""

        async def seen() -> bool:
            reply = await self.call("ListNodes", pb.ListNodesRequest())
            return [node.live for node in reply.nodes].count(True) == count

        await self.poll(seen)

    async def submit(self, name: str = "", *, pods: int = 2, if_exists: int = 0, **policy: Any) -> pb.Job:
        nodes = policy.pop("nodes", [])
        spec = types_pb2.JobSpec(
            name=name, pods=pods, command=["train"], nodes=nodes, policy=types_pb2.Policy(**policy)
        )
        job: pb.Job = await self.call("Submit", pb.SubmitRequest(spec=spec, if_exists=if_exists))  # type: ignore[arg-type]
        return job

    async def job(self, job: str) -> pb.Job:
        found: pb.Job = await self.call("GetJob", pb.JobRef(job=job))
        return found

    async def until(self, job: str, reached: Callable[[pb.Job], bool] | str) -> pb.Job:
        """Wait until the job is in that phase, or ``reached``; the witness looks on."""
        last: pb.Job | None = None
        try:
            async with asyncio.timeout(WAIT):
                while True:
                    assert len(self.incarnations_that_run(job)) <= 1, [p.status() for p in self.pods()]
                    last = await self.job(job)
                    if last.phase == reached if isinstance(reached, str) else reached(last):
                        return last
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not reached: {reached}; {last}") from None

    async def attempt(self, job: str, number: int) -> pb.Attempt:
        """Wait until an attempt has ended."""
        async with asyncio.timeout(WAIT):
            while True:
                found: pb.Attempt = await self.call("GetAttempt", pb.GetAttemptRequest(job=job, attempt=number))
                if found.phase in ("committed", "aborted"):
                    return found
                await asyncio.sleep(0.02)

    async def checkpoint(self, job: str) -> pb.Attempt:
        reply = await self.call("Checkpoint", pb.CheckpointRequest(job=job))
        return await self.attempt(job, reply.attempt)

    async def events(self, job: str) -> list[pb.JobEvent]:
        return [event async for event in self.stream("ListEvents", pb.ListEventsRequest(job=job))]
