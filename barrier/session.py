"""A session: a lease in etcd that is kept alive, and that ends here no later than it ends there.

Whoever lets a session go must have stopped before anyone else may start. So the end is a deadline on the local clock:
the lease's seconds counted from before the renewal was *sent*, hence never later than etcd's own count. Nothing that
the network or etcd does can push it back, and a process that was stopped finds its session lost when it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self

import structlog

from moorage import failpoints
from moorage.barrier import clock
from moorage.barrier.client import EtcdClient
from moorage.errors import Forbidden, MoorageError, Unavailable

log = structlog.get_logger(__name__)

failpoints.declare(
    "barrier.session.grant.before",
    "barrier.session.grant.after",
    "barrier.session.renew.before",
    "barrier.session.renew.after",
    "barrier.session.revoke.before",
    "barrier.session.revoke.after",
)


class Lost(asyncio.Event):
    """Set when the session is over. `is_set` looks at the clock itself: no task needs to have run for it to be true."""

    def __init__(self, parent: Lost | None = None) -> None:
        super().__init__()
        self._parent = parent  # set when that is, too
        self.deadline = float("inf")

    def is_set(self) -> bool:
        if not super().is_set():
            lost = self._parent.is_set() if self._parent else clock.now() >= self.deadline
            if lost:
                self.set()
        return super().is_set()

    async def wait(self) -> Literal[True]:
        while not self.is_set():
            left = (self._parent or self).deadline - clock.now()
            # At most a second at a time: the event loop's timers stand still while the machine is suspended.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(super().wait(), min(max(left, 0.0), 1.0))
        return True


class Session:
    """``async with Session.open(client, 10) as session``; made by `open`.

    ``lease``: the lease's id, for keys that shall vanish with the session. ``deadline``: the `clock.now` seconds until
    which the session is certain. ``lost``: set once the deadline has passed, etcd says that the lease is gone, or after
    `close`; never cleared. ``ttl``: seconds that etcd granted.
    """

    def __init__(self, client: EtcdClient, ttl_seconds: int, on_renew: Callable[[float], None] | None) -> None:
        self._client = client
        self._wanted = ttl_seconds
        self._on_renew = on_renew
        self._task: asyncio.Task[None] | None = None
        self.lease = 0
        self.ttl = ttl_seconds
        self.lost = Lost()

    @classmethod
    def open(cls, client: EtcdClient, ttl_seconds: int, on_renew: Callable[[float], None] | None = None) -> Session:
        """A session of ``ttl_seconds``, not started yet: enter it, or call `start` and in the end `close`.

        ``on_renew`` gets the new deadline after the grant and after each renewal.
        """
        return cls(client, ttl_seconds, on_renew)

    @property
    def deadline(self) -> float:
        return self.lost.deadline

    async def start(self) -> Self:
        """Take the lease and keep it alive from now on. Raises `Unavailable`."""
        await failpoints.hit("barrier.session.grant.before")
        sent = clock.now()
        self.lease, self.ttl = await self._client.lease_grant(self._wanted)
        await failpoints.hit("barrier.session.grant.after")
        self._renewed(sent + self.ttl)
        self._task = asyncio.create_task(self._keep_alive(), name=f"etcd session {self.lease:x}")
        return self

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session: ``lost`` is set first, then the lease is revoked. Does not raise if etcd is away."""
        held = self._task is not None and not self.lost.is_set()
        self.lost.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if not held:
            return
        await failpoints.hit("barrier.session.revoke.before")
        try:
            await self._client.lease_revoke(self.lease)
        except MoorageError as error:
            log.info("lease not revoked, it ends by itself", lease=f"{self.lease:x}", error=str(error))
        await failpoints.hit("barrier.session.revoke.after")

    def _renewed(self, deadline: float) -> None:
        self.lost.deadline = deadline
        if self._on_renew is not None:
            try:
                self._on_renew(deadline)
            except Exception:
                log.exception("on_renew failed", lease=f"{self.lease:x}")

    async def _keep_alive(self) -> None:
        interval = self.ttl / 3
        while not self.lost.is_set():
            await self._pause(interval)
            if self.lost.is_set():
                break
            await failpoints.hit("barrier.session.renew.before")
            sent = clock.now()
            try:
                left = min(self.ttl / 3, self.deadline - sent)
                ttl = await self._client.lease_keepalive(self.lease, timeout=max(0.1, left))
            except (Unavailable, Forbidden) as error:
                log.info("lease not renewed", left=round(self.deadline - clock.now(), 1), error=str(error))
                interval = min(0.5, self.ttl / 10)
                continue
            await failpoints.hit("barrier.session.renew.after")
            if ttl == 0:
                log.warning("etcd says that the lease is gone", lease=f"{self.lease:x}")
                self.lost.set()
            elif not self.lost.is_set():
                # After a deadline that has passed, not even a good answer counts: others were told that it had passed.
                self._renewed(sent + ttl)
                interval = self.ttl / 3
        log.warning("session lost", lease=f"{self.lease:x}")
        self.lost.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.lost.wait(), seconds)
