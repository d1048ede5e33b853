"""A job whose pods stand frozen and sealed for two minutes in the middle of a checkpoint."""

from __future__ import annotations

from tests.support.cluster import DevCluster
from tests.support.judge import Line
from tests.support.pingpong_job import PingPong

SEALED_SECONDS = 120
#: The order to capture is given when every pod is sealed.
_SEALED = "coordinator.order.capture.before"


def run() -> list[Line]:
    """The job from its start to its right end; what the witness saw. Raises AssertionError."""
    with DevCluster(nodes=2, lease_seconds=10) as cluster:
        job = PingPong(cluster, steps=1_000_000, attempt_deadline=3 * SEALED_SECONDS)
        job.until_step(10)
        assert len(set(job.placement())) == 2
        cluster.arm(_SEALED, f"stall {SEALED_SECONDS}", role="coordinator")
        checkpoint = job.job.checkpoint()
        assert not cluster.armed()
        assert checkpoint.pause_seconds >= SEALED_SECONDS
        job.until_it_moves()
        job.end()
        job.assert_right(restores=0)
        return job.lines()
