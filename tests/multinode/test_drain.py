"""A fleet of real jobs is drained: with room for all while a node dies, and with no room for some."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage import Client
from moorage.coordinator.client import Job
from moorage.errors import NoCapacity
from tests.support.cluster import DevCluster

pytestmark = pytest.mark.root

LEAVING = ["node-1", "node-2", "node-3", "node-4"]
# Every line is written twice: to a live mount, which no restore takes back, and into what is checkpointed.
COUNTER = """
nonce=$(cat /proc/sys/kernel/random/uuid); n=0
while [ ! -e "$1/end" ]; do
  n=$((n+1)); echo "$nonce $n" | tee -a "$1/$2" >> counted; sleep 0.2
done
echo "done $nonce $n"
"""


class Counter:
    """One job that counts, with a nonce that it drew at its start."""

    def __init__(self, client: Client, folder: Path, name: str, **options: Any) -> None:
        self.name = name
        self.live = folder / "live"
        self.work = folder / name
        self.work.mkdir(parents=True)
        self.live.mkdir(exist_ok=True)
        self.job: Job = client.run(
            ["/bin/sh", "-c", COUNTER, "counter", str(self.live), name],
            name=name,
            working_directory=str(self.work),
            mounts=[f"{self.live}:{self.live}"],
            **options,
        )

    def lines(self) -> list[tuple[str, int]]:
        path = self.live / self.name
        found = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(nonce, int(number)) for nonce, number in found]

    def until_it_counts(self) -> None:
        start, deadline = len(self.lines()), time.monotonic() + 60
        while len(self.lines()) < start + 2:
            assert time.monotonic() < deadline, (self.name, self.job.status())
            time.sleep(0.05)

    def assert_right(self) -> None:
        """One nonce for all of its life, and a result without a gap or a repetition."""
        info = self.job.wait(timeout=180)
        assert (info.phase, info.exit_code) == ("finished", 0), [event.sentence for event in self.job.events()]
        [nonce] = {nonce for nonce, _ in self.lines()}
        counted = (self.work / "counted").read_text().splitlines()
        assert counted == [f"{nonce} {number}" for number in range(1, len(counted) + 1)]
        output = b"".join(piece.data for piece in self.job.logs()).decode()
        assert output.splitlines()[-1] == f"done {nonce} {len(counted)}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=8, lease_seconds=10, slots=5) as made:
        yield made


def moorage(cluster: DevCluster, *arguments: str) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).with_name("moorage")), *arguments]
    return subprocess.Popen(
        command,
        env=cluster.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(cluster: DevCluster, *arguments: str, code: int = 0) -> tuple[Any, str]:
    process = moorage(cluster, *arguments, "--output", "json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, (out, err)
    return json.loads(out), err


def plan_of(drain: Any) -> list[tuple[list[str], list[tuple[str, list[str], list[str]]]]]:
    return [
        (wave["nodes"], [(move["name"], move["source"], move["target"]) for move in wave["moves"]])
        for wave in drain["waves"]
    ]


def cordoned(client: Client) -> list[str]:
    return [node.node for node in client.nodes() if node.cordoned]


def test_ten_jobs_leave_four_nodes_two_at_a_time_while_another_node_dies(cluster: DevCluster) -> None:
    client = cluster.client()
    jobs = [Counter(client, cluster.folder, f"count-{number}", pods=1) for number in range(10)]
    for counter in jobs:
        counter.job.until(lambda job: job.phase == "running", timeout=180)
        counter.until_it_counts()
    doomed = next(counter for counter in jobs if counter.job.status().pods[0].node == "node-8")
    for counter in jobs:
        if counter.job.status().pods[0].node == "node-8":
            counter.job.checkpoint()  # it has to come back from one

    line = ("drain", *LEAVING, "--parallel", "2")
    planned, _ = run(cluster, *line, "--dry-run")
    assert planned["phase"] == "planned" and cordoned(client) == []
    assert planned["homeless"] == [] and [wave["nodes"] for wave in planned["waves"]] == [LEAVING[:2], LEAVING[2:]]
    sources = {counter.name: counter.job.status().pods[0].node for counter in jobs}
    to_move = {name for name, node in sources.items() if node in LEAVING}
    assert {move["name"] for wave in planned["waves"] for move in wave["moves"]} == to_move

    process = moorage(cluster, *line, "-y", "--output", "json")
    while not cordoned(client):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    cluster.destroy("node-8")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, (out, err)
    ran = json.loads(out)
    assert ran["phase"] == "done" and cordoned(client) == LEAVING
    lost_target = {move["name"] for wave in planned["waves"] for move in wave["moves"] if "node-8" in move["target"]}
    for before, after in zip(plan_of(planned), plan_of(ran), strict=True):
        assert before[0] == after[0]
        kept = [[move for move in moves if move[0] not in lost_target] for _, moves in (before, after)]
        assert kept[0] == kept[1], "the plan that ran is the plan that was shown, but for the node that died"
    for move in [move for wave in ran["waves"] for move in wave["moves"]]:
        assert move["state"] == "moved", move
        assert move["name"] in lost_target or move["placed"] == move["target"], move
    doomed.job.until(lambda job: job.phase == "running" and job.incarnation > 1, timeout=180)
    for counter in jobs:
        counter.until_it_counts()
        assert counter.job.status().pods[0].node in ("node-5", "node-6", "node-7")
    again, _ = run(cluster, *line, "-y")
    assert again["phase"] == "done" and [wave["moves"] for wave in again["waves"]] == [[], []]

    (jobs[0].live / "end").touch()
    for counter in jobs:
        counter.assert_right()
    (jobs[0].live / "end").unlink()
    uncordoned, _ = run(cluster, "undrain", *LEAVING)
    assert not any(node["cordoned"] for node in uncordoned) and cordoned(client) == []


def test_jobs_that_have_no_other_place_are_named_before_anything_is_touched(cluster: DevCluster) -> None:
    client = cluster.client()
    half = client.nodes()[0].memory_bytes * 6 // 10
    # At most one of these pods fits on a node, and there are more of them than nodes that stay.
    wide = Counter(client, cluster.folder, "wide", pods=len(cluster.nodes) - 3, memory_bytes=half)
    bound = Counter(client, cluster.folder, "bound", pods=1, nodes=["node-1"])
    free = Counter(client, cluster.folder, "free", pods=1, nodes=["node-2", "node-5"])
    for counter in (wide, bound, free):
        counter.job.until(lambda job: job.phase == "running", timeout=180)
    if free.job.status().pods[0].node != "node-2":
        free.job.move(to=["node-2"])
    line = ("drain", "-l", "node in (node-1,node-2,node-3,node-4)", "--parallel", "2")
    plan, err = run(cluster, *line, "-y", code=NoCapacity.exit_code)
    reasons = {move["name"]: move["reason"] for move in plan["homeless"]}
    assert set(reasons) == {"bound", "wide"} and "nothing was touched" in err
    assert reasons["bound"] == "it may run on node-1 only, and it does not stay in service"
    assert "room for 1 of" in reasons["wide"] and "MiB of memory free" in reasons["wide"]
    assert all(any("moorage park" in choice for choice in move["choices"]) for move in plan["homeless"])
    assert cordoned(client) == [] and wide.job.status().attempt == 0

    done, _ = run(cluster, *line, "-y", "--homeless", "park")
    assert done["phase"] == "done" and cordoned(client) == LEAVING
    assert {move["name"]: move["state"] for wave in done["waves"] for move in wave["moves"]} == {
        "bound": "parked",
        "free": "moved",
        "wide": "parked",
    }
    with pytest.raises(NoCapacity, match="cordoned"):
        bound.job.restore()
    client.uncordon(LEAVING)
    bound.job.restore()
    (bound.live / "end").touch()
    bound.assert_right()
    free.assert_right()
    (bound.live / "end").unlink()
    wide.job.stop(grace=0)


def test_a_drain_that_is_interrupted_stands_still_and_goes_on_when_it_is_repeated(cluster: DevCluster) -> None:
    client = cluster.client()
    here = cluster.nodes[:2]
    jobs = [Counter(client, cluster.folder, f"stop-{node}", pods=1) for node in here]
    for counter, node in zip(jobs, here, strict=True):
        counter.job.until(lambda job: job.phase == "running", timeout=180)
        counter.job.move(to=[node])
    line = ("drain", *here, "-y")
    process = moorage(cluster, *line)
    assert process.stderr is not None
    while "is being checkpointed" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and f"moorage drain {' '.join(here)} goes on" in err, (out, err)
    assert "1 moved, 1 waiting" in out and cordoned(client) == here
    assert [counter.job.status().pods[0].node in here for counter in jobs] == [False, True]
    # Somebody else's jobs go on, whoever is killed: also the coordinator, in the middle of what comes now.
    process = moorage(cluster, *line, "--output", "json")
    while jobs[1].job.status().phase == "running":
        assert process.poll() is None
    cluster.kill("coordinator")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and json.loads(out)["phase"] == "done", (out, err)
    client.uncordon(here)
    (jobs[0].live / "end").touch()
    for counter in jobs:
        counter.assert_right()
    (jobs[0].live / "end").unlink()
