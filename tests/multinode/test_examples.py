"""Every example, run as its README says, on one cluster. Each has a real failure in it and judges itself."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import DevCluster

ROOT = Path(__file__).resolve().parents[2]
#: Those that run on an embedded cluster; the others have tests of their own (node_loss: test_training.py, `make demo`).
EMBEDDED = ["fleet_drain", "python_api", "serving", "torchrun"]


def lines(readme: Path) -> list[list[str]]:
    """What a person is told to type, but for the cluster, which is there."""
    found = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", readme.read_text(), re.MULTILINE)]
    return [line for line in found if line[:2] != ["moorage", "dev"]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=4, lease_seconds=4) as made:
        yield made


def test_every_example_has_a_line_to_run_in_its_readme() -> None:
    for name in [*EMBEDDED, "node_loss"]:
        assert lines(ROOT / "examples" / name / "README.md"), name


@pytest.mark.examples
@pytest.mark.root
@pytest.mark.torch
@pytest.mark.parametrize("name", EMBEDDED)
def test_an_example_ends_right_from_its_readme_line(cluster: DevCluster, name: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for line in lines(ROOT / "examples" / name / "README.md"):
        done = subprocess.run(
            line,
            cwd=ROOT,
            env=os.environ | cluster.environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        last = done.stdout.splitlines()[-1]
        assert re.search(r"nonces? survived: yes$", last) and ": no" not in last, done.stdout
