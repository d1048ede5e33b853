"""The supervisor of an embedded cluster, with harmless processes in the place of etcd and the daemons."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.dev import control, layout, roles, supervisor
from moorage.dev.layout import Cluster
from moorage.dev.processes import Identity
from moorage.dev.roles import Role
from moorage.errors import NotFound, Unavailable, UsageError

DEADLINE = 20.0


class Cast:
    """What each role runs."""

    def __init__(self) -> None:
        self.commands: dict[str, list[str]] = {}

    def role(self, cluster: Cluster, name: str) -> Role:
        if name not in roles.role_names(cluster):
            raise NotFound(f"no node {name}")
        return Role(name=name, argv=self.commands.get(name, ["sleep", "600"]), environment={"ROLE": name})


@pytest.fixture
def cast(monkeypatch: pytest.MonkeyPatch) -> Cast:
    made = Cast()
    monkeypatch.setattr(roles, "role", made.role)
    return made


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(layout, "RUN_FOLDER", run)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF", 0.01)
    monkeypatch.setattr(supervisor, "STOP_GRACE", 0.5)
    made = Cluster(
        name="t",
        state=str(tmp_path / "state"),
        subnet="10.1.1.0/24",
        etcd_port=1,
        etcd_peer_port=2,
        coordinator_port=3,
        lease_seconds=5,
    )
    (made.folder / "log").mkdir(parents=True)
    made.new_node()
    made.write()
    monkeypatch.chdir(run)  # a path in pytest's folder may be too long for a socket
    monkeypatch.setattr(Cluster, "control", property(lambda _: Path("t.sock")))
    yield made
    assert not (run / "t.sock").exists()


def supervised(cluster: Cluster, orders: Callable[[], None]) -> None:
    """Run a supervisor, and beside it ``orders`` in a thread; then take all down."""

    async def main() -> None:
        reading, writing = os.pipe()
        running = asyncio.create_task(supervisor.Supervisor(cluster.folder).run(writing))
        try:
            assert await asyncio.to_thread(os.read, reading, 16) == b"ready"
            await asyncio.to_thread(orders)
        finally:
            os.close(reading)
            await asyncio.to_thread(control.down, cluster)
            await running

    asyncio.run(main())


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_everything_is_started_and_ends_when_told_to(cluster: Cluster, cast: Cast) -> None:
    pids: list[Identity] = []

    def orders() -> None:
        status = control.status(cluster)
        assert list(status) == ["etcd", "coordinator", "node-1"]
        pids.extend(Identity(one.pid, one.started) for one in status.values())
        assert all(pid.alive() for pid in pids)
        assert control.running(cluster)

    supervised(cluster, orders)
    assert not any(pid.alive() for pid in pids)
    assert not control.running(cluster)
    with pytest.raises(Unavailable, match="does not answer"):
        control.status(cluster)


def test_what_dies_is_started_again_and_what_was_stopped_is_not(cluster: Cluster, cast: Cast) -> None:
    def orders() -> None:
        before = control.status(cluster)
        control.send(cluster, "coordinator", signal.SIGKILL)
        control.stop(cluster, "node-1")
        until(lambda: control.status(cluster)["coordinator"].starts == 2)
        after = control.status(cluster)
        assert after["coordinator"].pid not in (0, before["coordinator"].pid)
        assert after["etcd"] == before["etcd"]
        assert (after["node-1"].pid, after["node-1"].wanted) == (0, False)
        control.start(cluster, "node-1")
        assert control.status(cluster)["node-1"].pid
        control.start(cluster, "node-1")  # runs: nothing to do
        assert control.status(cluster)["node-1"].starts == 1

    supervised(cluster, orders)


def test_a_process_that_dies_at_once_is_started_again_and_can_still_be_stopped(cluster: Cluster, cast: Cast) -> None:
    cast.commands["coordinator"] = ["sh", "-c", "echo said by $ROLE; exit 3"]

    def orders() -> None:
        until(lambda: control.status(cluster)["coordinator"].starts >= 3)
        control.stop(cluster, "coordinator")
        assert not control.status(cluster)["coordinator"].wanted

    supervised(cluster, orders)
    log = cluster.folder / "log" / "coordinator.log"
    assert log.read_text().startswith("said by coordinator\n")
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_process_that_ignores_the_order_to_end_is_killed(cluster: Cluster, cast: Cast) -> None:
    cast.commands["node-1"] = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"]

    def orders() -> None:
        until(lambda: (cluster.folder / "log" / "node-1.log").read_text() == "up\n")
        process = control.status(cluster)["node-1"]
        control.stop(cluster, "node-1")
        assert not Identity(process.pid, process.started).alive()

    supervised(cluster, orders)


def test_a_paused_process_can_be_stopped(cluster: Cluster, cast: Cast) -> None:
    def orders() -> None:
        control.send(cluster, "node-1", signal.SIGSTOP)
        control.stop(cluster, "node-1")
        assert control.status(cluster)["node-1"].pid == 0

    supervised(cluster, orders)


def test_a_node_that_was_added_to_the_record_can_be_started(cluster: Cluster, cast: Cast) -> None:
    def orders() -> None:
        with pytest.raises(NotFound):
            control.start(cluster, "node-2")
        cluster.new_node()
        cluster.write()
        control.start(cluster, "node-2")
        assert control.status(cluster)["node-2"].pid

    supervised(cluster, orders)


def test_orders_that_make_no_sense_are_refused(cluster: Cluster, cast: Cast) -> None:
    def orders() -> None:
        with pytest.raises(UsageError, match="no process is called nobody"):
            control.stop(cluster, "nobody")
        with pytest.raises(UsageError, match="unknown order"):
            control._order(cluster, {"do": "dance"})
        with pytest.raises(UsageError, match="not understood"):
            control._order(cluster, {"do": "stop", "role": "etcd", "signal": "SIGNOTHING"})
        assert (Path("t.sock").stat().st_mode & 0o777) == 0o600

    supervised(cluster, orders)


def test_what_runs_is_written_down_for_those_who_find_no_supervisor(cluster: Cluster, cast: Cast) -> None:
    def orders() -> None:
        import msgspec

        recorded = msgspec.json.decode((cluster.folder / "processes.json").read_bytes(), type=dict[str, Identity])
        assert recorded.pop("supervisor").pid == os.getpid()
        assert {name: one.pid for name, one in recorded.items()} == {
            name: one.pid for name, one in control.status(cluster).items()
        }

    supervised(cluster, orders)
