"""The embedded cluster for real: it comes up, can be hurt, and goes without a trace."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.config import DEV_CLIENT_FILE
from moorage.dev import cluster as dev
from moorage.dev import control, layout, network, ready, sweep
from moorage.dev.processes import Identity, end, in_namespace, naming
from moorage.errors import Conflict, DeadlineExceeded, NotFound, Unavailable
from moorage.worker import pod_staging
from moorage.worker.pod_staging import memory_root
from tests.support import leftovers
from tests.support.cluster import DevCluster

pytestmark = pytest.mark.root

SECONDS = 60.0


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """Each test leaves the machine as it found it, the setting for forwarding included."""
    before = leftovers.machine()
    with layout.locked(layout.MACHINE):  # others start and end clusters meanwhile
        others, forward = layout.names(), network.IP_FORWARD.read_text()
    yield
    new = leftovers.of(leftovers.own, leftovers.machine() - before)
    assert new == set()
    with layout.locked(layout.MACHINE):
        if not others and not layout.names():
            assert network.IP_FORWARD.read_text() == forward


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=0.3).close()
    except OSError:
        return False
    return True


def in_node(cluster: DevCluster, node: str, *command: str) -> subprocess.Popen[bytes]:
    record = cluster.record
    path = network.namespace_path(record, record.node(node))
    process = subprocess.Popen(["nsenter", f"--net={path}", *command], start_new_session=True)
    until(lambda: process.poll() is not None or process.pid in in_namespace(path))
    return process


def test_a_cluster_comes_up_is_hurt_in_every_way_and_goes_without_a_trace() -> None:
    with DevCluster(nodes=2) as cluster:
        record = cluster.record
        assert {node.node for node in cluster.client().nodes() if node.live} == {"node-1", "node-2"}
        private(record.folder)

        # What dies is started again, and is ready again.
        before = cluster.status()
        for role in ("coordinator", "etcd", "node-1"):
            cluster.kill(role)
            until(lambda role=role: cluster.status()[role].starts == 2)  # type: ignore[misc]
        asyncio.run(ready.wait_ready(record, SECONDS, lambda _: None))
        assert cluster.status()["node-2"] == before["node-2"]

        # A cable that is pulled and plugged in again; and one that leads to the other nodes only.
        endpoint = (record.node("node-2").address, layout.WORKER_PORT)
        until(lambda: reachable(*endpoint))
        with cluster.isolated("node-2"):
            assert not reachable(*endpoint)
        until(lambda: reachable(*endpoint))
        listener = in_node(cluster, "node-1", "python3", "-m", "http.server", "8000", "--bind", "0.0.0.0")
        fetch = f"import urllib.request as u; u.urlopen('http://{record.node('node-1').address}:8000', timeout=5)"
        until(lambda: reachable(record.node("node-1").address, 8000))
        with cluster.isolated("node-2", control_only=True):
            assert not reachable(*endpoint)
            assert in_node(cluster, "node-2", "python3", "-c", fetch).wait(30) == 0
        until(lambda: reachable(*endpoint))

        # A node that is lost for good takes everything with it, and its name is not given again.
        captures = [memory_root(cluster.name, node) / "left" for node in ("node-1", "node-2")]
        for folder in captures:
            pod_staging.make(folder)
        gone = record.node("node-1")
        cluster.destroy("node-1")
        assert listener.wait(SECONDS) == -signal.SIGKILL
        assert not captures[0].parent.exists() and captures[1].exists()
        assert not record.node_folder("node-1").exists()
        assert not network.namespace_path(record, gone).exists()
        assert not network.link_exists(record.link(gone))
        assert cluster.nodes == ["node-2"]
        with pytest.raises(NotFound, match="no node node-1"):
            cluster.destroy("node-1")
        assert cluster.add() == "node-3"
        assert {node.node for node in cluster.client().nodes() if node.live} >= {"node-2", "node-3"}
    assert not cluster.folder.exists() and not captures[1].parent.exists()
    assert naming(cluster.folder) == set()
    assert dev.down(cluster.name) is False


def private(folder: Path) -> None:
    """Nobody else can read anything below ``folder``."""
    assert folder.stat().st_mode & 0o777 == 0o700
    for inner, _, files in os.walk(folder):
        secret = [Path(inner, name) for name in files if name.endswith((".toml", ".key", "key.pem"))]
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in secret)


def test_a_cluster_that_lost_its_supervisor_is_taken_down_all_the_same() -> None:
    with DevCluster(nodes=2) as cluster:
        with DevCluster(nodes=1) as other:  # side by side, each with a network of its own
            assert other.record.subnet != cluster.record.subnet
            assert [node.node for node in other.client().nodes()] == ["node-1"]
        assert [node.node for node in cluster.client().nodes()] == ["node-1", "node-2"]
        processes = [Identity(one.pid, one.started) for one in cluster.status().values()]
        supervisors = naming(cluster.folder) - {process.pid for process in processes}
        end({found for pid in supervisors if (found := Identity.of(pid))})
        assert not control.running(cluster.record)
        assert all(process.alive() for process in processes)
        pod = in_node(cluster, "node-1", "sleep", "600")
        with pytest.raises(Unavailable, match="supervisor"):
            cluster.add()
        assert cluster.nodes == ["node-1", "node-2"]
        cluster.destroy("node-2")
        assert cluster.nodes == ["node-1"]
        assert dev.down(cluster.name)
        assert pod.wait(SECONDS) == -signal.SIGKILL
        assert not any(process.alive() for process in processes)
        assert not cluster.record_exists()


def test_a_start_that_fails_is_undone_and_keeps_its_logs(tmp_path: Path) -> None:
    name = f"test-{os.getpid()}-fails"
    leftovers.made(name)
    state = tmp_path / "state"
    default = Path(DEV_CLIENT_FILE)
    pointed = default.readlink() if default.is_symlink() else None
    with pytest.raises(DeadlineExceeded, match="not ready") as caught:
        dev.up(nodes=1, name=name, state=state, ready_seconds=0.0)
    assert not state.exists()
    assert str(tmp_path / "state-failed-logs") in caught.value.hint
    assert (tmp_path / "state-failed-logs" / "supervisor.log").exists()
    assert name not in layout.names()
    assert (default.readlink() if default.is_symlink() else None) == pointed


def test_a_name_or_folder_that_is_taken_is_refused(tmp_path: Path) -> None:
    name = f"test-{os.getpid()}-taken"
    leftovers.made(name)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(Conflict, match="is not empty"):
        dev.up(name=name, state=tmp_path / "full")
    assert (tmp_path / "full" / "mine").exists()
    record = dev._record(name, tmp_path / "state", nodes=1, lease_seconds=5)  # as if `up` had been killed here
    with pytest.raises(Conflict, match="exists already") as caught:
        dev.up(name=name, state=tmp_path / "elsewhere")
    assert "dev down" in caught.value.hint
    assert dev.down(name)
    assert not record.folder.exists()


def test_what_stands_in_a_frozen_cgroup_of_a_node_is_ended_with_it(tmp_path: Path) -> None:
    name = f"test-{os.getpid()}-frozen"
    leftovers.made(name)
    record = dev._record(name, tmp_path / "state", nodes=1, lease_seconds=5)
    node = record.nodes[0]
    network.create(record)
    network.create_node(record, node)
    process = subprocess.Popen(["sleep", "600"])
    groups = [root / f"moorage-{name}" / node.name / "pod" for root in sweep.hierarchies()]
    for group in groups:
        with_settings(group)
        (group / "cgroup.procs").write_text(str(process.pid))
        for switch, word in (("freezer.state", "FROZEN"), ("cgroup.freeze", "1")):
            if (group / switch).exists():
                (group / switch).write_text(word)
    assert in_namespace(network.namespace_path(record, node)) == set()
    assert dev.down(name)
    assert process.wait(SECONDS) == -signal.SIGKILL
    assert not any(group.parent.parent.exists() for group in groups)


FIREWALL = """
from moorage.dev import network
from moorage.dev.layout import Cluster

one, other = (
    Cluster(
        name=name, state="/s", subnet="10.1.1.0/24", lease_seconds=5, etcd_port=1, etcd_peer_port=2, coordinator_port=3
    )
    for name in ("one", "other")
)
def rules():
    return network._run("nft", "list", "ruleset")
network.open_firewall(one)
assert "filter" not in rules(), "no firewall, nothing to open"
names = ("forward", "input")
chains = [f"chain {name.upper()} {{ type filter hook {name} priority 0; policy drop; }}" for name in names]
network._run("nft", "-f", "-", text="\\n".join(["table ip filter {", *chains, "}"]))
before = rules()
network.open_firewall(one)
network.open_firewall(one)
network.open_firewall(other)
assert rules().count(f'"{one.bridge}"') == rules().count(f'"{other.bridge}"') == 3, rules()
network.close_firewall(one)
assert one.bridge not in rules()
assert rules().count(f'"{other.bridge}"') == 3, rules()
network.close_firewall(other)
network.close_firewall(other)
assert rules() == before, rules()
"""


def test_a_firewall_that_drops_what_is_forwarded_is_opened_for_the_bridge_and_closed_again() -> None:
    subprocess.run(["unshare", "--net", sys.executable, "-P", "-c", FIREWALL], check=True, timeout=60)


def with_settings(group: Path) -> None:
    """Make a cgroup; those of the cpuset controller take nobody in before they have cores and memory."""
    made = [folder for folder in (group.parent.parent, group.parent, group) if not folder.exists()]
    group.mkdir(parents=True)
    for folder in made:
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists() and not (folder / name).read_text().strip():
                (folder / name).write_text((folder.parent / name).read_text())
