"""The coordinator's process: stand for election, lead while elected, serve the API, until SIGTERM or SIGINT.

All that matters is in etcd and in the store, so there is nothing to save at the end: pods and workers go on, and the
next coordinator takes the jobs up where this one left them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import structlog

from moorage import failpoints, listening, rpc
from moorage.access import Gate
from moorage.barrier import crl
from moorage.barrier.client import EtcdClient
from moorage.barrier.election import Leadership, campaign, observe
from moorage.barrier.session import Session
from moorage.config import CoordinatorConfig
from moorage.coordinator.leader import Leader
from moorage.coordinator.machine import Policies
from moorage.coordinator.metrics import Metrics
from moorage.coordinator.persist import LeadershipLost
from moorage.coordinator.predecessor import Predecessor
from moorage.coordinator.restored import HINT, OlderEtcdError
from moorage.coordinator.service import CoordinatorService
from moorage.errors import MoorageError
from moorage.observe.calls import Calls
from moorage.observe.notify import notify
from moorage.observe.watch import Watch
from moorage.records import Keys
from moorage.store import Store
from moorage.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server

log = structlog.get_logger(__name__)

_GRACE_SECONDS = 1.0
_RETRY_SECONDS = 0.5
_OLDER_SECONDS = 5.0

failpoints.declare("coordinator.take-up.before")


def run(config: CoordinatorConfig, *, accept_older: bool = False) -> None:
    """Run a coordinator until it is told to end. Raises `MoorageError` when it cannot start.

    ``accept_older``: etcd was restored from a backup; give up what it has forgotten (`restored.accept`).
    """
    configure_logging()
    asyncio.run(_until_signal(config, accept_older))


def configure_logging() -> None:
    """One JSON object for each line on stderr."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


async def _until_signal(config: CoordinatorConfig, accept_older: bool) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with Predecessor(Path(config.state), config.cluster) as predecessor:
        await _until_stopped(Coordinator(config, predecessor=predecessor, accept_older=accept_older), stop)


async def _until_stopped(coordinator: Coordinator, stop: asyncio.Event) -> None:
    running = asyncio.create_task(coordinator.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        notify("STOPPING=1")
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


class Coordinator:
    """One coordinator process: `run` ends only when cancelled. ``port`` is set once it listens."""

    def __init__(
        self,
        config: CoordinatorConfig,
        policies: Policies | None = None,
        *,
        predecessor: Predecessor | None = None,
        accept_older: bool = False,
    ) -> None:
        self._config = config
        self._accept_older = accept_older
        self._policies = policies
        self._predecessor = predecessor
        self._keys = Keys(config.cluster)
        self.service = CoordinatorService(config)
        self.metrics = Metrics(lambda: self.service.leader)
        self.port = 0

    async def run(self) -> None:
        """Serve, and lead whenever elected. Raises `MoorageError` when it cannot start."""
        config = self._config
        store = await asyncio.to_thread(Store.open, config.store, create=True, settings=config.store_settings)
        etcd = EtcdClient(
            config.etcd.endpoints, tls=config.etcd.tls, user=config.etcd.user, password=config.etcd.password()
        )
        async with etcd:
            server = rpc.aio_server(Gate(config.tls, self.service.note), Calls(self.metrics.registry))
            add_CoordinatorServicer_to_server(self.service, server)
            self.port = listening.bind(server, config.listen, config.tls, "coordinator")
            await server.start()
            notify("READY=1")
            log.info("serving", listen=config.listen, port=self.port, store=config.store)
            watching = asyncio.create_task(self._watch_leader(etcd))
            watched = asyncio.create_task(
                Watch(config.metrics, config.tls, self.metrics.registry, self._trouble).run(), name="watch"
            )
            revocations = asyncio.create_task(crl.follow(etcd, self._keys, config.tls))
            try:
                while True:
                    if watched.done():
                        watched.result()
                    await self._term(etcd, store)
            finally:
                for task in (watching, revocations, watched):
                    task.cancel()
                await asyncio.gather(watching, revocations, watched, return_exceptions=True)
                await server.stop(_GRACE_SECONDS)

    def _trouble(self) -> str:
        """Why this coordinator is of no use now; empty if it leads, or knows who does."""
        leader = self.service.leader
        if leader is not None and not leader.leading:
            return "it takes over"
        return "" if leader is not None or self.service.leader_address else "nobody leads"

    async def _watch_leader(self, etcd: EtcdClient) -> None:
        while True:
            try:
                async for seen in observe(etcd, self._keys.leader):
                    self.service.leader_address = seen[1].decode(errors="replace") if seen else ""
            except MoorageError as error:
                log.info("the leader cannot be watched", error=str(error))
            await asyncio.sleep(_RETRY_SECONDS)

    async def _term(self, etcd: EtcdClient, store: Store) -> None:
        """Stand for election and lead until that is over."""
        predecessor = self._predecessor
        try:
            if predecessor is not None:
                await predecessor.bury(etcd)
            async with Session.open(etcd, self._config.lease_seconds) as session:
                if predecessor is not None:
                    predecessor.succeed(session.lease)
                leadership = await campaign(etcd, session, self._keys.leader, self._config.advertise.encode())
                try:
                    await self._lead(etcd, store, leadership)
                finally:
                    await leadership.resign()
        except LeadershipLost:
            log.warning("leadership lost")
        except OlderEtcdError as error:
            self.service.older = str(error)
            log.error("not leading: etcd is older than the cluster", found=str(error), way_out=HINT)
            await asyncio.sleep(_OLDER_SECONDS)
        except MoorageError as error:
            log.warning("not leading", error=str(error))
        await asyncio.sleep(_RETRY_SECONDS)

    async def _lead(self, etcd: EtcdClient, store: Store, leadership: Leadership) -> None:
        await failpoints.hit("coordinator.take-up.before")
        leader = Leader(self._config, etcd, store, leadership, self._policies, told=self.metrics.told)
        self.service.leader, self.service.older = leader, ""
        leader.accept_older, self._accept_older = self._accept_older, False
        try:
            await leader.run()
        finally:
            self.service.leader = None
