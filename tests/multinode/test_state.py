"""Each kind of state, held by a program that checks itself, is there after moves and checkpoints at random instants."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moorage.coordinator.client import Job
from tests.support import state_programs
from tests.support.cluster import DevCluster

pytestmark = [pytest.mark.root, pytest.mark.torch]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with state_programs.huge_pages(8), DevCluster(nodes=2, lease_seconds=10) as made:
        yield made


class StateJob:
    """The driver with some programs, as a job."""

    def __init__(self, cluster: DevCluster, names: list[str]) -> None:
        self.cluster = cluster
        folder = Path(tempfile.mkdtemp(prefix="state-", dir=cluster.folder))
        self.live, work = folder / "live", folder / "work"
        self.live.mkdir()
        work.mkdir()
        self.job: Job = cluster.client().run(
            [sys.executable, "-u", str(state_programs.DRIVER), str(state_programs.build()), *names],
            working_directory=str(work),
            mounts=[f"{self.live}:{self.live}"],
            env={"STATE_STOP": str(self.live / "stop"), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def lines(self) -> list[str]:
        return b"".join(piece.data for piece in self.job.logs(rank=0)).decode().splitlines()

    def until(self, done: Callable[[list[str]], bool], seconds: float = 180.0) -> list[str]:
        deadline = time.monotonic() + seconds
        while not done(lines := self.lines()):
            assert time.monotonic() < deadline, lines
            time.sleep(0.2)
        return lines

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
    titles = state_programs.titles()
    chance = random.Random(seed := int(os.environ.get("MOORAGE_STATE_SEED", time.time_ns() % 10**6)))
    print(f"MOORAGE_STATE_SEED={seed}")  # pytest shows it when the test fails
    job = StateJob(cluster, list(titles))
    lines = job.until(lambda lines: any(line.startswith("all ready") for line in lines))
    assert not _word(lines, "lost"), _word(lines, "lost")
    for action in (job.move, job.job.checkpoint, job.move):
        time.sleep(chance.uniform(0.05, 1.0))
        t = time.monotonic()
        action()
        print(action, time.monotonic() - t)
    time.sleep(chance.uniform(0.2, 1.0))
    lines = job.end()
    started, kept, lost, lacks = (_word(lines, word) for word in ("started", "kept", "lost", "lacks"))
    rows = {}
    for name, what in titles.items():
        result = "kept" if name in kept else "not on this machine" if name in lacks else "lost"
        rows[name] = {"what": what, "result": result, "note": lacks.get(name, "")}
    state_programs.record("programs", rows)
    assert not lost, lost
    assert sorted([*kept, *lacks]) == sorted(titles)
    assert all(kept[name].split()[0] == started[name] for name in kept)
