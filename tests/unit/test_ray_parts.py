"""The pure parts of moorage.ray: what Ray's words mean, what is to be done, reports, data sets, the loop's modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.errors import EnvironmentLacking, UsageError
from moorage.ray import options
from moorage.ray.options import FailureConfig, ScalingConfig
from moorage.ray.plan import Bundle, Seen, Spent, decide, spend
from moorage.ray.shard import Shard
from moorage.ray.supervisor import find_worker
from moorage.ray.wire import MARK, Report, Reports, line

LIMITS = FailureConfig(max_failures=1, max_preemptions=2)


def bundle(node: str = "a", **more: Any) -> Bundle:
    return Bundle(ray_node=f"ray-{node}", node=node, **more)


def seen(phase: str = "running", *bundles: Bundle, over: bool = False, **more: Any) -> Seen:
    return Seen(phase=phase, over=over, bundles=bundles or (bundle(),), **more)


def test_rays_own_words_are_read() -> None:
    theirs = SimpleNamespace(num_workers=3, use_gpu=True, resources_per_worker={"CPU": 2}, placement_strategy="SPREAD")
    config = options.scaling(theirs)
    assert config == ScalingConfig(3, True, {"CPU": 2}, "SPREAD")
    assert options.bundle(config) == {"CPU": 2.0, "GPU": 1.0}
    assert options.bundle(options.scaling(None)) == {"CPU": 1.0}
    assert options.failures(SimpleNamespace(max_failures=0)) == FailureConfig(0, -1)
    run = options.run_config(SimpleNamespace(name="n", checkpoint_config=SimpleNamespace(num_to_keep=7)))
    assert (run.name, run.checkpoint_config.num_to_keep) == ("n", 7)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (SimpleNamespace(num_workers=(1, 4)), "num_workers is (1, 4)"),
        (SimpleNamespace(num_workers=0), "num_workers is 0"),
        (SimpleNamespace(use_tpu=True), "use_tpu"),
        (SimpleNamespace(placement_strategy="NEAR"), "placement_strategy 'NEAR'"),
    ],
)
def test_what_cannot_be_is_named(config: Any, told: str) -> None:
    with pytest.raises(UsageError) as error:
        options.scaling(config)
    assert told in error.value.message and error.value.hint


def test_gpus_without_use_gpu_parts_of_gpus_and_remote_storage_are_refused() -> None:
    for config in (ScalingConfig(resources_per_worker={"GPU": 1}), ScalingConfig(1, True, {"GPU": 0.5})):
        with pytest.raises(UsageError):
            options.bundle(config)
    with pytest.raises(UsageError):
        options.run_config(SimpleNamespace(storage_path="s3://bucket/runs"))


def test_a_quiet_job_is_left_alone() -> None:
    for phase in ("running", "checkpointing", "restoring", "starting", "parked"):
        assert decide(seen(phase), Spent(), LIMITS).do == "nothing"


def test_an_announced_preemption_has_its_own_budget() -> None:
    leaving = seen("running", bundle("a", preempted=True, deadline=100.0), bundle("b"))
    action = decide(leaving, Spent(failures=1), LIMITS)
    assert (action.do, action.deadline, action.preemption, action.bundles) == ("evacuate", 100.0, True, (0,))
    spent = spend(spend(Spent(failures=1), action), action)
    assert spent == Spent(failures=1, preemptions=2)
    given_up = decide(leaving, spent, LIMITS)
    assert given_up.do == "give-up" and "max_preemptions=2" in given_up.why
    assert decide(leaving, spent, FailureConfig(1, -1)).do == "evacuate"


def test_a_failure_is_followed_by_a_recovery_while_there_is_a_budget() -> None:
    failed = seen("failed", bundle(), over=True, reason="rank 1 exited with 3")
    action = decide(failed, Spent(), LIMITS)
    assert action.do == "recover" and not action.preemption
    given_up = decide(failed, spend(Spent(), action), LIMITS)
    assert given_up.do == "give-up" and "rank 1 exited with 3" in given_up.why
    died = seen("failed", bundle(alive=False, preempted=True), over=True)
    assert decide(died, Spent(failures=9), LIMITS).do == "recover"


def test_a_dead_ray_node_moves_a_job_that_still_runs() -> None:
    action = decide(seen("running", bundle("a"), bundle("b", alive=False)), Spent(), LIMITS)
    assert (action.do, action.bundles, action.preemption) == ("evacuate", (1,), False)


def test_a_node_that_moorage_has_lost_is_left_to_the_coordinator_until_the_job_has_failed() -> None:
    lost = bundle("b", alive=False, joined=False, lost=True)
    assert decide(seen("running", bundle("a"), lost), Spent(), LIMITS).do == "nothing"
    assert decide(seen("failed", bundle("a"), lost, over=True), Spent(), LIMITS).do == "recover"


def test_a_lone_supervisor_is_replaced() -> None:
    assert decide(seen("running", bundle("a", joined=False)), Spent(failures=9), LIMITS).do == "rejoin"


def test_what_the_user_wants_is_respected() -> None:
    assert decide(seen("finished", over=True), Spent(), LIMITS).do == "end"
    assert decide(seen("stopped", over=True), Spent(), LIMITS).do == "end"
    assert decide(seen("failed", over=True, wanted="stopped"), Spent(), LIMITS).do == "end"
    assert decide(seen("parked", wanted="parked"), Spent(), LIMITS).do == "nothing"
    assert decide(seen("parked", stranded=True), Spent(), LIMITS).do == "recover"


def test_reports_survive_pieces_repetitions_and_look_alikes() -> None:
    reports = Reports()
    text = "".join(f"{line(Report(n=n, metrics={'loss': n / 3}))}\nnoise\n" for n in range(3)).encode()
    text += MARK + b"{broken\n"
    for at in range(0, len(text), 7):
        reports.feed(0, False, text[at : at + 7])
    reports.begin()
    reports.feed(0, False, text)
    reports.feed(1, False, text)
    assert [report.metrics["loss"] for report in reports.in_order(0)] == [0.0, 1 / 3, 2 / 3]
    assert reports.count() == 3 and reports.newest() == Report(n=2, metrics={"loss": 2 / 3})
    with pytest.raises(TypeError, match="cannot be reported"):
        line(Report(n=0, metrics={"bad": object()}))


def test_shards_are_equal_and_disjoint() -> None:
    rows = [{"x": number} for number in range(11)]
    parts = [list(Shard(rows, rank, 3)) for rank in range(3)]
    assert [len(part) for part in parts] == [3, 3, 3]
    assert sorted(row["x"] for part in parts for row in part) == list(range(9))
    batches = list(Shard(list(range(10)), 1, 2).iter_batches(batch_size=2))
    assert batches == [[1, 3], [5, 7], [9]]


def test_the_worker_is_found_by_label_or_alone(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentLacking) as error:
        find_worker("c", "", folder=tmp_path)
    assert "pip install moorage" in error.value.hint and "moorage worker" in error.value.hint
    (tmp_path / "c-one.sock").touch()
    assert find_worker("c", "", folder=tmp_path).name == "c-one.sock"
    (tmp_path / "c-two.sock").touch()
    with pytest.raises(UsageError, match="one, two"):
        find_worker("c", "", folder=tmp_path)
    assert find_worker("c", "two", folder=tmp_path).name == "c-two.sock"
    with pytest.raises(EnvironmentLacking, match="three"):
        find_worker("c", "three", folder=tmp_path)


LOOP = """
import pickle, sys
from pathlib import Path
from moorage.ray import session
session.install(session.Place(rank=1, world_size=2, local_rank=0, local_world_size=1, node_rank=1))
session.begin("run", Path(sys.argv[1]), {"train": [10, 11, 12, 13]}, {})
from ray import train
import ray.train
from ray.train import Checkpoint
Path("own").mkdir()
Path("own/file").write_text("kept")
assert train.get_checkpoint() is None and train.get_context().get_world_rank() == 1
assert list(train.get_dataset_shard("train")) == [11, 13]
train.report({"a": 1.5}, checkpoint=Checkpoint.from_directory("own"))
assert Path(train.get_checkpoint().path, "file").read_text() == "kept"
assert not any(name.startswith(("ray._private", "ray._raylet", "grpc")) for name in sys.modules)
try:
    ray.get(1)
except AttributeError as error:
    print(error)
"""


def test_a_loop_finds_its_modules_and_nothing_of_ray_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOOP, str(tmp_path)],
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=True,
    )
    reported, refused = done.stdout.splitlines()
    assert reported == line(Report(n=0, metrics={"a": 1.5}, checkpoint="checkpoint_000000"))
    assert "beside Ray" in refused and (tmp_path / "checkpoint_000000" / "file").read_text() == "kept"
