"""Two coordinators and three etcd servers: whichever of them is lost, jobs run on, or stand still and run on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from moorage.dev import roles
from moorage.errors import Conflict, MoorageError, Unavailable
from tests.support.cluster import DevCluster
from tests.support.pingpong_job import PingPong

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, etcd=3, coordinators=2, client_patience=60) as made:
        yield made


def test_a_job_outlives_leaders_a_majority_and_an_etcd_that_forgot(cluster: DevCluster) -> None:
    members = roles.etcd_names(cluster.record)
    job = PingPong(cluster, steps=5000)
    job.until_step(5)
    job.job.checkpoint()

    # etcd's leader is lost: the job runs on, and is checkpointed as soon as the next one leads.
    leader = cluster.etcd_leader()
    cluster.stop(leader)
    job.until_it_moves()
    job.job.checkpoint()
    cluster.start(leader)

    # The coordinator that leads is lost: the other one takes the job up.
    cluster.stop(roles.COORDINATOR)
    job.until_it_moves()
    job.job.checkpoint()
    cluster.start(roles.COORDINATOR)

    # A majority is lost: nobody can say any more which incarnation is the true one, so the pods stand still.
    for member in members[:2]:
        cluster.stop(member)
    job.until(lambda: _still(job))
    for member in members[:2]:
        cluster.start(member)
    job.until_it_moves()
    before = job.job.status()
    assert before.incarnation == 1 and before.restarts == 0

    # etcd comes back as it was before the job's last restore: no coordinator leads.
    for member in members:
        cluster.stop(member)
    folders = [roles.etcd_data(cluster.record, member) for member in members]
    for folder in folders:
        shutil.copytree(folder, folder.with_name(f"{folder.name}.old"))
    for member in members:
        cluster.start(member)
    job.until_it_moves()
    job.job.checkpoint()
    job.job.restore(job.job.status().latest_checkpoint)
    job.until_it_moves()
    coordinators = roles.coordinator_names(cluster.record)
    for role in (*coordinators, *members):
        cluster.stop(role)
    for folder in folders:
        folder.rename(folder.with_name(f"{folder.name}.new"))
        folder.with_name(f"{folder.name}.old").rename(folder)
    for role in (*members, *coordinators):
        cluster.start(role)
    job.until(lambda: _refused(cluster))

    # The way out: the newer state.
    for role in (*coordinators, *members):
        cluster.stop(role)
    for folder in folders:
        shutil.rmtree(folder)
        folder.with_name(f"{folder.name}.new").rename(folder)
    for role in (*members, *coordinators):
        cluster.start(role)
    job.until(lambda: not _refused(cluster))
    job.until_it_moves()
    job.end()
    job.assert_right()


def _still(job: PingPong) -> bool:
    """Whether no rank writes anything for a while, where a step takes 20 ms."""
    written = len(job.lines())
    try:
        job.until(lambda: len(job.lines()) > written, 3.0)
    except (AssertionError, Unavailable):  # unavailable: it stood still, and nobody leads who could say how it stands
        return True
    return False


def _refused(cluster: DevCluster) -> bool:
    """Whether the coordinators say that etcd is older than the cluster."""
    try:
        with cluster.impatient() as client:
            client.jobs()
    except Conflict as error:
        return "older state" in error.message
    except MoorageError:
        return False
    return False
