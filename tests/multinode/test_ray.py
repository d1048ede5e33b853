"""moorage.ray on a real Ray cluster beside an embedded one: its futures, its budgets, its errors, and the examples."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moorage import localsocket
from moorage.errors import Conflict, EnvironmentLacking, JobFailed
from tests.support.cluster import DevCluster

if TYPE_CHECKING:
    from moorage.ray import RayJob
    from moorage.ray.local import LocalRay

# Ray's own modules are not written for warnings as errors.
pytestmark = [pytest.mark.root, pytest.mark.ray, pytest.mark.examples, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ["ray_job", "ray_train"]
SECONDS = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=6) as made:
        yield made


@pytest.fixture(scope="module")
def local(cluster: DevCluster) -> Iterator[LocalRay]:
    import ray

    from moorage.ray.local import LocalRay

    with LocalRay(["node-1", "node-2"], dashboard=False) as made:
        ray.init(address=made.address, logging_level="warning", log_to_driver=False)
        yield made


COUNTER = """
import os, secrets, sys, time
from pathlib import Path
nonce, number = secrets.token_hex(8), 0
while not Path(sys.argv[1], "end").exists():
    number += 1
    print(nonce, number, flush=True)
    time.sleep(0.1)
sys.exit(int(Path(sys.argv[1], "end").read_text() or 0))
"""


class Count:
    """A job of one pod that counts until it is told to end, with a nonce of its own."""

    def __init__(self, cluster: DevCluster, name: str, **options: Any) -> None:
        import moorage.ray as moorage_ray

        self.live = cluster.folder / f"live-{name}"
        self.live.mkdir()
        self.job: RayJob = moorage_ray.launch(
            [sys.executable, "-c", COUNTER, str(self.live)],
            name=name,
            working_directory=str(cluster.folder / f"work-{name}"),
            mounts=[f"{self.live}:{self.live}"],
            checkpoint_config=moorage_ray.CheckpointConfig(every_s=0),
            config=cluster.config,
            **options,
        )

    def end(self, code: int = 0) -> None:
        (self.live / ".end").write_text(str(code))
        (self.live / ".end").rename(self.live / "end")

    def counted(self) -> list[str]:
        import ray

        return str(ray.get(self.job.logs(0))).splitlines()

    def assert_right(self) -> None:
        lines = self.counted()
        [nonce] = {line.split()[0] for line in lines}
        assert lines == [f"{nonce} {number}" for number in range(1, len(lines) + 1)]


def until(job: RayJob, done: Callable[[Any], bool]) -> Any:
    import ray

    deadline = time.monotonic() + SECONDS
    while not done(progress := ray.get(job.progress())):
        assert time.monotonic() < deadline, progress
        over, _ = ray.wait([job.done()], timeout=0.2)
        if over:
            ray.get(over)
    return progress


def test_verbs_are_futures_and_a_preempted_job_moves_in_time(cluster: DevCluster, local: LocalRay) -> None:
    import ray

    count = Count(cluster, "verbs")
    job = count.job
    assert isinstance(job.done(), ray.ObjectRef)
    first = ray.get(job.started(), timeout=SECONDS)
    checkpoint, status = ray.get([job.checkpoint(), job.status()], timeout=SECONDS)
    assert checkpoint.job == status.id == first.id
    ray.get(job.park(), timeout=SECONDS)
    parked = ray.get(job.progress())
    assert parked.phase == "parked" and parked.nodes == []
    with pytest.raises(Conflict):
        ray.get(job.checkpoint(), timeout=SECONDS)
    assert ray.get(job.restore(checkpoint), timeout=SECONDS).phase == "running"
    until(job, lambda progress: progress.phase == "running" and progress.nodes)

    [lone] = ray.get(job.supervisors())
    ray.kill(lone)
    until(job, lambda progress: progress.latest_checkpoint not in ("", parked.latest_checkpoint))
    deadline = time.monotonic() + SECONDS
    while ray.get(job.supervisors()) == [lone]:
        assert time.monotonic() < deadline
        time.sleep(0.1)

    [node] = ray.get(job.progress()).nodes
    local.preempt(node, 60)
    moved = until(job, lambda progress: progress.preemptions == 1 and progress.phase == "running" and progress.nodes)
    assert moved.nodes != [node] and moved.failures == 0
    count.end()
    assert ray.get(job.done(), timeout=SECONDS).exit_code == 0
    count.assert_right()


def test_a_failing_rank_uses_up_the_budget_of_failures(cluster: DevCluster, local: LocalRay) -> None:
    import ray

    import moorage.ray as moorage_ray

    count = Count(cluster, "failing", failure_config=moorage_ray.FailureConfig(max_failures=1, max_preemptions=5))
    ray.get(count.job.started(), timeout=SECONDS)
    count.end(3)
    with pytest.raises(JobFailed) as error:
        ray.get(count.job.done(), timeout=SECONDS)
    assert "exited with 3" in error.value.message and "max_failures=1" in error.value.message
    assert ray.get(count.job.progress()).failures == 1


def test_a_missing_worker_is_named_with_the_way_to_install_it(cluster: DevCluster, local: LocalRay) -> None:
    import ray

    import moorage.ray as moorage_ray

    local.add("node-77")
    only = moorage_ray.ScalingConfig(label_selector={"moorage-node": "node-77"})
    count = Count(cluster, "missing", scaling_config=only)
    with pytest.raises(EnvironmentLacking) as error:
        ray.get(count.job.done(), timeout=SECONDS)
    assert "node-77" in error.value.message and "no worker here" in error.value.message
    assert "pip install moorage" in error.value.hint
    assert (localsocket.FOLDER / f"{cluster.name}-node-1.sock").exists()


CLASH = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
for name, package, message in (
    ("rpc.proto", "etcdserverpb", "RangeRequest"),
    ("moorage/barrier/etcdpb/rpc.proto", "etcdserverpb", "PutRequest"),
    ("moorage/v1/coordinator.proto", "moorage.v1", "SubmitRequest"),
):
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package)
    file.message_type.add(name=message).field.add(name="alien", number=1, type=9, label=1)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
import ray, moorage.ray as moorage_ray
from moorage.ray import job, controller
from moorage.barrier import etcdpb
from moorage.v1 import coordinator_pb2
assert coordinator_pb2.SubmitRequest(request_id="x", on=["a"]).on == ["a"]
found = descriptor_pool.Default().FindMessageTypeByName("moorage.v1.SubmitRequest")
assert message_factory.GetMessageClass(found)(alien="y").alien == "y"
from ray.core.generated import gcs_service_pb2
print("no clash")
"""


def test_the_protobuf_messages_that_a_job_brings_do_not_clash() -> None:
    command = [sys.executable, "-P", "-c", CLASH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.stdout.splitlines()[-1:] == ["no clash"], done.stderr


@pytest.mark.torch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_ends_right_from_its_readme_line(name: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    text = (ROOT / "examples" / name / "README.md").read_text()
    [line] = [one for one in re.findall(r"^\$ (.*)$", text, re.MULTILINE) if not one.startswith("moorage dev")]
    with DevCluster(nodes=4, lease_seconds=4) as made, socket.socket() as taken:
        with contextlib.suppress(OSError):  # someone has it already, as any connection of this machine may
            taken.bind(("", 52365))  # where Ray's agent listens that takes jobs, unless it is told otherwise
        done = subprocess.run(
            shlex.split(line),
            cwd=ROOT,
            env=os.environ | made.environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, (done.stdout, done.stderr)
    last = done.stdout.splitlines()[-1]
    assert last.endswith("nonces survived: yes") and ": no" not in last, done.stdout
