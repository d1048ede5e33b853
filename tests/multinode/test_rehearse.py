"""A rehearsal: equal for a job that only computes; for one that looks around it says where it differs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moorage.errors import Differs, JobFailed, UsageError
from tests.support.cluster import DevCluster
from tests.support.shell import Shell

pytestmark = pytest.mark.root

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "rehearse"


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=10) as made:
        yield made


@pytest.fixture
def shell(cluster: DevCluster, tmp_path: Path) -> Shell:
    return Shell(cluster, tmp_path)


def test_a_job_that_only_computes_is_equal(shell: Shell, tmp_path: Path) -> None:
    done = shell("rehearse", str(EXAMPLES / "sums.yaml"), "--seed", "1")
    assert done.stdout.splitlines()[-1] == "equal: yes", done.stdout
    assert "back to" in done.stdout or "moved by" in done.stdout
    report = json.loads((tmp_path / "rehearsal" / "report.json").read_text())
    assert report["equal"] and report["proved"] and report["first"] is None
    assert [one["action"] for one in report["disturbances"]].count("checkpoint") == 1
    assert len([one for one in report["disturbances"] if not one["note"]]) == 3
    environment = report["environment"]
    assert environment["moorage"] and environment["nodes"]["node-1"]["kernel"] and environment["checkpoint"]["libc"]
    assert ElementTree.parse(tmp_path / "rehearsal" / "report.svg").getroot().findall(".//{*}polyline")


def test_a_job_that_differs_is_told_by_step_rank_and_value(shell: Shell, tmp_path: Path) -> None:
    said = shell.refused(Differs, "rehearse", str(EXAMPLES / "impure.yaml"), "--to", "impure")
    assert "differs after restores: rank" in said and "steps after" in said
    report = json.loads((tmp_path / "impure" / "report.json").read_text())
    assert not report["equal"] and report["proved"]
    first = report["first"]
    assert first["output"] == f"sums-rank{first['rank']}.txt" and first["step"] > 0
    assert float.fromhex(first["found"]) > float.fromhex(first["expected"])
    # Up to there both runs wrote the same, and not one step further.
    runs = [
        (tmp_path / "impure" / run / first["output"]).read_text().splitlines() for run in ("reference", "rehearsed")
    ]
    assert runs[0][: first["step"]] == runs[1][: first["step"]]
    assert runs[0][first["step"]] != runs[1][first["step"]]
    table = shell("rehearse", str(EXAMPLES / "impure.yaml"), "--dry-run", "--output", "json").stdout
    assert len(json.loads(table)["would"]) == 3


@pytest.mark.examples
@pytest.mark.torch
def test_the_demos_job_is_equal_and_made_to_differ_it_is_told_where(shell: Shell, tmp_path: Path) -> None:
    done = shell("rehearse", str(EXAMPLES / "digits.yaml"), "--to", "digits")
    assert done.stdout.splitlines()[-1] == "equal: yes", done.stdout
    said = shell.refused(Differs, "rehearse", str(EXAMPLES / "digits-differs.yaml"), "--to", "differs")
    assert "job digits-differs differs after restores: rank 1, step 150, line 151, column 2: expected" in said
    report = json.loads((tmp_path / "differs" / "report.json").read_text())
    firsts = [one["first"] for one in report["outputs"] if one["output"].startswith("steps-")]
    assert [(first["rank"], first["step"]) for first in firsts] == [(0, 151), (1, 150)]
    assert report["when"]


def test_what_cannot_be_rehearsed_is_refused(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("command: [true]\n")
    assert "no section" in shell.refused(UsageError, "rehearse", "plain.yaml")
    (tmp_path / "ends.yaml").write_text("command: [sh, -c, exit 3]\nrehearse: {outputs: [{path: a}]}\n")
    assert "did not finish" in shell.refused(JobFailed, "rehearse", "ends.yaml")
