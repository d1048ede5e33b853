"""Two coordinators and three etcd servers: whichever of them is lost, jobs run on, or stand still and run on."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.dev import roles
from moorage.errors import Conflict, MoorageError, Unavailable
from moorage.runtime import programs
from moorage.tls import TlsFiles
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

    # etcd comes back from a backup that was taken before the job's last restore: no coordinator leads.
    older, newer = cluster.folder / "older.db", cluster.folder / "newer.db"
    _save(cluster, older)
    job.job.checkpoint()
    job.job.restore(job.job.status().latest_checkpoint)
    job.until_it_moves()
    assert job.job.status().incarnation == 2
    _save(cluster, newer)
    _restore(cluster, older, bump=1_000_000_000)
    job.until(lambda: _refused(cluster))

    # The way out: a newer backup, raised above what the older one has come to.
    _restore(cluster, newer, bump=2_000_000_000)
    job.until(lambda: not _refused(cluster))
    job.until_it_moves()
    assert job.job.status().incarnation == 2
    job.end()
    job.assert_right()


def _save(cluster: DevCluster, file: Path) -> None:
    """As docs/etcd.md has it."""
    tls = TlsFiles.in_folder(roles.etcd_admin(cluster.record))
    host = f"https://{cluster.record.gateway}:{cluster.record.etcd_ports[0][0]}"
    identity = ["--cacert", tls.ca, "--cert", tls.cert, "--key", tls.key]
    _run(str(programs.find("etcdctl")), "--endpoints", host, *identity, "snapshot", "save", str(file))


def _restore(cluster: DevCluster, file: Path, *, bump: int) -> None:
    """As docs/etcd.md has it: with coordinators and etcd stopped, into new data folders of all members."""
    members = roles.etcd_names(cluster.record)
    coordinators = roles.coordinator_names(cluster.record)
    for role in (*coordinators, *members):
        cluster.stop(role)
    for member in members:
        folder = roles.etcd_data(cluster.record, member)
        shutil.rmtree(folder)
        same = ("--name=", "--initial-cluster=", "--initial-advertise-peer-urls=", "--data-dir=")
        options = [word for word in roles.etcd_argv(cluster.record, member) if word.startswith(same)]
        program = str(programs.find("etcdutl"))
        _run(program, "snapshot", "restore", str(file), *options, "--bump-revision", str(bump), "--mark-compacted")
    for role in (*members, *coordinators):
        cluster.start(role)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert not done.returncode, done.stderr


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
