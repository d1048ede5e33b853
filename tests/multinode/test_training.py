"""The main job: a torch training over two nodes loses one of them for good, and ends with the same numbers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.cluster import DevCluster
from tests.support.shell import COMMAND

pytestmark = [pytest.mark.root, pytest.mark.torch]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "node_loss"
TRAIN = EXAMPLE / "train.py"
RANKS = 2
EPOCHS = 14
SECONDS = 240.0


def _load_report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("node_loss_report", EXAMPLE / "report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = _load_report()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run under plain torchrun."""
    folder = tmp_path_factory.mktemp("reference")
    subprocess.run(
        [
            *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
            *(str(TRAIN), "--epochs", str(EPOCHS)),
        ],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    return folder


def until(done: Callable[[], bool], process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("use_rto_max", [True, False], ids=["as the kernel can", "without tcp_rto_max_ms"])
def test_a_training_that_loses_a_node_ends_with_the_same_numbers(
    reference: Path, tmp_path: Path, use_rto_max: bool
) -> None:
    run, trail, output = tmp_path / "run", tmp_path / "trail", tmp_path / "output"
    run.mkdir()
    trail.mkdir()

    def steps() -> int:
        return min(len(report.trail_steps(trail, rank)) for rank in range(RANKS))

    with DevCluster(nodes=3, use_rto_max=use_rto_max) as cluster, output.open("wb") as file:
        command = [
            *(str(COMMAND), "torchrun", f"--nnodes={RANKS}", "--nproc-per-node=1", "--name=digits"),
            *(f"--mount={trail}:{trail}", "--env=OMP_NUM_THREADS=1"),
            *(str(TRAIN), f"--epochs={EPOCHS}", f"--trail={trail}"),
        ]
        environment = {**os.environ, **cluster.environment}
        with subprocess.Popen(
            command, cwd=run, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        ) as process:
            try:
                until(lambda: steps() > 20, process, output)
                job = cluster.client().job("digits")
                job.checkpoint()
                committed = steps()
                until(lambda: steps() > committed + 5, process, output)
                cluster.destroy(job.status().pods[1].node)
                assert process.wait(SECONDS) == 0, output.read_text()
            finally:
                if process.poll() is None:
                    process.kill()
        info = job.status()
        assert (info.phase, info.restarts) == ("finished", 1), [event.sentence for event in job.events()]

    assert report.first_difference(reference, run, RANKS) == ""
    assert report.digest(reference, RANKS) == report.digest(run, RANKS)
    for rank in range(RANKS):
        result = json.loads((run / f"result-rank{rank}.json").read_text())
        assert report.went_on(result, report.starts(trail, rank)), "the rank was started again instead of restored"
        assert len(report.trail_steps(trail, rank)) > result["steps"], "no step was done twice: nothing was lost"
