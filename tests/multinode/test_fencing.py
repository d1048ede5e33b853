"""A node that falls silent while its pods live: they freeze in time, and never speak to those that replaced them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from moorage.coordinator.orders import FENCE_MARGIN
from moorage.dev import sweep
from moorage.runtime import programs
from tests.support.cluster import DevCluster
from tests.support.judge import incarnations_overlap
from tests.support.pingpong_job import PingPong

pytestmark = pytest.mark.root
LEASE_SECONDS = 6

Silence = Callable[[DevCluster, str], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=3, lease_seconds=LEASE_SECONDS) as made:
        yield made


@contextmanager
def _stopped_worker(cluster: DevCluster, node: str) -> Iterator[None]:
    cluster.pause(node)
    try:
        yield
    finally:
        cluster.resume(node)


def _cut_from_etcd(cluster: DevCluster, node: str) -> AbstractContextManager[None]:
    return cluster.isolated(node, control_only=True)


def _cut_from_all(cluster: DevCluster, node: str) -> AbstractContextManager[None]:
    return cluster.isolated(node)


def _sent_over_vxlan(cluster: DevCluster, node: str) -> dict[str, int]:
    """Bytes sent by each VXLAN device of a node; a job's device is a new one for each incarnation."""
    namespace = cluster.record.namespace(cluster.record.node(node))
    command = [str(programs.find("ip")), "-n", namespace, "-j", "-s", "link", "show", "type", "vxlan"]
    found = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in json.loads(found or "[]") if link}


def _pod_processes(cluster: DevCluster, node: str) -> set[int]:
    """Processes in the pods of a node: all that run there but the worker and the guards."""
    record = cluster.record
    namespaces = sweep.processes_of(record, record.node(node))
    return {pid for pid in namespaces if b"pingpong.py" in _arguments(pid)}


def _arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("silence", [_stopped_worker, _cut_from_etcd, _cut_from_all])
def test_a_silent_node_loses_its_pods_and_they_never_meet_their_successors(
    cluster: DevCluster, silence: Silence
) -> None:
    job = PingPong(cluster, steps=900, checkpoint_every=2.0)
    job.until_step(10)
    job.job.until(lambda info: bool(info.latest_checkpoint), timeout=120)
    node = job.placement()[1]
    first = job.job.status().incarnation
    old_bodies = {line.body for line in job.lines()}

    with silence(cluster, node):
        silent_since = time.time_ns()  # no lease was renewed after this
        job.job.until(lambda info: info.incarnation > first and info.phase == "running", timeout=180)
        job.until_it_moves()
        assert node not in job.placement()
        if silence is not _stopped_worker:
            # Frozen, not gone: nobody could tell them. A guard that reaches etcd kills its pod without the worker.
            assert _pod_processes(cluster, node)
        silent = _sent_over_vxlan(cluster, node)
        late = [line for line in job.lines() if line.rank == 1 and line.body in old_bodies]
        assert late[-1].time_ns < silent_since + (LEASE_SECONDS + FENCE_MARGIN) * 1_000_000_000

    deadline = time.monotonic() + 120
    while _pod_processes(cluster, node):
        assert time.monotonic() < deadline, "the old pod still lives"
        for link, sent in _sent_over_vxlan(cluster, node).items():
            assert sent == silent.get(link, sent), f"{link} sent something after its pod was frozen"
        time.sleep(0.05)
    assert not incarnations_overlap(job.lines())
    job.assert_right()
