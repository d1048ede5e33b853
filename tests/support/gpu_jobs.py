"""Runs a GPU program undisturbed, and as a job that is checkpointed, killed and restored while it works."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moorage import Client
from moorage.coordinator.client import Job
from tests.support.cluster import DevCluster

PROGRAMS = Path(__file__).resolve().parents[1] / "gpu" / "programs"
_SECONDS = 300.0


def last_json(lines: Sequence[str]) -> dict[str, Any]:
    """The last line that is a JSON object."""
    for line in reversed(lines):
        if line.startswith("{"):
            return dict(json.loads(line))
    raise AssertionError("the program printed no result:\n" + "\n".join(lines[-20:]))


def reference(command: Sequence[str], env: dict[str, str]) -> dict[str, Any]:
    """The result of the program without moorage."""
    done = subprocess.run(
        command,
        check=False,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return last_json(done.stdout.splitlines())


class Watched:
    """The lines that a job prints, as they come."""

    def __init__(self, client: Client, name: str) -> None:
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._follow, args=(client, name), daemon=True)
        self._thread.start()

    def _follow(self, client: Client, name: str) -> None:
        rest = ""
        for line in client.job(name).logs(follow=True):
            rest += line.data.decode(errors="replace")
            *whole, rest = rest.split("\n")
            with self._more:
                self.lines += whole
                self._more.notify_all()
        with self._more:
            self.lines += [rest] if rest else []
            self._more.notify_all()

    def steps(self) -> int:
        return sum(line.startswith("step") for line in self.lines)

    def wait_for_steps(self, more: int, seconds: float = _SECONDS) -> None:
        """Until ``more`` further steps were made, or the program has ended."""
        wanted = self.steps() + more
        with self._more:
            reached = self._more.wait_for(lambda: self.steps() >= wanted or not self._thread.is_alive(), seconds)
        assert reached, "no further step was made:\n" + "\n".join(self.lines[-20:])

    def end(self) -> None:
        self._thread.join(_SECONDS)


@contextlib.contextmanager
def explained(cluster: DevCluster, name: str, watched: list[Watched]) -> Iterator[None]:
    """On failure: the job's story, its output and the cluster's logs, into ``$MOORAGE_GPU_RESULTS``."""
    try:
        yield
    except BaseException:
        if folder := os.environ.get("MOORAGE_GPU_RESULTS"):
            with (Path(folder) / f"failed-{name}.log").open("w") as file, contextlib.suppress(Exception):
                print(*(event.sentence for event in cluster.client().job(name).events()), sep="\n", file=file)
                for lines in watched:
                    print("--- output", *lines.lines[-60:], sep="\n", file=file)
                for path in [
                    *(cluster.folder / "state" / "log").glob("*.log"),
                    *(cluster.folder / "state" / "nodes").glob("*/gpu/*.log"),
                ]:
                    print(f"--- {path}", *path.read_text(errors="replace").splitlines()[-80:], sep="\n", file=file)
        raise


def environment(extra: dict[str, str]) -> dict[str, str]:
    """What a program needs of this process's environment."""
    kept = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
    return {name: os.environ[name] for name in kept if name in os.environ} | extra


def disturbed(
    cluster: DevCluster,
    name: str,
    command: Sequence[str],
    env: dict[str, str],
    *,
    moves: int = 3,
    seed: int = 0,
    most: int = 3,
    gpus: int = 1,
    nodes: tuple[str, str] = ("node-1", "node-2"),
) -> dict[str, Any]:
    """Its result after one checkpoint that it ran on from, and ``moves`` kills with a restore in a fresh pod each.

    Between two of these up to ``most`` of the steps that it prints are made. Besides, under ``moorage``: pauses and
    times of all that, in seconds, and bytes.
    """
    client = cluster.client()
    chance = random.Random(f"{name} {seed}")
    job = client.run(
        list(command),
        name=name,
        gpus_per_pod=gpus,
        env=environment(env),
        working_directory=str(PROGRAMS),
        nodes=list(nodes),
    )
    seen: list[Watched] = []
    with explained(cluster, name, seen):
        return _disturb(client, job, seen, name, moves, chance, most, nodes)


def _disturb(
    client: Client,
    job: Job,
    seen: list[Watched],
    name: str,
    moves: int,
    chance: random.Random,
    most: int,
    nodes: tuple[str, str],
) -> dict[str, Any]:
    watched = Watched(client, name)
    seen.append(watched)
    watched.wait_for_steps(1)
    measured: dict[str, Any] = {"moves": []}
    watched.wait_for_steps(chance.randint(1, most))
    time.sleep(chance.random() * 0.1)  # at a random instant of a step
    checkpoint = job.checkpoint()
    measured["pause"] = round(checkpoint.pause_seconds, 3)
    measured["bytes"] = checkpoint.bytes_total
    for _ in range(moves):
        watched.wait_for_steps(chance.randint(1, most))
        time.sleep(chance.random() * 0.1)
        began = time.monotonic()
        here = job.status().pods[0].node
        job.move(to=[nodes[0] if here == nodes[1] else nodes[1]])
        measured["moves"].append(round(time.monotonic() - began, 2))
    ended = job.wait(timeout=_SECONDS)
    watched.end()
    assert ended.exit_code == 0, "\n".join(watched.lines[-40:])
    result = last_json(watched.lines)
    assert result["nonce"] == json.loads(next(line for line in watched.lines if line.startswith("{")))["nonce"]
    return result | {"moorage": measured}


def python(script: str, *arguments: str) -> list[str]:
    """The command that runs one of the programs."""
    return [sys.executable, "-u", str(PROGRAMS / script), *arguments]
