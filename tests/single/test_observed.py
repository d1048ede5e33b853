"""A cluster as its operators' machines see it: metrics, health, readiness."""

from __future__ import annotations

import json
import socket
import ssl
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moorage.dev.layout import WORKER_METRICS_PORT
from tests.support.cluster import DevCluster

pytestmark = pytest.mark.root


class Asker:
    """An HTTP client with a certificate of the cluster."""

    def __init__(self, cluster: DevCluster) -> None:
        tls = cluster.config.tls
        self.context = ssl.create_default_context(cafile=tls.ca)
        self.context.load_cert_chain(tls.cert, tls.key)
        self.context.check_hostname = False  # servers are known by the name `moorage`, as everywhere

    def get(self, address: str, path: str) -> str:
        with urllib.request.urlopen(f"https://{address}{path}", context=self.context, timeout=20) as answer:
            return str(answer.read().decode())

    def metrics(self, address: str) -> dict[str, float]:
        """Values by name and labels."""
        return {
            sample.name + "".join(f" {value}" for value in sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(self.get(address, "/metrics"))
            for sample in family.samples
        }


def test_metrics_health_and_readiness_of_a_cluster(tmp_path: Path) -> None:
    told = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    told.bind(str(tmp_path / "notify"))
    told.settimeout(30)
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"}
    with told, DevCluster(nodes=1, environment=environment) as cluster:
        heard: list[bytes] = []
        while heard.count(b"READY=1") < 2 or b"WATCHDOG=1" not in heard:  # coordinator and worker
            heard.append(told.recv(100))
        record, ask = cluster.record, Asker(cluster)
        coordinator = f"{record.gateway}:{record.metrics_port}"
        worker = f"{record.node('node-1').address}:{WORKER_METRICS_PORT}"
        job = cluster.client().run(["/bin/sleep", "1000"], name="sleeps", working_directory=str(tmp_path))
        job.until(lambda info: info.phase == "running", timeout=180)
        job.checkpoint()
        for address in (coordinator, worker):
            assert ask.get(address, "/healthz") == ask.get(address, "/readyz") == "ok\n"
        found = ask.metrics(coordinator)
        assert (found["moorage_coordinator_leading"], found["moorage_jobs running"]) == (1, 1)
        assert (found["moorage_nodes ready"], found["moorage_pods"]) == (1, 1)
        assert found["moorage_checkpoints_total committed"] == 1
        assert found["moorage_checkpoint_pause_seconds_count"] == 1
        assert found["moorage_rpc_requests_total Checkpoint OK"] == 1
        assert found["moorage_rpc_duration_seconds_count Checkpoint"] == 1
        found = ask.metrics(worker)
        assert (found["moorage_node_pods running"], found["moorage_node_registered"]) == (1, 1)
        assert found["moorage_rpc_requests_total CapturePod OK"] == 1
        assert 0 < found["moorage_node_lease_seconds"] <= record.lease_seconds
        # Every line of a daemon's log is an object with time, level and event.
        lines = [json.loads(line) for line in cluster.log("coordinator").splitlines()]
        assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
        stranger = ssl.create_default_context(cafile=cluster.config.tls.ca)
        stranger.check_hostname = False
        with pytest.raises(OSError):  # who has no certificate learns nothing
            urllib.request.urlopen(f"https://{coordinator}/metrics", context=stranger, timeout=20)
        job.stop(grace=0)
