"""The node's registration: a session in etcd, the node's record under its lease, and again after it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from moorage.barrier import clock
from moorage.barrier.client import EtcdClient
from moorage.barrier.session import Session
from moorage.errors import MoorageError, Unavailable
from moorage.records import Keys, NodeRecord
from moorage.worker.agent_failpoints import step

log = structlog.get_logger(__name__)

#: Seconds between two tries to open a session while etcd is away.
_RETRY_SECONDS = 1.0


class Registration:
    """Keeps the node registered. An order is carried out only while `require` does not raise.

    Invariant: a guard never gets a deadline of a lease under which the node is not registered, and the lease is not
    revoked while a pod lives. So when the registration is gone, the deadline of every guard has passed.
    """

    def __init__(
        self,
        etcd: EtcdClient,
        keys: Keys,
        lease_seconds: int,
    ) -> None:
        self._etcd = etcd
        self._keys = keys
        self._lease_seconds = lease_seconds
        self._on_deadline: Callable[[float], None] | None = None
        self._session: Session | None = None
        self._registered = False
        self._stopping = False
        self.first = asyncio.Event()  # registered for the first time

    @property
    def deadline(self) -> float:
        """`clock.now` seconds until which the registration is certain; 0 when there is none."""
        session = self._session
        if session is None or not self._registered or session.lost.is_set():
            return 0.0
        return session.deadline

    @property
    def alive(self) -> bool:
        """Whether the node is registered in a session that is certain now."""
        return self.deadline > clock.now()

    def require(self) -> None:
        """Raise `Unavailable` unless the session is alive: an order might be meant for a node that was given up."""
        if not self.alive:
            raise Unavailable("this node has no session in etcd at present", "try again when etcd can be reached")

    async def run(
        self,
        record: Callable[[], NodeRecord],
        *,
        on_session: Callable[[], Awaitable[None]],
        on_deadline: Callable[[float], None],
    ) -> None:
        """Keep the node registered until `revoke`, or until cancelled: then the lease runs out by itself.

        ``record`` makes the node's record anew for each session. ``on_session`` is called in each new session before
        the node registers: it looks at etcd for what changed while there was none. ``on_deadline`` gets the local
        deadline, to hand it to the guards, once the node is registered and with every renewal.
        """
        self._on_deadline = on_deadline
        while not self._stopping:
            try:
                await self._one_session(record, on_session)
            except MoorageError as error:
                log.warning("not registered", error=str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _one_session(
        self, make_record: Callable[[], NodeRecord], on_session: Callable[[], Awaitable[None]]
    ) -> None:
        session = await Session.open(self._etcd, self._lease_seconds, self._renewed).start()
        self._session = session
        try:
            await on_session()
            record = make_record()
            async with step("worker.register.put"):
                await self._etcd.put(self._keys.node(record.node), msgspec.json.encode(record), lease=session.lease)
            self._registered = True
            log.info("registered", node=record.node, endpoint=record.endpoint, session=record.session)
            self._renewed(session.deadline)
            self.first.set()
            await session.lost.wait()
            log.warning("session lost: the guards decide on their pods until there is a new one")
        finally:
            self._registered = False
            session.lost.set()  # ends the renewals; the lease runs out by itself

    async def update(self, record: NodeRecord) -> None:
        """Write the node's record anew within the session. Raises `Unavailable`."""
        session = self._session
        if session is not None and self.alive:
            async with step("worker.register.put"):
                await self._etcd.put(self._keys.node(record.node), msgspec.json.encode(record), lease=session.lease)

    def _renewed(self, deadline: float) -> None:
        if self._registered and self._on_deadline is not None:
            self._on_deadline(deadline)

    async def revoke(self) -> None:
        """Give the lease back. Only when no pod lives on this node. Does not raise if etcd is away."""
        self._stopping = True
        if self._session is not None:
            await self._session.close()
