"""Wait until an embedded cluster can be used: its coordinator leads and all its nodes are live."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from moorage import dialing, rpc
from moorage.config import ClientConfig, load
from moorage.dev import control
from moorage.dev.layout import Cluster
from moorage.dev.supervisor import Running
from moorage.errors import DeadlineExceeded, MoorageError
from moorage.v1 import coordinator_pb2, coordinator_pb2_grpc

POLL_SECONDS = 0.2
#: A process that was started so often will not come up by itself.
TOO_MANY_STARTS = 4
_LOG_LINES = 5


async def _state(config: ClientConfig) -> tuple[bool, set[str]]:
    """Whether the coordinator leads, and the nodes that are live."""
    for coordinator in config.coordinators:
        with contextlib.suppress(MoorageError):
            leading, live = await _state_of(coordinator, config)
            if leading:
                return True, live
    return False, set()


async def _state_of(coordinator: str, config: ClientConfig) -> tuple[bool, set[str]]:
    async with await dialing.coordinator_channel(coordinator, config.tls, seconds=2.0) as channel:
        stub = coordinator_pb2_grpc.CoordinatorAsyncStub(channel)
        request = coordinator_pb2.StatusRequest()
        status = await rpc.unary(stub.Status, request, what="the coordinator", timeout=2.0)
        if not status.leading:
            return False, set()
        listing = await rpc.unary(
            stub.ListNodes, coordinator_pb2.ListNodesRequest(), what="the coordinator", timeout=2.0
        )
        return True, {node.node for node in listing.nodes if node.live}


def _last_lines(cluster: Cluster, role: str) -> str:
    try:
        lines = (cluster.folder / "log" / f"{role}.log").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:])


def failing(roles: Mapping[str, Running]) -> list[str]:
    """The processes that die again and again."""
    return [name for name, role in roles.items() if role.wanted and role.starts >= TOO_MANY_STARTS]


def describe(leading: bool, live: int, wanted: int) -> str:
    """One line about how far the start is."""
    if not leading:
        return "waiting for the coordinator"
    return f"{live} of {wanted} nodes are live"


async def wait_ready(cluster: Cluster, seconds: float, progress: Callable[[str], None]) -> None:
    """Wait until the coordinator leads and every node is live. ``progress`` is given a line whenever it changes.

    Raises `DeadlineExceeded`, or `MoorageError` with the last lines of a process's log if that does not come up.
    """
    config = load(cluster.folder / "client.toml", ClientConfig)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    wanted = {node.name for node in cluster.nodes}
    said = ""
    while True:
        try:
            leading, live = await _state(config)
        except MoorageError:
            leading, live = False, set()
        missing = wanted - live  # a node that was destroyed just now may still count as live
        line = describe(leading, len(wanted - missing), len(wanted))
        if line != said:
            progress(line)
            said = line
        if leading and not missing:
            return
        if bad := failing(await asyncio.to_thread(control.status, cluster)):
            raise MoorageError(f"{bad[0]} does not stay up:\n{_last_lines(cluster, bad[0])}", "")
        if loop.time() > deadline:
            raise DeadlineExceeded(f"the cluster is not ready after {seconds:.0f} s: {line}", "see its logs")
        await asyncio.sleep(POLL_SECONDS)
