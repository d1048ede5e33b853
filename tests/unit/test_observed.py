"""Health, metrics and the units of the service manager."""

from __future__ import annotations

import asyncio
import configparser
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moorage import trust
from moorage.coordinator.machine.instructions import Say
from moorage.coordinator.metrics import Metrics
from moorage.errors import Conflict, UsageError
from moorage.observe import http, registry
from moorage.observe.notify import Pulse
from moorage.tls import TlsFiles

UNITS = Path(__file__).resolve().parents[2] / "packaging" / "systemd"
NO_TLS = TlsFiles("", "", "")


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture
def pulse() -> Pulse:
    return Pulse()


def endpoint(pulse: Pulse, trouble: list[str]) -> http.Endpoint:
    made = registry.make("test", lambda: [registry.by_label("moorage_jobs", "Jobs.", "phase", {"running": 2})])
    return http.Endpoint("127.0.0.1:0", NO_TLS, registry=made, pulse=pulse, ready=lambda: trouble[0] if trouble else "")


def test_health_readiness_and_metrics_are_served(pulse: Pulse, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = ["nobody leads"]
    served = endpoint(pulse, trouble)
    served.start()
    try:
        assert get(served.port, "/healthz") == (200, "ok\n")
        assert get(served.port, "/readyz") == (503, "nobody leads\n")
        trouble.clear()
        assert get(served.port, "/readyz") == (200, "ok\n")
        code, text = get(served.port, "/metrics")
        found = {family.name: family for family in text_string_to_metric_families(text)}
        assert code == 200 and found["moorage_jobs"].samples[0].value == 2
        assert found["moorage_build_info"].samples[0].labels["component"] == "test"
        assert {"process_resident_memory_bytes", "python_info"} <= found.keys()
        assert get(served.port, "/secret")[0] == 404
        monkeypatch.setattr(http, "HUNG_SECONDS", 0.0)
        assert get(served.port, "/healthz")[0] == 503
        with pytest.raises(Conflict):
            http.Endpoint(f"127.0.0.1:{served.port}", NO_TLS, registry=served._registry, pulse=pulse, ready=str).start()
    finally:
        served.close()
    with pytest.raises(UsageError, match="IP:PORT"):
        http.Endpoint("here", NO_TLS, registry=served._registry, pulse=pulse, ready=str).start()


def test_the_pulse_beats_and_the_watchdog_hears_it(monkeypatch: pytest.MonkeyPatch, pulse: Pulse) -> None:
    heard: list[str] = []
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    monkeypatch.setattr("moorage.observe.notify.notify", heard.append)

    async def once() -> None:
        beating = asyncio.create_task(pulse.beat())
        await asyncio.sleep(0)
        beating.cancel()

    asyncio.run(once())
    assert heard == ["WATCHDOG=1"] and pulse.age < 60


def test_names_have_the_prefix_and_base_units_and_no_label_that_grows() -> None:
    metrics = Metrics(lambda: None)
    for kind, data in (
        ("checkpoint.committed", {"bytes_total": 8, "bytes_new": 3, "pause_seconds": 0.5}),
        ("checkpoint.aborted", {}),
        ("restore.done", {"seconds": 3}),
        ("node.lost", {}),
    ):
        metrics.told(Say(kind=kind, sentence="", data=dict(data)))
    metrics.told(Say(kind="job.finished", sentence="", start="finishing", finish="finished"))
    allowed = {"outcome", "kind", "phase", "state", "method", "code", "component", "version", "le"}
    values = {}
    for family in metrics.registry.collect():
        if family.name.startswith(("process_", "python_")):
            continue
        assert family.name.startswith("moorage_") and family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_ms", "_mib", "_percent", "_minutes"))
        for sample in family.samples:
            assert sample.labels.keys() <= allowed, sample
            values[sample.name, *sorted(sample.labels.values())] = sample.value
    assert values["moorage_checkpoints_total", "committed"] == values["moorage_checkpoints_total", "aborted"] == 1
    assert values["moorage_checkpoint_new_bytes_total",] == 3
    assert values["moorage_restore_seconds_sum",] == 3
    assert values["moorage_failures_total", "node"] == values["moorage_jobs_ended_total", "finished"] == 1


def test_another_than_a_loopback_address_wants_a_certificate(tmp_path: Path, pulse: Pulse) -> None:
    trust.create_authority(tmp_path / "authority", "test")
    tls = trust.issue(tmp_path / "authority", tmp_path / "tls", "coordinator", addresses=("127.0.0.1",))
    server = http._Server(("127.0.0.1", 0), lambda path, accept: (200, "text/plain", b""), tls or NO_TLS)
    try:
        context = server._fresh(TlsFiles.in_folder(tmp_path / "tls"))
        assert context.verify_mode.name == "CERT_REQUIRED"
        assert server._fresh(TlsFiles.in_folder(tmp_path / "tls")) is context, "read once while the files are the same"
    finally:
        server.server_close()


@pytest.mark.parametrize("name", ["coordinator", "worker"])
def test_the_units_say_when_the_daemon_is_ready_and_spare_the_guards(name: str) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNITS / f"moorage-{name}.service")
    service = unit["Service"]
    assert service["Type"] == "notify" and service["Restart"] == "always" and service["UMask"] == "0077"
    assert service["ExecStart"].endswith(f"moorage {name} --config /etc/moorage/{name}.toml")
    assert service.get("KillMode", "control-group") == ("process" if name == "worker" else "control-group")
