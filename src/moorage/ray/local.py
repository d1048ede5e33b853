"""A Ray cluster on this machine with a Ray node for each node of an embedded cluster: to try things out, and for tests.

``python -m moorage.ray.local`` starts one for ``moorage dev up`` and runs until Ctrl-C::

    head     no CPUs: the driver, the dashboard that `ray job submit` speaks to
    node-1…  one CPU each, labelled moorage-node=node-1

On real machines a worker and ``ray start`` run side by side; a label is only needed where several workers share one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moorage.dev.network import free_ports
from moorage.errors import EnvironmentLacking, MoorageError, Unavailable
from moorage.ray import world

_READY_SECONDS = 120
#: Ray hears of a dead node in about two seconds with these; its own defaults take fifteen.
_SYSTEM = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


class LocalRay:
    """``with LocalRay(["node-1", "node-2"]) as local: …``; all of its processes are gone afterwards."""

    def __init__(self, nodes: Sequence[str], *, dashboard: bool = True, cpus: int = 1) -> None:
        self._names = list(nodes)
        self._dashboard = dashboard
        self._cpus = cpus
        self._cluster: Any = None
        self._nodes: dict[str, Any] = {}
        self.dashboard = ""

    def __enter__(self) -> Self:
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray writes the address of the newest cluster
        head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": self._dashboard, "_system_config": _SYSTEM}
        if self._dashboard:
            # Ray's own choice for the agent that takes jobs may be the source port of any connection on this machine.
            port, head["dashboard_agent_listen_port"] = free_ports(2)
            head["dashboard_port"] = port
            self.dashboard = f"http://127.0.0.1:{port}"
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            for name in self._names:
                self.add(name, wait=False)
            self._cluster.wait_for_nodes(_READY_SECONDS)
            if self._dashboard:
                self._wait_for_agent()
        except BaseException:
            self._cluster.shutdown()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()  # a driver in this process
        self._cluster.shutdown()

    def _wait_for_agent(self) -> None:
        """Until `ray job submit` works: the agent that takes jobs starts after everything else, and nothing tells when.

        Raises `Unavailable`.
        """
        from ray.job_submission import JobSubmissionClient

        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                client = JobSubmissionClient(self.dashboard)
                tried = client.submit_job(entrypoint="true")
                while not client.get_job_status(tried).is_terminal() and time.monotonic() < deadline:
                    time.sleep(0.2)
                client.delete_job(tried)  # whoever lists jobs sees only their own
                return
            except (ConnectionError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"Ray takes no jobs: {error}", "see /tmp/ray/session_latest/logs") from error
                time.sleep(0.5)

    @property
    def address(self) -> str:
        """For `ray.init` and ``RAY_ADDRESS``."""
        return str(self._cluster.address)

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which drivers and ``ray job`` find it."""
        found = {"RAY_ADDRESS": self.address, "RAY_USAGE_STATS_ENABLED": "0"}
        return found | ({"RAY_API_SERVER_ADDRESS": self.dashboard} if self.dashboard else {})

    def add(self, name: str, *, label: bool = True, wait: bool = True) -> None:
        """One more Ray node."""
        labels = {world.LABEL: name} if label else {}
        self._nodes[name] = self._cluster.add_node(wait=wait, num_cpus=self._cpus, labels=labels)

    def node_id(self, name: str) -> str:
        """Ray's id of the node."""
        return str(self._nodes[name].node_id)

    def destroy(self, name: str) -> None:
        """Kill all processes of a Ray node at once."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def preempt(self, name: str, seconds: int) -> None:
        """Announce that the node goes away so soon, as a cloud's spot machines do."""
        import time

        import ray
        from ray.core.generated import autoscaler_pb2

        gcs = ray._raylet.GcsClient(address=self.address)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline = int((time.time() + seconds) * 1000)
        taken, why = gcs.drain_node(self.node_id(name), reason, "the machine is reclaimed", deadline)
        if not taken:
            raise EnvironmentLacking(f"Ray does not drain {name}: {why}")


@contextlib.contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    yield over


def main() -> int:
    """The command."""
    from moorage import Client

    parser = argparse.ArgumentParser(prog="python -m moorage.ray.local", description="Ray beside `moorage dev up`.")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each Ray node")
    options = parser.parse_args()
    with Client() as client:
        nodes = sorted(node.node for node in client.nodes() if node.live)
    print(f"starting Ray with a head and {len(nodes)} nodes; some 20 s", file=sys.stderr, flush=True)
    with until_interrupted() as over, LocalRay(nodes, cpus=options.cpus) as local:
        print(f"Ray runs with a node for each of {', '.join(nodes)}. In other terminals:")
        for name, value in local.environment.items():
            print(f"  export {name}={value}")
        print("Ctrl-C ends it.", flush=True)
        over.wait()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        print(f"ray: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
