"""Every verb from a shell, as the README shows it, with output that a program can read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import Conflict, DeadlineExceeded, UsageError
from tests.support.cluster import DevCluster
from tests.support.shell import COMMAND, Shell

pytestmark = pytest.mark.root

SCRIPT = """\
import os, sys, time
from pathlib import Path

rank, live = os.environ["RANK"], Path(sys.argv[1])
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
Path(f"rank{rank}.txt").write_text("so far\\n")
while not (live / "end").exists():
    time.sleep(0.02)
Path(f"rank{rank}.txt").write_text("all\\n")
print("over", file=sys.stderr, flush=True)
sys.exit(int(live.joinpath("end").read_text()))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=3, lease_seconds=10) as made:
        yield made


@pytest.fixture
def shell(cluster: DevCluster, tmp_path: Path) -> Shell:
    return Shell(cluster, tmp_path)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "live"
    folder.mkdir()
    return folder


def names(rows: list[dict[str, str]], key: str) -> set[str]:
    return {row[key] for row in rows}


def test_the_life_of_a_job_from_a_shell(shell: Shell, live: Path, tmp_path: Path) -> None:
    mount = f"{live}:{live}"
    line = ["torchrun", "--nnodes", "2", "--checkpoint-every", "1h", "--name", "digits", "--mount", mount]
    planned = shell(*line, "--dry-run", "--output", "json", "train.py", str(live)).stdout
    assert '"digits"' in planned and shell.json("jobs") == []
    assert shell(*line, "-d", "train.py", str(live)).stdout == "digits\n"

    # What runs, and where.
    [job] = shell.json("jobs")
    assert (job["name"], job["over"]) == ("digits", False)
    assert names(shell.json("nodes"), "node") == {"node-1", "node-2", "node-3"}
    assert shell.json("show", "node-1")["live"]
    assert shell.json("status")["leading"]
    findings = shell.json("doctor", "--node", "node-1")
    assert {"ok"} <= names(findings, "state") <= {"ok", "warning"}
    assert names(shell.json("doctor"), "name") == names(findings, "name")
    wait_for_output(shell, ranks=2)
    assert sorted(shell("logs", "digits").stdout.splitlines()) == [f"[rank {n}] rank {n} of 2" for n in range(2)]
    assert shell("logs", "digits", "--rank", "1").stdout == "rank 1 of 2\n"
    assert {(piece["rank"], piece["text"]) for piece in shell.lines("logs", "digits")} >= {(0, "rank 0 of 2\n")}

    # Beside a rank.
    for rank in ("-1", "9"):
        assert f"no rank {rank}" in shell.refused(UsageError, "exec", "digits", "--rank", rank, "--", "cat")
    assert "not found" in shell("exec", "digits", "--", "no-such-program", code=127).stderr
    done = shell("exec", "digits", "--rank", "1", "--", "sh", "-c", "cat; echo $RANK; exit 7", given="in\n", code=7)
    assert done.stdout == "in\n1\n"
    pulled = shell.json("pull", "digits", "--to", "pulled")
    assert pulled["files"] and (tmp_path / "pulled" / "rank1.txt").read_text() == "so far\n"
    assert not (tmp_path / "rank1.txt").exists()
    shell("pull", "digits", "/etc/hostname", "--to", "host")
    assert (tmp_path / "host" / "hostname").read_text() != ""

    # What only says what it would do does nothing.
    for verb in (["checkpoint"], ["park"], ["move", "--to", "node-3"], ["restore", "--on", "node-1"], ["stop"]):
        would = shell.json(verb[0], "digits", *verb[1:], "--dry-run")
        assert (would["would"], would["job"]) == (verb[0], job["id"])
    after = shell.json("show", "digits")
    assert (after["phase"], after["attempt"], after["incarnation"]) == ("running", 0, 1)

    # Checkpoints.
    first = shell.json("checkpoint", "digits")
    assert shell("checkpoint", "digits").stdout.strip() in names(shell.json("checkpoints", "digits"), "id")
    assert shell.json("show", first["id"])["bytes_total"] == first["bytes_total"] > 0
    assert {part["pod"] for part in shell.json("inspect", first["id"])["parts"]} == {0, 1}
    assert shell.json("check", first["id"])["errors"] == []
    assert shell.json("check", "--read-data", first["id"])["done"]
    assert shell.json("pin", first["id"], "--dry-run")["would"] == "pin"
    assert shell.json("pin", first["id"])["pinned"]
    assert not shell.json("unpin", first["id"])["pinned"]
    assert shell.json("prune", "--dry-run")["dry_run"]
    assert first["id"] in shell.json("prune")["kept"]

    # From node to node.
    moved = shell.json("move", "digits", "--to", "node-3")
    assert (names(moved["pods"], "node"), moved["incarnation"] > 1) == ({"node-3"}, True)
    parked = shell.json("park", "digits")
    assert shell.json("show", "digits")["phase"] == "parked"
    assert "moorage restore" in shell.refused(Conflict, "pull", "digits")
    back = shell.json("restore", "digits", "--on", "node-1,node-2", "--checkpoint", parked["id"])
    assert names(back["pods"], "node") == {"node-1", "node-2"}

    # Its end.
    assert "runs on" in shell.refused(DeadlineExceeded, "wait", "digits", "--timeout", "100ms")
    (live / "end.new").write_text("0")
    (live / "end.new").rename(live / "end")
    assert shell.json("wait", "digits")["phase"] == "finished"
    kinds = names(shell.lines("events", "digits"), "kind")
    assert {"checkpoint.committed"} <= kinds
    assert "digits" in shell("events", "-f", "digits").stdout
    assert "over" in shell("logs", "-f", "digits").stdout + shell("logs", "digits").stderr
    assert (tmp_path / "rank0.txt").read_text() == (tmp_path / "rank1.txt").read_text() == "all\n"
    assert str(tmp_path) in shell.refused(Conflict, "pull", "digits")
    assert shell.json("jobs") == [] and "digits" in names(shell.json("jobs", "-a"), "name")


def wait_for_output(shell: Shell, ranks: int, job: str = "digits") -> None:
    """Follow the output until every rank has said something."""
    command = [str(COMMAND), "logs", "-f", job, "--output", "json"]
    with subprocess.Popen(command, env=shell.environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen: set[str] = set()
        for line in process.stdout:
            seen.add(line.split(",")[0])
            if len(seen) == ranks:
                break
        process.terminate()


def test_an_attached_run_streams_the_output_and_ends_with_the_jobs_exit_code(shell: Shell) -> None:
    done = shell("run", "--name", "hello", "--", "sh", "-c", "echo out; echo err >&2; exit 7", code=7)
    assert done.stdout == "out\n"
    assert "err\n" in done.stderr
    assert shell("wait", "hello", code=7).stdout == ""
    done = shell("run", "--pods", "2", "--", "sh", "-c", "echo here")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] here", "[rank 1] here"]


def test_an_attached_torchrun_ends_with_the_jobs_exit_code(shell: Shell, live: Path) -> None:
    (live / "end").write_text("3")
    line = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--mount", f"{live}:{live}"]
    done = shell(*line, "train.py", str(live), code=3)
    # The first rank that ends ends the job: the other one may not have begun by then.
    assert " of 2" in done.stdout and "over" in done.stderr


def test_a_job_that_is_stopped_with_a_checkpoint_can_be_brought_back(shell: Shell, live: Path) -> None:
    (shell.folder / "job.yaml").write_text(
        f"name: stopped\ncommand: [{sys.executable}, train.py, {live}]\ntorchrun: true\nmounts: ['{live}:{live}']\n"
    )
    started = shell.json("run", "-d", "-f", "job.yaml")
    wait_for_output(shell, 1, "stopped")
    assert shell.json("stop", "stopped", "--checkpoint")["phase"] == "stopped"
    shell("wait", "stopped", code=130)
    [kept] = shell.json("checkpoints", "stopped")
    assert kept["job"] == started["id"]
    back = shell.json("run", "-d", "-f", "job.yaml", "--if-exists", "resume")
    assert back["id"] == started["id"]
    (live / "end").write_text("0")
    shell("wait", "stopped")
    assert shell("logs", "stopped").stdout == "rank 0 of 1\n"
    other = shell.json("run", "-d", "-f", "job.yaml", "--if-exists", "replace")
    assert other["id"] != started["id"]
    shell("wait", "stopped")


def test_a_launch_line_of_torchrun_works_with_moorage_in_front(shell: Shell) -> None:
    """Logs go where they went, a restart begins with the next count, and each rank knows its place."""
    (shell.folder / "again.py").write_text(
        "import os, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('count', count, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'], sys.argv[1:], flush=True)\n"
        "sys.exit(3 if count == '0' and os.environ['RANK'] == '1' else 0)\n"
    )
    line = ["torchrun", "--nnodes=1:1", "--nproc_per_node", "2", "--rdzv-backend=c10d", "--rdzv-endpoint=host:29400"]
    line += ["--rdzv-id=7", "--max-restarts=2", "--log-dir", "logs", "--redirects", "3", "--tee", "1:1"]
    done = shell(*line, "--duplicate-stdout-filters", "count 1", "again.py", "--gpu", "${local_rank}")
    assert "[rank 1] count 1 of 2 ['--gpu', '1']" in done.stdout and "rank 0" not in done.stdout
    folder = shell.folder / "logs" / "7" / "attempt_0"
    assert (folder / "0" / "stdout.log").read_text().endswith("count 1 of 2 ['--gpu', '0']\n")
    assert sorted((folder / "filtered_stdout.log").read_text().splitlines()) == [
        f"count 1 of 2 ['--gpu', '{rank}']" for rank in range(2)
    ]


def test_the_lines_of_several_nodes_are_one_job(shell: Shell, live: Path) -> None:
    line = [str(COMMAND), "torchrun", "--nnodes=2", "--master-addr=head", "--master-port=29501", "--max-restarts=0"]
    line += ["--mount", f"{live}:{live}"]
    lines = [
        subprocess.Popen(
            [*line, f"--node-rank={number}", "train.py", str(live)],
            cwd=shell.folder,
            env=shell.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    seen = ["", ""]
    for number, process in enumerate(lines):
        assert process.stdout is not None
        while f"rank {number} of 2" not in seen[number]:
            text = process.stdout.readline()
            assert text, process.communicate()
            seen[number] += text
    (live / "end.new").write_text("5")
    (live / "end.new").rename(live / "end")
    for process in lines:
        process.communicate(timeout=120)
        assert process.returncode == 5
    assert "rank 0 of 2" not in seen[1], "the second line shows the ranks of its own node"
