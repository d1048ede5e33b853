"""A job goes on, bit for bit, on another GPU of the same model: the driver's GPU map. Needs two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moorage.worker import gpu_host
from tests.support.cluster import DevCluster
from tests.support.gpu_jobs import Watched, environment, explained, last_json, python, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.root,
    pytest.mark.skipif(len(gpu_host.information()) < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=1, lease_seconds=10) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("name", "command"),
    [("cupy", python("with_cupy.py", "600")), ("train", python("train.py", "--steps", "1500"))],
)
def test_a_job_goes_on_on_the_other_gpu(cluster: DevCluster, name: str, command: list[str]) -> None:
    expected = reference(command, {})
    expected.pop("nonce")
    client = cluster.client()
    job = client.run(command, name=name, gpus_per_pod=1, env=environment({}))
    seen: list[Watched] = []
    with explained(cluster, name, seen):
        watched = Watched(client, name)
        seen.append(watched)
        watched.wait_for_steps(2)
        job.park()
        # It takes the first GPU of the node, so the job that comes back has to take the other one.
        other = client.run(["sleep", "600"], name=f"{name}-other", gpus_per_pod=1, env=environment({}))
        other.until(lambda seen: seen.phase == "running", timeout=60)
        job.restore()
        watched.wait_for_steps(2)
        job.park()
        other.stop()
        other.wait(timeout=60)
        job.restore()
        ended = job.wait(timeout=300)
        watched.end()
        assert ended.exit_code == 0
        result = last_json(watched.lines)
        result.pop("nonce")
        assert result == expected
