"""The job's placement group and the supervisors in it: found, joined, watched, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import ray
import structlog
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moorage.errors import EnvironmentLacking, MoorageError, NoCapacity
from moorage.ray import world
from moorage.ray.plan import Bundle
from moorage.ray.supervisor import Joined, Supervisor

log = structlog.get_logger(__name__)
_ASK_AGAIN_SECONDS = 2.0
_JOIN_SECONDS = 120.0


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the bundles of a job are. ``files``: laid on each machine (absolute path → content)."""

    bundle: dict[str, float]
    count: int
    strategy: str = "PACK"
    selector: dict[str, str] = {}
    files: dict[str, bytes] = {}
    folder: str = ""


class Bundles:
    """At most one placement group at a time. ``changed`` is called when a supervisor or its worker is lost."""

    def __init__(self, wish: Wish, cluster: str, changed: Callable[[], None]) -> None:
        self._wish = wish
        self._cluster = cluster
        self._changed = changed
        self._group: Any = None
        self._actors: list[Any] = []
        self._joined: list[Joined | None] = []
        self._watches: list[asyncio.Task[None]] = []
        self.view: dict[str, world.RayNode] = {}

    @property
    def held(self) -> bool:
        """Whether there is a group with all its supervisors."""
        return self._group is not None

    @property
    def nodes(self) -> list[str]:
        """What moorage calls the machine of each bundle."""
        return [joined.node for joined in self._members]

    @property
    def _members(self) -> list[Joined]:
        return [joined for joined in self._joined if joined is not None]

    async def look(self) -> bool:
        """Ask Ray how its nodes are; whether that differs from the last time."""
        before, self.view = self.view, await asyncio.to_thread(world.nodes)
        return before != self.view

    def seen(self, lost: set[str]) -> tuple[Bundle, ...]:
        """The bundles as they stand. ``lost``: nodes that moorage has lost."""
        found = []
        for index, joined in enumerate(self._members):
            node = self.view.get(joined.ray_node)
            found.append(
                Bundle(
                    ray_node=joined.ray_node,
                    node=joined.node,
                    alive=node is not None and node.alive,
                    preempted=node is not None and (node.draining or node.preempted),
                    deadline=node.deadline if node is not None else 0.0,
                    joined=not self._watches[index].done(),
                    lost=joined.node in lost,
                )
            )
        return tuple(found)

    async def acquire(
        self, lost: Callable[[], Awaitable[set[str]]], *, patient: bool, deadline: float | None = None
    ) -> list[str]:
        """Get bundles whose machines all have a live worker; returns the node of each.

        ``lost``: asks which nodes moorage has lost. ``patient``: machines that cannot be used are left out, and it
        waits for others; else the first one that lacks a worker is an error. ``deadline``: of the event loop's clock.
        Raises `EnvironmentLacking`, `UsageError`, `NoCapacity`.
        """
        without: set[str] = set()
        loop = asyncio.get_running_loop()
        while True:
            await self.look()
            leaving = {name for name, node in self.view.items() if node.alive and node.draining}
            # Ray's own processes may live on where moorage's node is gone.
            dead = await lost()
            leaving |= {name for name, node in self.view.items() if node.labels.get(world.LABEL) in dead}
            await self.release()
            wish = self._wish
            self._group = await asyncio.to_thread(
                world.reserve,
                wish.bundle,
                wish.count,
                strategy=wish.strategy,
                selector=wish.selector,
                without=without | leaving,
            )
            usable = sum(node.alive for name, node in self.view.items() if name not in leaving)
            try:
                await self._wait(usable, patient, deadline)
                await self._join()
                dead = await lost()
                if gone := [joined for joined in self._members if joined.node in dead]:
                    where = gone[0].node
                    raise Unusable(f"node {where} is lost", gone[0].ray_node)
                return self.nodes
            except Unusable as error:
                await self.release()
                if not patient:
                    raise error.cause from None
                log.warning("bundle cannot be used", ray_node=error.ray_node, why=str(error))
                without.add(error.ray_node)
                if deadline is not None and loop.time() > deadline:
                    raise NoCapacity(f"no other bundles in time: {error}", "add Ray nodes") from None
                if len(without) >= sum(node.alive for node in self.view.values()):
                    without.clear()  # all were tried: begin again, one may have come back
                    await asyncio.sleep(_ASK_AGAIN_SECONDS)
            except BaseException:
                await self.release()
                raise

    async def _wait(self, usable: int, patient: bool, deadline: float | None) -> None:
        loop = asyncio.get_running_loop()
        wish = self._wish
        while not await asyncio.to_thread(world.ready, self._group, _ASK_AGAIN_SECONDS):
            spread = wish.count if wish.strategy == "STRICT_SPREAD" else 1
            if usable < spread:
                why = f"it needs {spread} of Ray's nodes, and {usable} can be used"
            else:
                why = await asyncio.to_thread(world.impossible, wish.bundle, wish.count)
            if why and not patient:
                raise NoCapacity(f"no placement group can be had: {why}", "fewer workers, or more Ray nodes")
            if deadline is not None and loop.time() > deadline:
                raise NoCapacity(f"no other bundles in time{': ' * bool(why)}{why}", "add Ray nodes")

    async def _join(self) -> None:
        places = await asyncio.to_thread(world.seats, self._group)
        self._actors = [self._start(index, ray_node) for index, ray_node in enumerate(places)]
        self._joined = [None] * len(places)
        results = await asyncio.gather(
            *(self._ask_to_join(index, ray_node) for index, ray_node in enumerate(places)), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._watches = [asyncio.create_task(self._watch(actor)) for actor in self._actors]

    def _start(self, index: int, ray_node: str) -> Any:
        node = self.view.get(ray_node)
        label = node.labels.get(world.LABEL, "") if node is not None else ""
        return (
            ray.remote(Supervisor)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            .remote(self._cluster, label, ray_node)
        )

    async def _ask_to_join(self, index: int, ray_node: str) -> None:
        try:
            reference = self._actors[index].join.remote(self._wish.files, self._wish.folder)
            self._joined[index] = await asyncio.wait_for(self._unless_leaving(reference, ray_node), _JOIN_SECONDS)
        except MoorageError as error:
            cause = _plain(error)
            raise Unusable(str(cause), ray_node, cause) from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            text = f"the supervisor on Ray node {ray_node[:8]} did not begin: {error}".splitlines()[0]
            raise Unusable(text, ray_node, EnvironmentLacking(text, "the logs of that Ray node say why")) from None

    async def _unless_leaving(self, reference: Any, ray_node: str) -> Joined:
        """What ``reference`` gives. Ray starts no actor on a node that goes away, and does not say so."""
        answer = asyncio.ensure_future(reference)
        while not (await asyncio.wait([answer], timeout=_ASK_AGAIN_SECONDS))[0]:
            await self.look()
            node = self.view.get(ray_node)
            if node is None or not node.alive or node.draining:
                answer.cancel()
                raise Unusable(f"Ray node {ray_node[:8]} goes away", ray_node)
        joined: Joined = answer.result()
        return joined

    async def _watch(self, actor: Any) -> None:
        try:
            log.warning("worker lost", why=await actor.watch.remote())
        except ray.exceptions.RayError as error:
            log.warning("supervisor lost", why=str(error).splitlines()[0])
        self._changed()

    async def rejoin(self, indexes: tuple[int, ...]) -> None:
        """Put new supervisors into these bundles. Raises `Unusable`."""
        for index in indexes:
            joined = self._joined[index]
            assert joined is not None
            self._actors[index] = self._start(index, joined.ray_node)
            await self._ask_to_join(index, joined.ray_node)
            self._watches[index] = asyncio.create_task(self._watch(self._actors[index]))

    async def release(self) -> None:
        """Give everything back."""
        for watch in self._watches:
            watch.cancel()
        for actor in self._actors:
            ray.kill(actor)
        group, self._group = self._group, None
        self._actors, self._joined, self._watches = [], [], []
        if group is not None:
            await asyncio.to_thread(world.release, group)

    def actors(self) -> list[Any]:
        """The supervisors, one for each bundle."""
        return list(self._actors)


class Unusable(Exception):
    """A machine on which no pod can be. ``cause``: what to tell the user."""

    def __init__(self, why: str, ray_node: str, cause: MoorageError | None = None) -> None:
        super().__init__(why)
        self.ray_node = ray_node
        self.cause = cause or EnvironmentLacking(why)


def _plain(error: MoorageError) -> MoorageError:
    """The error without the class that Ray has put around it."""
    kind = next(c for c in type(error).__mro__ if c.__module__ == "moorage.errors")
    made: MoorageError = kind(getattr(error, "message", str(error)), getattr(error, "hint", ""))
    return made
