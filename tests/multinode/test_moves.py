"""Jobs that are moved, parked and brought back, on real nodes, with their TCP connections alive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import DevCluster
from tests.support.pingpong_job import PingPong

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=3, lease_seconds=20) as made:
        yield made


def test_a_job_of_one_pod_moves_to_another_node(cluster: DevCluster) -> None:
    job = PingPong(cluster, pods=1, steps=200)
    job.until_step(10)
    start = job.placement()
    target = next(node for node in cluster.nodes if node not in start)
    job.job.move(to=[target])
    assert job.placement() == [target]
    job.assert_right(restores=1)


def test_two_pods_meet_on_one_node_and_part_again(cluster: DevCluster) -> None:
    job = PingPong(cluster, steps=400)
    job.until_step(10)
    first, second, third = cluster.nodes
    assert len(set(job.placement())) == 2
    job.job.move(to=[third])
    assert job.placement() == [third, third]
    job.until_it_moves()
    job.job.move(to=[first, second])
    assert sorted(job.placement()) == [first, second]
    job.assert_right(restores=2)


def test_five_restores_in_a_row_onto_different_nodes_keep_the_connections(cluster: DevCluster) -> None:
    job = PingPong(cluster, steps=600, keep_last=10)
    job.until_step(10)
    nodes, incarnation = cluster.nodes, 1
    for turn in range(5):
        pair = [nodes[turn % 3], nodes[(turn + 1) % 3]]
        checkpoint = job.job.park()
        info = job.job.restore(checkpoint, on=pair)
        assert sorted(job.placement()) == sorted(pair)
        assert info.incarnation > incarnation
        incarnation = info.incarnation
        job.until_it_moves()
    job.assert_right(restores=5)


def test_a_checkpoint_lets_the_job_run_on_and_an_older_one_takes_it_back(cluster: DevCluster) -> None:
    job = PingPong(cluster, steps=400)
    job.until_step(20)
    first = job.job.checkpoint()
    reached = job.reached()
    job.until_it_moves()
    second = job.job.checkpoint()
    assert second.attempt == first.attempt + 1
    job.until_it_moves(20)
    job.job.restore(first)
    job.until_it_moves()
    [*_, last] = sorted(job.verdict().restores, key=lambda restore: restore.resumed_at)
    assert last.resumed_at <= reached + 1
    job.assert_right(restores=1)
