"""The coordinator dies at every failpoint that a job's life passes, and the next one brings the job on.

Dying is simulated in the process: at the armed failpoint all tasks of that coordinator end without another step, its
lease ends, and a new coordinator starts. A witness looks at all pods all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage import failpoints
from moorage.coordinator import orders
from moorage.v1 import coordinator_pb2 as pb
from tests.support.etcd import Etcd
from tests.support.fake_cluster import FakeCluster

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


class Reaper:
    """Stands in for `failpoints.hit`: kills the coordinator when it first passes one of those that are ``armed``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, armed: list[str]) -> None:
        self.armed = set(armed)
        self.passed: list[str] = []
        self.killed = asyncio.Event()
        monkeypatch.setattr(failpoints, "hit", self.hit)
        monkeypatch.setattr(failpoints, "enabled", lambda: True)

    async def hit(self, name: str) -> None:
        assert name in failpoints.declared(), name
        if not name.startswith(("job.", "coordinator.")):
            return
        if name not in self.passed:
            self.passed.append(name)
        if name in self.armed:
            self.armed.remove(name)
            self.killed.set()
            await asyncio.Event().wait()  # nothing more happens here

    async def replace(self, cluster: FakeCluster) -> None:
        """Whenever one is killed, start the next."""
        number = 1
        while True:
            await self.killed.wait()
            self.killed.clear()
            await cluster.stop_coordinator(f"c{number}")
            number += 1
            await cluster.start_coordinator(f"c{number}")


async def _life(cluster: FakeCluster) -> None:
    """Start, save, lose a node, be restored, save, be moved, finish."""
    job = (await cluster.call("Submit", _submit())).id
    await cluster.until(job, "running")
    assert (await _save(cluster, job, "save 1")).phase == "committed"
    seats = (await cluster.job(job)).pods
    await cluster.nodes[seats[0].node].destroy()
    await cluster.until(job, lambda j: j.phase == "running" and j.incarnation >= 2)
    counted = cluster.pod(job, 1).counter
    second = await _save(cluster, job, "save 2")
    assert second.phase == "committed"
    before = (await cluster.job(job)).incarnation
    live = [node.name for node in cluster.nodes.values() if node.connected]
    await cluster.call("Move", pb.MoveRequest(job=job, nodes=live[:1], request_id="move"))
    moved = await cluster.until(job, lambda j: j.phase == "running" and j.incarnation > before)
    assert {pod.node for pod in moved.pods} == set(live[:1])
    assert moved.latest_checkpoint == f"{job}-0003"
    assert cluster.pod(job, 1).counter >= counted
    for number in (0, 1):
        cluster.pod(job, number).exit(0)
    over = await cluster.until(job, lambda j: j.over)
    assert (over.phase, over.exit_code) == ("finished", 0)
    assert over.restarts == 1, "no crash of a coordinator costs the job anything"
    assert not cluster.pods()


def _submit() -> pb.SubmitRequest:
    request = pb.SubmitRequest(request_id="submit")
    request.spec.pods = 2
    request.spec.command.append("train")
    return request


async def _save(cluster: FakeCluster, job: str, request: str) -> pb.Attempt:
    reply = await cluster.call("Checkpoint", pb.CheckpointRequest(job=job, request_id=request))
    return await cluster.attempt(job, reply.attempt)


def _run(etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, armed: list[str]) -> list[str]:
    async def go() -> list[str]:
        reaper = Reaper(monkeypatch, armed)
        async with FakeCluster(etcd, tmp_path, nodes=3) as cluster:
            replacing = asyncio.create_task(reaper.replace(cluster))
            try:
                await _life(cluster)
            finally:
                replacing.cancel()
            assert not reaper.armed, f"{reaper.armed} were never reached"
        return reaper.passed

    monkeypatch.setattr(orders, "FENCE_MARGIN", 0.1)
    return asyncio.run(go())


def test_it_may_die_at_every_failpoint_of_a_life(etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = _run(etcd, tmp_path, monkeypatch, [])
    assert len(passed) > 50
    names = [name for name in passed if name != "coordinator.take-up.before"]
    lives = 12
    for life in range(lives):
        # Deaths far apart in one life: each meets a coordinator that has taken everything up.
        _run(etcd, tmp_path, monkeypatch, names[life::lives])
