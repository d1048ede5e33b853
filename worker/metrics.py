"""What a worker tells Prometheus. Orders are counted and timed as calls (``moorage_rpc_…``)."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client.core import Metric

from moorage.barrier import clock
from moorage.observe.registry import by_label, gauge
from moorage.worker.agent import Agent
from moorage.worker.agent_session import Registration
from moorage.worker.pod_phase import Phase


def read(agent: Agent, registration: Registration, ready: Callable[[], bool]) -> Iterable[Metric]:
    """The worker as it stands."""
    pods = list(agent.pods.values())
    phases = Tally(pod.record.phase for pod in pods)
    yield by_label(
        "moorage_node_pods",
        "Pods on this node by phase.",
        "phase",
        {name: float(phases[name]) for name in get_args(Phase)},
    )
    yield gauge("moorage_node_ready", "1: the machine lacks nothing that a pod needs.", float(ready()))
    yield gauge("moorage_node_registered", "1: the node has a session in etcd.", float(registration.alive))
    yield gauge(
        "moorage_node_lease_seconds",
        "Time until this node counts as lost unless it renews its lease; 0: it has none.",
        max(0.0, registration.deadline - clock.now()) if registration.alive else 0.0,
    )
