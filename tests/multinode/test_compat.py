"""A checkpoint goes only where it fits: what differs is found before anything is restored, and named."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.compat.machine import OVERRIDES
from moorage.coordinator.client import Job
from moorage.errors import Conflict, Incompatible, NotFound, Refused, UsageError
from tests.support.cluster import DevCluster
from tests.support.other_host import bound_to_itself, other_files
from tests.support.shell import Shell
from tests.support.worker_rig import in_order, steps, wait_for

pytestmark = pytest.mark.root

#: Maps a file of its working directory, counts, and says what it sees of the file.
PROGRAM = """\
import mmap, os, sys, time
weights = mmap.mmap(os.open("weights.bin", os.O_RDONLY), 0, prot=mmap.PROT_READ)
os.write(1, b"nonce " + os.urandom(8).hex().encode() + b"\\n")
for number in range(1, 1000000):
    assert weights[-1] == ord("w")
    os.write(1, b"step %d\\n" % number)
    time.sleep(0.02)
"""
RAW_SOCKET = "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('up'); time.sleep(1e6)"


@pytest.fixture(scope="module")
def overrides() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="moorage-test-", dir="/var/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(overrides: Path) -> Iterator[DevCluster]:
    with DevCluster(nodes=3, environment={OVERRIDES: str(overrides)}) as made:
        yield made


@pytest.fixture
def work() -> Iterator[Path]:
    """A working directory that is a mount of its own, with a file in it."""
    folder = Path(tempfile.mkdtemp(prefix="moorage-test-", dir="/var/tmp"))
    (folder / "weights.bin").write_bytes(b"w" * 100_000)
    with bound_to_itself(folder):
        yield folder
    shutil.rmtree(folder)


def until_step(job: Job, beyond: int = 0) -> list[int]:
    """Wait until the job has said a number above ``beyond``; all that it said since its last start."""
    said = ""
    for piece in job.logs(follow=True):
        said += piece.data.decode()
        if (numbers := steps(said)) and numbers[-1] > beyond:
            return numbers
    raise AssertionError(f"the job ended before step {beyond}: {said[-500:]}")


class Hosts:
    """Makes nodes of the cluster look like other machines."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._client = cluster.client()
        self._true: dict[str, Any] = json.loads(bytes(self._client.nodes()[0].fingerprint))

    def differ(self, node: str, **fields: Any) -> None:
        (self._folder / f"{node}.json").write_text(json.dumps(fields))
        self._restart(node)

    def equal(self) -> None:
        for path in list(self._folder.glob("*.json")):
            path.unlink()
            self._restart(path.stem)

    def _restart(self, node: str) -> None:
        """Until the coordinator knows the node's new session."""
        self._cluster.restart(node)
        path = self._folder / f"{node}.json"
        wanted = json.loads(path.read_text()) if path.exists() else {}
        wait_for(lambda: self._shows(node, wanted), f"{node} does not show {wanted}")

    def _shows(self, node: str, wanted: dict[str, Any]) -> bool:
        time.sleep(0.1)
        known = next(info for info in self._client.nodes() if info.node == node)
        seen = json.loads(bytes(known.fingerprint))
        # After a restart the old registration shows until the new one stands.
        return known.live and all(seen[name] == value for name, value in (wanted or self._true).items())


@pytest.fixture
def hosts(cluster: DevCluster, overrides: Path) -> Iterator[Hosts]:
    made = Hosts(cluster, overrides)
    yield made
    made.equal()


def test_a_mapped_file_with_one_other_byte_is_found_before_the_restore_and_named(
    cluster: DevCluster, work: Path, tmp_path: Path
) -> None:
    shell = Shell(cluster, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(work, other)
    (other / "weights.bin").write_bytes(b"w" * 99_999 + b"x")
    command = [sys.executable, "-S", "-c", PROGRAM]
    job = cluster.client().run(command, name="maps", working_directory=str(work), nodes=["node-1", "node-2"])
    until_step(job)
    assert {pod.node for pod in job.status().pods} == {"node-1"}
    named = f"{work}/weights.bin has other content there"
    with other_files(cluster, "node-2", {work: other}):
        checkpoint = shell("checkpoint", "maps").stdout.strip()

        # The verdict, line by line.
        assert shell.json("compat", checkpoint, "node-1")["fits"]
        verdict = shell.json("compat", checkpoint, "node-2", code=Incompatible.exit_code)
        differs = [line for line in verdict["lines"] if line["state"] == "differs"]
        assert [(line["rule"], line["pods"]) for line in differs] == [("files", [0])] and named in differs[0]["message"]
        assert named in shell.refused(Incompatible, "compat", checkpoint, "node-2")
        assert "libc" in shell("compat", checkpoint, "node-1").stdout

        # Nobody is moved there, and the job does not notice that somebody asked.
        reached = until_step(job)[-1]
        assert named in shell.refused(Incompatible, "move", "maps", "--to", "node-2")
        info = job.status()
        assert (info.phase, info.incarnation, info.attempt) == ("running", 1, 1)
        until_step(job, reached)

        # Nor is it restored there, by order or by moorage's own choice.
        shell("park", "maps")
        assert named in shell.refused(Incompatible, "restore", "maps", "--on", "node-2")
        assert job.status().phase == "parked"
        shell("restore", "maps")
        assert {pod.node for pod in job.status().pods} == {"node-1"}

    # The same node with the same file takes it.
    moved = shell.json("move", "maps", "--to", "node-2")
    assert [pod["node"] for pod in moved["pods"]] == ["node-2"]
    reached = until_step(job)[-1]
    numbers = until_step(job, reached + 2)
    assert in_order(numbers)
    job.stop(grace=0)


def test_a_checkpoint_from_a_richer_processor_goes_to_no_poorer_one(
    cluster: DevCluster, hosts: Hosts, work: Path, tmp_path: Path
) -> None:
    shell = Shell(cluster, tmp_path)
    features = json.loads(bytes(cluster.client().nodes()[0].fingerprint))["cpu_features"]
    hosts.differ("node-1", cpu_features=[*features, "avx9000"])
    command = [sys.executable, "-S", "-c", PROGRAM]
    job = cluster.client().run(command, name="rich", working_directory=str(work), nodes=["node-1"])
    until_step(job)
    shell("park", "rich")
    hosts.equal()

    # It says so, and names what lacks. The job may run on node-1 only, and is parked.
    told = shell.refused(Incompatible, "restore", "rich")
    assert "lacks avx9000" in told
    info = job.status()
    assert (info.phase, info.incarnation) == ("parked", 2)

    # Whoever asks may say that it shall begin from nothing: a new incarnation that counts from one.
    assert shell.json("restore", "rich", "--if-incompatible", "cold-start")["phase"] == "running"
    numbers = until_step(job)
    assert numbers[0] == 1 and job.status().incarnation > 2
    kinds = [event.sentence for event in job.events() if event.kind == "job.restarted"]
    assert len(kinds) == 1 and "lacks avx9000" in kinds[0] and "its owner allows that" in kinds[0]
    job.stop(grace=0)


def test_a_placement_avoids_what_does_not_fit(cluster: DevCluster, hosts: Hosts, work: Path, tmp_path: Path) -> None:
    shell = Shell(cluster, tmp_path)
    command = [sys.executable, "-S", "-c", PROGRAM]
    job = cluster.client().run(command, name="picky", working_directory=str(work))
    until_step(job)
    [home] = {pod.node for pod in job.status().pods}
    poor, good = sorted(set(cluster.nodes) - {home})
    shell("checkpoint", "picky")
    hosts.differ(poor, kernel="3.10.0", criu="4.0", runc="1.0", architecture="riscv64")
    told = shell.refused(Incompatible, "move", "picky", "--to", poor)
    assert "the kernel is 3.10.0 there" in told and "CRIU is 4.0 there" in told and "riscv64" in told
    cluster.stop(home)  # its guard freezes the pod, and the job is restored elsewhere
    try:
        job.until(lambda info: info.phase == "running" and info.incarnation == 2, timeout=180)
        assert {pod.node for pod in job.status().pods} == {good}
    finally:
        cluster.start(home)
    assert any(good in event.sentence for event in job.events() if event.kind == "restore.done")
    job.stop(grace=0)


def test_the_job_s_doctor_names_what_cannot_be_saved_and_touches_nothing(cluster: DevCluster, tmp_path: Path) -> None:
    shell = Shell(cluster, tmp_path)
    job = cluster.client().run([sys.executable, "-S", "-c", RAW_SOCKET], name="raw", working_directory=str(tmp_path))
    next(iter(job.logs(follow=True)))
    told = shell.refused(Refused, "doctor", "--job", "raw")
    assert "RAW" in told and "raw socket" in told
    info = job.status()
    assert (info.phase, info.incarnation, info.attempt) == ("running", 1, 0)
    job.stop(grace=0)
    assert "no process of it runs" in shell.refused(Conflict, "doctor", "--job", "raw")
    fine = cluster.client().run([sys.executable, "-S", "-c", "import time; print(1); time.sleep(1e6)"], name="fine")
    next(iter(fine.logs(follow=True)))
    assert shell.json("doctor", "--job", "fine") == []
    fine.stop(grace=0)


def test_the_command_says_what_it_needs(cluster: DevCluster, tmp_path: Path) -> None:
    shell = Shell(cluster, tmp_path)
    assert "--rules" in shell.refused(UsageError, "compat")
    assert "no checkpoint" in shell.refused(NotFound, "compat", "j-0001", "node-1")
    rules = shell.json("compat", "--rules")
    assert {rule["name"] for rule in rules if rule["group"] == "four"} == {"gpu", "driver", "engine", "model"}
    assert os.environ.get(OVERRIDES) is None
