from __future__ import annotations

from pathlib import Path

from moorage.config import EtcdConfig, WorkerConfig
from moorage.trust import TlsFiles
from moorage.worker.inventory import endpoint, gpus, memory, record


def config(address: str = "10.0.0.1") -> WorkerConfig:
    return WorkerConfig(
        cluster="c",
        node="n1",
        address=address,
        listen="0.0.0.0:7000",
        store="/store",
        tls=TlsFiles("", "", ""),
        etcd=EtcdConfig(endpoints=[]),
        labels={"zone": "a"},
    )


def test_memory_is_told_in_bytes() -> None:
    assert memory("MemTotal:  2048 kB\nMemAvailable: 1024 kB\nHugePages_Total: 3\n") == {
        "MemTotal": 2048 * 1024,
        "MemAvailable": 1024 * 1024,
        "HugePages_Total": 3,
    }


def test_gpus_are_listed_by_uuid_and_model(tmp_path: Path) -> None:
    for bus, uuid in (("0000:01:00.0", "GPU-a"), ("0000:02:00.0", "GPU-b")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nBus: x:y\n")
    assert gpus(tmp_path) == ["GPU-a NVIDIA H200", "GPU-b NVIDIA H200"]
    assert gpus(tmp_path / "none") == []


def test_the_endpoint_names_the_hosts_address() -> None:
    assert endpoint(config(), 7001) == "10.0.0.1:7001"
    assert endpoint(config("fd00::1"), 7001) == "[fd00::1]:7001"


def test_the_record_describes_this_machine() -> None:
    found = record(config(), session="s", port=7001, ready=True)
    assert (found.node, found.session, found.endpoint, found.labels) == ("n1", "s", "10.0.0.1:7001", {"zone": "a"})
    assert found.cpus > 0
    assert found.memory_bytes > 1 << 20
