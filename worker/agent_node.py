"""What all pods of a worker share: the node's settings, its session, etcd, the store, the programs."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec

from moorage.barrier.client import EtcdClient
from moorage.barrier.twophase import Attempts
from moorage.compat import NodeFingerprint
from moorage.compat.digests import Digests
from moorage.config import WorkerConfig
from moorage.errors import Fenced, MoorageError
from moorage.records import IncarnationRecord, Keys
from moorage.runtime import programs
from moorage.store import Store
from moorage.store_settings import WrappingKey
from moorage.worker import pod_fence, pod_record
from moorage.worker.agent_hub import Hub
from moorage.worker.gpu_host import NodeGpus
from moorage.worker.guard.messages import EtcdAccess


def bound_sources(cluster: str, node: str) -> Path:
    """A folder of the node for what jobs mount. Not below its state, which may be removed with all that is in it."""
    return Path("/run/moorage/sources") / f"{cluster}-{node}"


class Lease(Protocol):
    """What the pods ask of the node's session in etcd."""

    @property
    def deadline(self) -> float:
        """`clock.now` seconds until which the session is certain; 0 when there is none."""

    def require(self) -> None:
        """Raise `Unavailable` unless the session is alive."""


@dataclass
class Node:
    """One worker's surroundings. ``lease`` is set by the agent before any pod is touched."""

    config: WorkerConfig
    etcd: EtcdClient
    store: Store
    lease: Lease
    keys: Keys
    hub: Hub = field(default_factory=Hub)
    boot: str = field(default_factory=pod_record.boot_id)
    fingerprint: NodeFingerprint = field(default_factory=NodeFingerprint)
    digests: Digests = field(default_factory=Digests)
    upload: asyncio.Event = field(default_factory=asyncio.Event)  # there may be something to upload
    store_key: WrappingKey | None = None  # of the store, where only this worker's environment had it
    closing: threading.Event = field(default_factory=threading.Event)

    @property
    def cpus(self) -> int:
        return len(os.sched_getaffinity(0))

    @property
    def name(self) -> str:
        return self.config.node

    @property
    def state(self) -> Path:
        return Path(self.config.state)

    @cached_property
    def gpus(self) -> NodeGpus:
        """Which pod has which GPU, which are at fault, and the broker."""
        return NodeGpus(self.state, self.boot, self.config.gpus)

    @cached_property
    def runc(self) -> Path:
        return programs.find("runc")

    @cached_property
    def criu(self) -> Path:
        return programs.find("criu")

    @property
    def runc_root(self) -> Path:
        return self.state / "runc"

    @property
    def sources(self) -> Path:
        """Where what jobs mount is bound while their pods are brought up."""
        return bound_sources(self.config.cluster, self.name)

    @cached_property
    def etcd_access(self) -> EtcdAccess:
        """How the guards reach etcd."""
        etcd = self.config.etcd
        return EtcdAccess(endpoints=etcd.endpoints, tls=etcd.tls, user=etcd.user, password_file=etcd.password_file)

    def hidden(self) -> list[Path]:
        """Host folders that no pod may see: this node's state, the store, the keys."""
        files = [self.config.tls] + ([self.config.etcd.tls] if self.config.etcd.tls else [])
        folders = {self.state, *(Path(tls.key).parent for tls in files)}
        store = self.config.store.removeprefix("file://")
        if store.startswith("/"):
            folders.add(Path(store))
        return sorted(folders)

    def attempts(self, job: str) -> Attempts:
        """The checkpoint attempts of ``job``; outcomes that this node creates carry its name."""
        return Attempts(self.etcd, self.keys, job, by=self.name)

    async def current(self, job: str) -> IncarnationRecord | None:
        """What etcd says of the job's incarnation; None if it has none. Raises `Unavailable`."""
        found = await self.etcd.get(self.keys.incarnation(job))
        try:
            return None if found is None else msgspec.json.decode(found.value, type=IncarnationRecord)
        except msgspec.MsgspecError as error:
            raise MoorageError(f"etcd does not hold an incarnation of job {job}: {error}") from error

    async def leader(self) -> int:
        """The epoch of the coordinator that leads now, 0 if none does. Raises `Unavailable`."""
        standing = await self.etcd.list(self.keys.leader)
        return min((kv.create_revision for kv in standing.items), default=0)

    async def incarnation(self, job: str) -> int:
        """The job's incarnation in etcd, 0 if it has none. Raises `Unavailable`."""
        current = await self.current(job)
        return current.incarnation if current else 0

    async def confirm(self, job: str, incarnation: int) -> None:
        """Raise `Fenced` unless etcd says that ``incarnation`` is the job's own and that pods of it may run.

        Raises `Unavailable` if etcd says nothing.
        """
        current = await self.current(job)
        pod_fence.confirm(current.incarnation if current else 0, incarnation, job)
        if current is None or not current.placement:
            raise Fenced(f"no pod of job {job} may run at present")

    async def store_generation(self) -> int:
        """How often the store was pruned: what was written before may be gone when this has grown."""
        found = await self.etcd.get(self.keys.store_generation)
        return int(found.value) if found else 0
