"""Jobs whose checkpoints lie encrypted in a bucket: lost nodes and local copies, a server that fails, late uploads."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.dev.layout import Cluster
from moorage.errors import AttemptAborted
from tests.support.cluster import DevCluster
from tests.support.pingpong_job import PingPong
from tests.support.s3 import SECRET_KEY, FaultProxy, S3Server, free_port

pytestmark = pytest.mark.root

MARKER = "this-is-in-the-memory-of-the-job-and-nowhere-else"

KILLS = [
    f"{step}.{when}"
    for step in ("upload.packs", "upload.index", "upload.manifest", "coordinator.upload.complete")
    for when in ("before", "after")
]


class World:
    """The cluster, the S3 server and the proxy between them."""

    def __init__(self, cluster: DevCluster, server: S3Server, proxies: list[FaultProxy], bucket: str) -> None:
        self.cluster, self.server, self.bucket = cluster, server, bucket
        self._proxies = proxies

    @property
    def proxy(self) -> FaultProxy:
        return self._proxies[0]

    def local_copies(self) -> list[Path]:
        return [self.cluster.node_folder(node) / "store" for node in self.cluster.nodes]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    proxies: list[FaultProxy] = []
    with S3Server() as server:
        bucket = server.bucket()
        port = free_port()
        settings = server.settings(f"http://{{gateway}}:{port}", key_file=str(key), retry_seconds=5.0)

        def on_network(cluster: Cluster) -> None:
            proxies.append(FaultProxy(server, cluster.gateway, port).__enter__())

        try:
            with DevCluster(
                nodes=3, store=f"s3://{bucket}/moorage", store_settings=settings, on_network=on_network
            ) as cluster:
                yield World(cluster, server, proxies, bucket)
        finally:
            for proxy in proxies:
                proxy.__exit__(None, None, None)


def test_a_lost_node_and_lost_local_copies_cost_nothing_and_nothing_shows_in_the_bucket(world: World) -> None:
    job = PingPong(world.cluster, steps=600, env={"MARKER": MARKER})
    job.until_step(10)
    with world.proxy.fault("503", times=5), world.proxy.fault("lost", method="PUT", times=2):
        job.job.checkpoint()
    victim = job.placement()[1]
    assert all(list(folder.rglob("packs/*")) for folder in world.local_copies()[:2])
    world.cluster.destroy(victim)
    for folder in world.local_copies():
        shutil.rmtree(folder, ignore_errors=True)
    job.until(lambda: job.job.status().phase == "running" and victim not in job.placement())
    job.until_it_moves()
    checkpoint = job.job.checkpoint()  # what the nodes remember of the store is gone, too
    assert job.client.check(checkpoint.id, read_data=True).errors == []
    job.end()
    job.assert_right(restores=1)
    names = world.server.names(world.bucket)
    assert any("/packs/" in name for name in names)
    for name in names:
        assert MARKER.encode() not in world.server.read(world.bucket, name), name
    logs = "".join(path.read_text(errors="replace") for path in (world.cluster.folder / "state" / "log").iterdir())
    assert SECRET_KEY not in logs and "5a" * 32 not in logs
    world.cluster.add()


def test_a_store_that_fails_costs_an_attempt_and_the_job_runs_on(world: World) -> None:
    job = PingPong(world.cluster, pods=1, steps=2000)
    job.until_step(5)
    for kind, words in (("denied", "refused"), ("expired", "expired"), ("500", "InternalError|500 Internal")):
        with world.proxy.fault(kind, path="/packs/"), pytest.raises(AttemptAborted, match=words):
            job.job.checkpoint()
        job.until_it_moves()
    job.job.checkpoint()
    job.end()
    job.assert_right(restores=0)


def test_a_local_checkpoint_counts_at_once_and_its_upload_follows(world: World) -> None:
    job = PingPong(world.cluster, steps=2000, durability="local")
    job.until_step(5)
    with world.proxy.fault("503", method="PUT", path="/packs/"):
        checkpoint = job.job.checkpoint()
        assert (checkpoint.pods_uploaded, checkpoint.pods_waiting) == (0, 2)
        job.job.restore(checkpoint)  # from the nodes' own copies
        job.until_it_moves()
        for failpoint in KILLS:
            world.cluster.arm(failpoint)
    client = world.cluster.client()

    def in_store() -> bool:
        found = next(c for c in client.checkpoints(job.job.id) if c.id == checkpoint.id)
        return found.pods_waiting == 0

    job.until(in_store)
    # Worker and coordinator died at every step of it, and began again.
    job.until(lambda: not world.cluster.armed(), 90)
    job.until(lambda: not client.check(checkpoint.id, read_data=False).errors)
    assert client.check(checkpoint.id, read_data=True).errors == []
    job.end()
    job.assert_right()  # a worker that was away for too long has lost its node the pods


def test_a_local_checkpoint_that_dies_with_its_node_gives_way_to_the_one_before(world: World) -> None:
    job = PingPong(world.cluster, steps=2000, durability="local", env={"ONE": "1"})
    job.until_step(5)
    first = job.job.checkpoint()
    client = world.cluster.client()
    job.until(lambda: all(not c.pods_waiting for c in client.checkpoints(job.job.id)))
    time.sleep(3)  # until its manifest is written: only then is it whole without the nodes
    job.until_it_moves()
    with world.proxy.fault("503", method="PUT", path="/packs/"):
        job.job.checkpoint()
        victim = job.placement()[0]
        world.cluster.destroy(victim)
        job.until(lambda: job.job.status().phase == "running" and victim not in job.placement())
        job.until_it_moves()
    assert any(first.id in event.sentence and "takes its place" in event.sentence for event in job.job.events())
    job.end()
    job.assert_right(restores=1)
