"""Jobs with communicators on two nodes: caught with unequal counters, saved, restored elsewhere, killed in the middle.

One has the NCCL stand-in (tests/support/nccl_stub.py) in its ranks, over TCP between its pods; the other the proxy over
a library that looks like NCCL, found and replaced as in any job. In both operations really wait for all partners: a
wrong cut hangs the job or ends it with an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.errors import AttemptAborted, MoorageError, Refused
from moorage.store import Store
from tests.programs.nccl_ranks import expected_digest
from tests.support.cluster import DevCluster

_TESTS = Path(__file__).resolve().parents[1]
_PROGRAM = _TESTS / "programs" / "nccl_ranks.py"
_PODS, _PER_POD = 2, 2
_WORLD = _PODS * _PER_POD
_SECONDS = 90.0

COORDINATOR = [
    f"coordinator.{step}.{side}"
    for step in ("quiesce.cut", "quiesce.keep", "quiesce.destroy", "quiesce.rebuild", "quiesce.open", "order.quiesce")
    for side in ("before", "after")
]
WORKERS = [
    f"worker.nccl.{step}.{side}"
    for step in ("keep", "destroy", "part", "ids", "rebuild")
    for side in ("before", "after")
]


class Ranks:
    """The job, and what its ranks have written outside of what is checkpointed."""

    def __init__(self, cluster: DevCluster) -> None:
        self.live, work = cluster.folder / "live", cluster.folder / "work"
        self.live.mkdir()
        work.mkdir()
        self.job = cluster.client().run(
            [sys.executable, "-u", str(_PROGRAM), "--live", str(self.live)],
            pods=_PODS,
            ranks_per_pod=_PER_POD,
            rendezvous=True,
            env={"MOORAGE_NCCL": "1"},
            working_directory=str(work),
            mounts=[f"{self.live}:{self.live}"],
            attempt_deadline=14.0,
        )

    def lines(self, rank: int) -> list[list[str]]:
        path = self.live / f"witness-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def moves(self, more: int = 3) -> None:
        """Every rank makes some steps more."""
        wanted = [len(self.lines(rank)) + more for rank in range(_WORLD)]
        self.until(lambda: all(len(self.lines(rank)) >= least for rank, least in enumerate(wanted)))

    def until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _SECONDS
        while not reached():
            assert time.monotonic() < deadline, [event.sentence for event in self.job.events()]
            time.sleep(0.03)

    def end(self) -> None:
        """It ends in some steps, with the digests of a job that nobody has disturbed, each by the first process."""
        last = max(int(line[0]) for rank in range(_WORLD) for line in self.lines(rank)) + 40
        (self.live / "until.new").write_text(str(last))
        (self.live / "until.new").rename(self.live / "until")
        info = self.job.wait(timeout=_SECONDS)
        assert (info.phase, info.exit_code) == ("finished", 0), [event.sentence for event in self.job.events()]
        for rank in range(_WORLD):
            text = b"".join(piece.data for piece in self.job.logs(rank=rank)).decode()
            fields = dict(field.split("=") for field in text.split()[1:])
            assert fields["digest"] == expected_digest(_WORLD, last, rank)
            assert {line[1] for line in self.lines(rank)} == {fields["nonce"]}


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=3, lease_seconds=60) as cluster:
        yield cluster


def build(folder: Path) -> dict[str, str]:
    """The library that looks like NCCL, by its name, and its CUDA; the variables by which the job finds them."""
    folder.mkdir()
    for source, name in (("streams.cpp", "libcuda.so.1"), ("fake_nccl.cpp", "libnccl.so.2")):
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-pthread"]
        source_file = _TESTS / "native/fake_nccl" / source
        subprocess.run(["g++", *options, "-o", folder / name, source_file, "-ldl"], check=True)
    nccl = str(folder / "libnccl.so.2")
    return {"FAKE_CUDA": str(folder / "libcuda.so.1"), "NCCL_PROXY": nccl, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.root
@pytest.mark.early
def test_the_proxy_in_the_place_of_a_library_carries_a_job_through(cluster: DevCluster) -> None:
    live = cluster.folder / "proxied"
    live.mkdir()
    environment = build(cluster.folder / "libraries") | {"FAKE_NCCL_FILE": str(live / "place"), "MOORAGE_NCCL": "1"}
    command = f"exec {sys.executable} {_TESTS / 'programs/nccl_job.py'} $RANK $WORLD_SIZE {live} 1000"
    job = cluster.client().run(
        ["sh", "-c", command],
        pods=2,
        ranks_per_pod=2,
        rendezvous=True,
        env=environment | {"PATH": os.environ["PATH"]},
        working_directory=str(live.parent),
        mounts=[f"{live}:{live}"],
    )

    def steps() -> list[int]:
        paths = [live / f"progress{rank}.{thread}" for rank in range(4) for thread in (0, 1)]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def moves() -> None:
        before, deadline = steps(), time.monotonic() + _SECONDS
        while not all(now > then for now, then in zip(steps(), before, strict=True)):
            assert time.monotonic() < deadline, [event.sentence for event in job.events()]
            time.sleep(0.02)

    moves()
    for _ in range(3):
        job.checkpoint()
        moves()
    job.move(to=["node-3", "node-1"])
    moves()
    info = job.wait(timeout=_SECONDS)
    text = b"".join(piece.data for piece in job.logs()).decode()
    assert (info.phase, info.exit_code) == ("finished", 0), (text, [event.sentence for event in job.events()])
    assert text.count("all right") == 4
    cuts = [line for line in cluster.log("coordinator").splitlines() if job.id in line and '"event": "cut"' in line]
    assert len(cuts) >= 4 and all('"processes": 4' in line and '"communicators": 0' not in line for line in cuts)
    assert any('"unequal": true' in line for line in cuts)
    # A checkpoint says of its cut how far apart the ranks were when it began.
    folder = cluster.folder / "state" / "store"
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    found = [Store.open(str(folder)).read_global_manifest(name).extra["nccl_cut"] for name in names]
    assert found and all(one["processes"] == 4 and one["unequal"] == bool(one["behind"]) for one in found)
    assert all(count < need for one in found for *_, count, need in one["behind"])


@pytest.mark.root
@pytest.mark.early
def test_a_job_with_communicators_is_saved_moved_and_survives_every_death(cluster: DevCluster) -> None:
    ranks = Ranks(cluster)
    ranks.moves(3)

    # It runs on after a checkpoint, and comes back from it in fresh pods.
    first = ranks.job.checkpoint()
    ranks.moves()
    ranks.job.restore(checkpoint=first.id)
    ranks.moves()
    ranks.job.move(to=["node-3", "node-3"])
    ranks.moves()

    # What cannot be carried over is named before anything is touched.
    refuse = ranks.live / "refuse-2"
    refuse.touch()
    ranks.moves()
    with pytest.raises(Refused, match=r"communicator id-\w+, ncclDevCommCreate: it lives on the device"):
        ranks.job.checkpoint()
    refuse.unlink()
    ranks.moves()

    # A rank that does nothing keeps the others from a cut: who owes what is said, and the job runs on.
    stall = ranks.live / "stall-1"
    stall.touch()
    time.sleep(0.5)
    with pytest.raises(AttemptAborted) as aborted:
        ranks.job.checkpoint()
    assert "rank 1 is behind on communicator id-" in str(aborted.value), aborted.value
    assert " collectives" in str(aborted.value)
    stall.unlink()
    ranks.moves()

    # Whoever dies wherever, coordinator and workers in turn: the same processes run on.
    incarnation = ranks.job.status().incarnation
    for role, names in (("coordinator", COORDINATOR), ("", WORKERS)):
        for name in names:
            cluster.arm(name, role=role)
    for _ in range(10):
        try:
            ranks.job.checkpoint()
        except MoorageError as error:
            print("no checkpoint:", error)
        ranks.moves()
        if not cluster.armed():
            break
    assert not cluster.armed(), cluster.armed()
    ranks.job.checkpoint()
    story = "\n".join(event.sentence for event in ranks.job.events())
    assert ranks.job.status().incarnation == incarnation, story
    ranks.end()
