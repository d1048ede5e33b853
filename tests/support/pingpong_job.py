"""The ping-pong program as a job on an embedded cluster, and the verdict on how it went."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moorage.coordinator.client import Job, JobInfo
from tests.programs.pingpong import expected_digest
from tests.support.cluster import DevCluster
from tests.support.judge import Line, Verdict, judge, read

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "pingpong.py"


class PingPong:
    """A running job of ``pods`` ranks that talk over TCP, with a witness file outside of what is checkpointed."""

    def __init__(self, cluster: DevCluster, *, pods: int = 2, steps: int = 400, delay: float = 0.02, **options: Any):
        self.cluster = cluster
        self.pods, self.steps = pods, steps
        self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=cluster.folder))
        self.live = self.folder / "live"
        self.work = self.folder / "work"
        self.live.mkdir()
        self.work.mkdir()
        self.client = cluster.client()
        self.job: Job = self.client.run(
            [
                *(sys.executable, "-u", str(PROGRAM), "--steps", str(steps), "--delay", str(delay)),
                *("--witness", str(self.live / "witness"), "--report", "50"),
                *("--until", str(self.live / "until")),
            ],
            pods=pods,
            rendezvous=True,
            working_directory=str(self.work),
            mounts=[f"{self.live}:{self.live}"],
            **options,
        )

    def lines(self) -> list[Line]:
        """What the witness has seen so far."""
        return read(self.live / "witness")

    def verdict(self) -> Verdict:
        """What the judge says of it."""
        return judge(self.lines())

    def reached(self) -> int:
        """The step that every rank has done."""
        reached = self.verdict().reached
        return min((reached.get(rank, 0) for rank in range(self.pods)), default=0)

    def until(self, done: Callable[[], bool], seconds: float = 150.0) -> None:
        """Wait for something that only the witness file tells. Raises AssertionError when time runs out."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not within {seconds} s: {self.job.status()}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        """Wait until every rank has done ``step``."""
        self.until(lambda: self.reached() >= step)

    def until_it_moves(self, steps: int = 5) -> None:
        """Wait until every rank has done some steps more than now, by the latest of its processes."""
        written = len(self.lines())
        self.until(lambda: self._moved(written, steps))

    def _moved(self, written: int, steps: int) -> bool:
        fresh = [line.rank for line in self.lines()[written:]]
        return all(fresh.count(rank) >= steps for rank in range(self.pods))

    def end(self, steps: int = 40) -> None:
        """Let the job end by itself in some steps, instead of after those that it was made for."""
        self.steps = max(self.verdict().reached.values()) + steps
        new = self.live / "until.new"
        new.write_text(str(self.steps))
        new.rename(self.live / "until")

    def placement(self) -> list[str]:
        """The node of each pod."""
        return [pod.node for pod in self.job.status().pods]

    def assert_right(self, *, restores: int | None = None, anew: bool = False) -> JobInfo:
        """Wait for the job's end and check all that must hold: result, nonces, one incarnation at a time.

        ``anew``: it may have begun again from nothing, because it had no checkpoint when it lost a pod.
        """
        info = self.job.wait(timeout=240)
        assert (info.phase, info.exit_code) == ("finished", 0), [e.sentence for e in self.job.events()]
        verdict = self.verdict()
        assert verdict.sound, verdict.faults
        assert anew or all(len(nonces) == 1 for nonces in verdict.nonces.values()), verdict.nonces
        for rank in range(self.pods):
            output = b"".join(piece.data for piece in self.job.logs(rank=rank)).decode()
            done = next((line for line in output.splitlines() if line.startswith("done ")), "")
            assert done, (rank, output, [e.sentence for e in self.job.events()])
            fields = dict(field.split("=") for field in done.split()[1:])
            assert fields["digest"] == expected_digest(self.pods, self.steps, rank)
            assert fields["nonce"] == verdict.nonces[rank][-1]
            written = (self.work / f"rank{rank}.txt").read_text().splitlines()
            assert len(written) == self.steps
            if restores is not None:
                assert len({line.body for line in self.lines() if line.rank == rank}) == restores + 1
        return info
