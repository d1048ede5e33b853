"""The worker's process: settings in, a registered node out, until SIGTERM or SIGINT.

Order at the start: lock the state folder, open store and etcd, find the pods of an earlier worker, bind the port, get a
session and register, take the pods over, serve. A coordinator that calls sees all pods from the first moment on.

At the end the pods live on with their guards; the lease is given back only if there are none.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import structlog

from moorage import listening, rpc
from moorage.access import Gate
from moorage.barrier import crl
from moorage.barrier.client import EtcdClient
from moorage.compat import NodeFingerprint, machine
from moorage.compat.digests import Digests
from moorage.config import WorkerConfig
from moorage.errors import Conflict, EnvironmentLacking, MoorageError
from moorage.observe.calls import Calls
from moorage.observe.notify import notify
from moorage.observe.registry import make
from moorage.observe.watch import Watch
from moorage.records import Keys, NodeRecord
from moorage.roles import Attempt
from moorage.runtime import doctor, programs
from moorage.store import Store, open_for_node
from moorage.store_settings import KEY_VARIABLE, WrappingKey, inherited_key
from moorage.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from moorage.worker import agent_faults, gpu_health, inventory, metrics, pod_gpu, uploads
from moorage.worker.agent import Agent
from moorage.worker.agent_node import Node
from moorage.worker.agent_session import Registration
from moorage.worker.local import LocalSocket
from moorage.worker.service import WorkerService

log = structlog.get_logger(__name__)

_GRACE_SECONDS = 2.0


def run(config: WorkerConfig) -> None:
    """Run the worker until it is told to end. Raises `MoorageError` when it cannot start."""
    configure_logging()
    if os.geteuid() != 0:
        raise EnvironmentLacking("a worker must run as root", "start it with sudo, or as a system service")
    programs.use(config.runtime)
    with locked(Path(config.state)):
        asyncio.run(_Daemon(config).run())


def configure_logging() -> None:
    """One JSON object for each line on stderr."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


@contextlib.contextmanager
def locked(state: Path) -> Any:
    """Hold the lock of the state folder (made, 0700, if absent). Raises `Conflict` if another worker holds it."""
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentLacking(
            f"the state folder {state} cannot be made: {error.strerror}", "correct `state` in the worker's settings"
        ) from None
    descriptor = os.open(state / "worker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another worker uses {state}", "give each worker a state folder of its own") from None
        yield
    finally:
        os.close(descriptor)


class _Daemon:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._session_id = secrets.token_hex(8)
        self._port = 0
        self._store_nonce = ""
        self._store_key: WrappingKey | None = None
        self._fingerprint = NodeFingerprint()
        self._faults: gpu_health.Faults | None = None
        self._serving = False
        self._ready = True  # until doctor finds something that no pod can run without

    async def run(self) -> None:
        config = self._config
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        store = await asyncio.to_thread(
            open_for_node,
            config.store,
            Path(config.state) / "store",
            label=config.node,
            settings=config.store_settings,
        )
        self._store_nonce = store.nonce
        self._store_key = await asyncio.to_thread(inherited_key, config.store_settings)
        os.environ.pop(KEY_VARIABLE, None)  # no guard and nobody's rank shall inherit it
        password = config.etcd.password()
        etcd = EtcdClient(config.etcd.endpoints, tls=config.etcd.tls, user=config.etcd.user, password=password)
        async with etcd:
            await self._serve(etcd, store, stop)

    async def _serve(self, etcd: EtcdClient, store: Store, stop: asyncio.Event) -> None:
        config = self._config
        keys = Keys(config.cluster)
        registration = Registration(etcd, keys, config.lease_seconds)
        self._fingerprint = await asyncio.to_thread(machine.look, config.node)
        node = Node(
            config=config,
            etcd=etcd,
            store=store,
            lease=registration,
            keys=keys,
            fingerprint=self._fingerprint,
            digests=Digests(Path(config.state) / "digests"),
            store_key=self._store_key,
        )
        self._faults = node.gpus.faults
        agent = Agent(node)
        agent.load()
        await agent.hold()
        registry = make("worker", lambda: metrics.read(agent, registration, lambda: self._ready))
        server = rpc.aio_server(Gate(config.tls, log_refused), Calls(registry))
        watch = Watch(config.metrics, config.tls, registry, lambda: self._trouble(registration))
        add_WorkerServicer_to_server(WorkerService(agent), server)
        self._port = listening.bind(server, config.listen, config.tls, "worker")
        local = LocalSocket(agent)
        stopping = asyncio.create_task(stop.wait())
        looking: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        uploading: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        faulting: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        keeping: asyncio.Task[None] = asyncio.create_task(asyncio.sleep(0))
        registering = registration.run(self._record, on_session=agent.new_session, on_deadline=agent.deadline_moved)
        tasks = [asyncio.create_task(registering, name="registration"), stopping]
        tasks.append(asyncio.create_task(crl.follow(etcd, keys, config.tls), name="revocations"))
        tasks.append(asyncio.create_task(watch.run(), name="watch"))
        try:
            ready = asyncio.create_task(registration.first.wait())
            tasks.append(ready)
            await _first(*tasks)
            if not stop.is_set():
                await agent.adopt()
                await server.start()
                self._serving = True
                await local.start()
                tasks.append(asyncio.create_task(agent.refresh(), name="refresh"))
                uploading = asyncio.create_task(uploads.follow(agent.node), name="uploads")
                looking = asyncio.create_task(self._look_at_machine(registration), name="doctor")
                if (nvml := gpu_health.library()) is not None:
                    watching = agent_faults.follow(
                        nvml, node.gpus.faults, agent.pods.values, lambda: registration.update(self._record())
                    )
                    faulting = asyncio.create_task(watching, name="GPU faults")
                keeping = asyncio.create_task(pod_gpu.drop_kept(node, agent.pods.values()), name="kept device memory")
                notify("READY=1")
                log.info("serving", node=config.node, port=self._port, pods=len(agent.pods))
                tasks.remove(ready)
                await _first(*tasks)
        finally:
            notify("STOPPING=1")
            await local.close()
            await server.stop(_GRACE_SECONDS)
            if await agent.close():
                await registration.revoke()
            agent.node.closing.set()
            for task in (*tasks, looking, uploading, faulting, keeping):
                task.cancel()
            await asyncio.gather(*tasks, looking, uploading, faulting, keeping, return_exceptions=True)

    def _trouble(self, registration: Registration) -> str:
        """Why this worker is not ready; empty if it is."""
        if not self._serving:
            return "it does not serve yet"
        if not registration.alive:
            return "the node has no session in etcd"
        return "" if self._ready else "the machine lacks something: moorage doctor"

    def _record(self) -> NodeRecord:
        return inventory.record(
            self._config,
            session=self._session_id,
            port=self._port,
            ready=self._ready,
            fingerprint=self._fingerprint,
            faulty=self._faults or (),
            store=self._store_nonce,
        )

    async def _look_at_machine(self, registration: Registration) -> None:
        """Say so in the registration when the machine lacks something. Beside serving: pods that live must not wait."""
        found = await asyncio.to_thread(doctor.findings, self._config.state)
        lacking = [f"{finding.name}: {finding.detail}" for finding in found if finding.state == "missing"]
        if lacking:
            log.error("no pod can run on this node", lacking=lacking)
            self._ready = False
            await registration.update(self._record())


def log_refused(attempt: Attempt) -> None:
    """The worker's part of the audit trail is its log: what it allows is the coordinator's, which has told of it."""
    if not attempt.allowed:
        log.warning(
            "refused", caller=str(attempt.identity), method=attempt.method, peer=attempt.peer, why=attempt.reason
        )


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one ends; raise what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if error := task.exception():
            raise error if isinstance(error, MoorageError) else MoorageError(f"the worker broke down: {error!r}")
