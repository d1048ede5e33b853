"""How long a cluster is without a coordinator when the one that leads is lost: the second has to wait out its lease.

``python -m bench.standby`` (as root): an embedded cluster with three etcd servers and two coordinators; the leader is
killed with SIGKILL and not started again, several times over. Measured from the kill until the other one answers as
leader, everything taken up. Writes ``bench/results/standby.json``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from bench.report import Report, Target, spread, versions
from moorage import dialing, rpc
from moorage.config import ClientConfig, load
from moorage.dev import cluster, control, roles
from moorage.dev.layout import Cluster
from moorage.errors import MoorageError
from moorage.runtime import programs
from moorage.v1 import coordinator_pb2, coordinator_pb2_grpc

ROUNDS = 3
#: How much longer than the lease it may take, in seconds: to be elected and to take the jobs up.
BEYOND_LEASE = 2.0
_PATIENCE = 60.0
_EVERY = 0.02


async def leads(config: ClientConfig, endpoint: str) -> bool:
    """Whether that coordinator says that it leads."""
    try:
        async with await dialing.coordinator_channel(endpoint, config.tls, seconds=1.0) as channel:
            stub = coordinator_pb2_grpc.CoordinatorAsyncStub(channel)
            request = coordinator_pb2.StatusRequest()
            return bool((await rpc.unary(stub.Status, request, what="the coordinator", timeout=1.0)).leading)
    except MoorageError:
        return False


async def until_leads(config: ClientConfig, endpoints: list[str]) -> int:
    """Wait until one of them leads; returns which."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        for number, endpoint in enumerate(endpoints):
            if await leads(config, endpoint):
                return number
        await asyncio.sleep(_EVERY)
    raise SystemExit(f"nobody leads after {_PATIENCE:.0f} s")


async def one_round(made: Cluster, config: ClientConfig, names: list[str]) -> float:
    """Kill the leader; seconds until another one leads. The killed one is started again afterwards."""
    endpoints = config.coordinators
    victim = await until_leads(config, endpoints)
    others = [endpoint for number, endpoint in enumerate(endpoints) if number != victim]
    # A lease is renewed now and then; the longest wait is that after a renewal, so some are waited for.
    await asyncio.sleep(roles.LEADER_LEASE / 3)
    control.stop(made, names[victim], signal.SIGKILL)
    began = time.monotonic()
    await until_leads(config, others)
    took = time.monotonic() - began
    control.start(made, names[victim])
    return took


def main() -> int:
    name = f"bench-standby-{os.getpid()}"
    lease = float(roles.LEADER_LEASE)
    try:
        made = cluster.up(nodes=1, name=name, etcd=3, coordinators=2, default=False)
        config = load(made.folder / "client.toml", ClientConfig)
        names = roles.coordinator_names(made)
        seconds = [asyncio.run(one_round(made, config, names)) for _ in range(ROUNDS)]
    finally:
        cluster.down(name)
    report = Report(
        bench="standby",
        versions={
            **versions("grpcio", "protobuf", "msgspec"),
            "etcd": programs.text(programs.version("etcd", programs.find("etcd"))),
        },
        figures={"lease_seconds": lease, "rounds": len(seconds), "seconds_without_leader": spread(seconds)},
        targets=[Target("the second leads, at worst", max(seconds), "s", "<=", lease + BEYOND_LEASE)],
    )
    report.show()
    print(f"written: {report.write()}")
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
