"""Each kind of state, held by a program that checks itself, is there after moves and checkpoints at random instants."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.coordinator.client import Job
from moorage.dev import layout
from moorage.dev.network import free_ports
from tests.support import later_clocks, state_programs
from tests.support.cluster import DevCluster

pytestmark = [pytest.mark.root, pytest.mark.torch]


_gateway: list[str] = []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevCluster]:
    def note(made: layout.Cluster) -> None:
        _gateway[:] = [made.gateway]

    runtime = later_clocks.runtime(tmp_path_factory.mktemp("runtime") / "late")
    with (
        state_programs.huge_pages(8),
        DevCluster(nodes=3, lease_seconds=10, on_network=note, environment=runtime) as made,
    ):
        yield made


class StateJob:
    """The driver with some programs, as a job."""

    def __init__(self, cluster: DevCluster, names: list[str], env: dict[str, str] | None = None, **more: Any) -> None:
        self.cluster = cluster
        folder = Path(tempfile.mkdtemp(prefix="state-", dir=cluster.folder))
        self.live, work = folder / "live", folder / "work"
        self.live.mkdir()
        work.mkdir()
        self.job: Job = cluster.client().run(
            [sys.executable, "-u", str(state_programs.DRIVER), str(state_programs.build()), *names],
            working_directory=str(work),
            mounts=[f"{self.live}:{self.live}"],
            env={
                "STATE_STOP": str(self.live / "stop"),
                "STATE_UPTIME": str(later_clocks.SECONDS),
                "PYTHONDONTWRITEBYTECODE": "1",
                **(env or {}),
            },
            **more,
        )

    def lines(self, rank: int = 0) -> list[str]:
        return b"".join(piece.data for piece in self.job.logs(rank=rank)).decode().splitlines()

    def until_ready(self, rank: int = 0, seconds: float = 180.0) -> list[str]:
        deadline = time.monotonic() + seconds
        while True:
            lines = self.lines(rank)
            if any(line.startswith("all ready") for line in lines):
                return lines
            assert time.monotonic() < deadline, lines
            time.sleep(0.2)

    def move(self) -> None:
        here = self.job.status().pods[0].node
        self.job.move(to=[next(node for node in self.cluster.nodes if node != here)])

    def end(self) -> list[str]:
        (self.live / "stop").touch()
        info = self.job.wait(timeout=180)
        assert (info.phase, info.exit_code) == ("finished", 0), [e.sentence for e in self.job.events()]
        return self.lines()


def _word(lines: list[str], word: str) -> dict[str, str]:
    fields = [line.split(" ", 2) for line in lines if line.startswith(f"{word} ")]
    return {name: (rest[0] if rest else "") for _, name, *rest in fields}


def test_each_kind_of_state_is_kept_over_moves_and_checkpoints(cluster: DevCluster) -> None:
    only = os.environ.get("MOORAGE_STATE_ONLY", "").split()
    titles = {name: what for name, what in state_programs.titles().items() if name not in state_programs.IN_TWO_PODS}
    titles = {name: what for name, what in titles.items() if name in only or not only}
    chance = random.Random(seed := int(os.environ.get("MOORAGE_STATE_SEED", time.time_ns() % 10**6)))
    print(f"MOORAGE_STATE_SEED={seed}")  # pytest shows it when the test fails
    job = StateJob(cluster, list(titles))
    lines = job.until_ready()
    assert not _word(lines, "lost"), _word(lines, "lost")
    # A job all of whose programs lack what they are about has ended.
    for action in (job.move, job.job.checkpoint, job.move) if len(_word(lines, "lacks")) < len(titles) else ():
        time.sleep(chance.uniform(0.05, 1.0))
        action()
    time.sleep(chance.uniform(0.2, 1.0))
    lines = job.end()
    started, kept, lost, lacks = (_word(lines, word) for word in ("started", "kept", "lost", "lacks"))
    rows = {}
    for name, what in titles.items():
        result = "kept" if name in kept else "not on this machine" if name in lacks else "lost"
        rows[name] = {"what": what, "result": result, "note": lacks.get(name, "")}
    print(rows)
    if not only:
        state_programs.record("programs", rows)
    assert not lost, lost
    assert sorted([*kept, *lacks]) == sorted(titles)
    assert all(kept[name].split()[0] == started[name] for name in kept)


class World:
    """What the pods' programs talk to, and who talks to them, outside of the cluster."""

    def __init__(self, address: str) -> None:
        self.listener = socket.create_server((address, 0))
        self.address = f"{address}:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._echo, args=(self.listener.accept()[0],), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(100):
                connection.sendall(data)

    @staticmethod
    def call(address: str, port: int, seconds: float = 30.0) -> socket.socket:
        """A connection on which the pod has answered."""
        end = time.monotonic() + seconds
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=20)
                World.exchange(connection)
                return connection
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.1)

    @staticmethod
    def exchange(connection: socket.socket) -> None:
        connection.sendall(b"here")
        if connection.recv(4, socket.MSG_WAITALL) != b"here":
            raise ConnectionResetError


def test_connections_between_pods_are_kept_and_those_of_the_world_end_with_a_move(cluster: DevCluster) -> None:
    chance = random.Random(seed := int(os.environ.get("MOORAGE_STATE_SEED", time.time_ns() % 10**6)))
    print(f"MOORAGE_STATE_SEED={seed}")
    titles = {name: state_programs.titles()[name] for name in state_programs.IN_TWO_PODS}
    world = World(_gateway[0])
    port = free_ports(1)[0]
    job = StateJob(cluster, list(titles), env={"STATE_OUTSIDE": world.address}, pods=2, publish_ports=[f"{port}:8080"])
    for rank in (0, 1):
        assert not _word(job.until_ready(rank), "lost")
    addresses = {node.node: node.address for node in cluster.client().nodes()}

    def call() -> socket.socket:
        return world.call(addresses[job.job.status().pods[0].node], port)

    caller, moves = call(), [0, 0]
    for to in ((), cluster.nodes[1:], (), (cluster.nodes[0], cluster.nodes[2])):
        before = [pod.node for pod in job.job.status().pods]
        time.sleep(chance.uniform(0.2, 1.0))
        if to:
            job.job.move(to=to)
        else:
            job.job.checkpoint()
        moved = [pod.node != node for pod, node in zip(job.job.status().pods, before, strict=True)]
        moves = [count + here for count, here in zip(moves, moved, strict=True)]
        if moved[0]:
            with pytest.raises(ConnectionError):
                world.exchange(caller)
        elif not to:
            world.exchange(caller)
        if to:
            caller.close()
            caller = call()
    assert min(moves) > 0
    for rank, count in enumerate(moves):
        (job.live / f"moves-{rank}").write_text(f"{count} 2")
    time.sleep(chance.uniform(0.2, 1.0))
    job.end()
    rows = {name: {"what": what, "result": "kept", "note": ""} for name, what in titles.items()}
    for rank in (0, 1):
        lines = job.lines(rank)
        assert not _word(lines, "lost"), _word(lines, "lost")
        assert sorted(_word(lines, "kept")) == sorted(titles)
    state_programs.record("pods", rows)
    caller.close()
    world.listener.close()
