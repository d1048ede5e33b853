"""Runs a program of several ranks undisturbed, and as a job that is checkpointed, killed and restored while it works.

The programs are those of `tests/gpu/programs/nccl`; `rank.py` there says how a rank shows how far it is and what it
prints at its end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage.coordinator.client import Job
from moorage.worker import gpu_host
from tests.support.cluster import DevCluster
from tests.support.gpu_jobs import environment, last_json

PROGRAMS = Path(__file__).resolve().parents[1] / "gpu" / "programs" / "nccl"
#: Steps from the furthest rank to the one at which all stop: none can be so far ahead of what it has shown.
_MARGIN = 60
_STEP_SECONDS = 60.0
_END_SECONDS = 120.0
#: The same for both runs. One GPU carries several ranks only if each says that it is a host of its own.
NCCL = {"NCCL_IB_DISABLE": "1", "NCCL_NET_PLUGIN": "none", "NCCL_TUNER_PLUGIN": "none", "NCCL_DEBUG": "WARN"}
HOST = "NCCL_HOSTID"


@dataclass(frozen=True)
class Program:
    """``script`` with ``arguments``, as ``pods`` times ``per_pod`` ranks; ``slow``: of the job alone.

    ``gpus``: of a pod; 0: one for each rank, as far as the machine has so many.
    """

    script: str
    arguments: Sequence[str] = ()
    pods: int = 1
    per_pod: int = 2
    slow: Sequence[str] = ("--uneven", "20")
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cuda"
    gpus: int = 0

    @property
    def world(self) -> int:
        return self.pods * self.per_pod

    @property
    def gpus_per_pod(self) -> int:
        if self.device != "cuda":
            return 0
        return self.gpus or min(self.per_pod, max(1, len(gpu_host.information())))

    def command(self, *more: str) -> list[str]:
        """Of one rank."""
        script = str(PROGRAMS / self.script)
        return [sys.executable, "-u", script, "--device", self.device, *self.arguments, *more]


def rank_environment(program: Program, rank: int, port: int, hosts: str = "") -> dict[str, str]:
    """Of a rank that is started by hand. ``hosts``: each is a host of its own to NCCL, by a name that begins so."""
    return environment({**NCCL, **program.env}) | {
        **{"RANK": str(rank), "WORLD_SIZE": str(program.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"LOCAL_RANK": str(rank), "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        **{"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_RAS_ENABLE": "0"},
        **({HOST: f"{hosts}-{rank}"} if hosts else {}),
    }


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def reference(program: Program, steps: int, seconds: float = _END_SECONDS) -> list[dict[str, Any]]:
    """What each rank prints at its end, without moorage and without a pause."""
    crowded = program.world > len(gpu_host.information())
    port, ranks = free_port(), []
    for rank in range(program.world):
        env = rank_environment(program, rank, port, "reference" if crowded else "")
        command = program.command("--steps", str(steps))
        ranks.append(
            subprocess.Popen(
                command, env=env, cwd=PROGRAMS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        until = time.monotonic() + seconds
        texts = [rank.communicate(timeout=max(1.0, until - time.monotonic()))[0] for rank in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    for one, text in zip(ranks, texts, strict=True):
        assert one.returncode == 0, text[-3000:]
    return [last_json(text.splitlines()) for text in texts]


class Ranks:
    """The job. ``live``: a folder of the host in all its pods, where the ranks show how far they are."""

    def __init__(self, cluster: DevCluster, name: str, program: Program, nodes: Sequence[str] = ()) -> None:
        self.cluster, self.name, self.program = cluster, name, program
        self.live = cluster.folder / f"live-{name}"
        self.live.mkdir(mode=0o755)
        command = program.command("--folder", str(self.live), "--until", str(self.live / "until"), *program.slow)
        self.job: Job = cluster.client().run(
            command,
            name=name,
            pods=program.pods,
            ranks_per_pod=program.per_pod,
            rendezvous=True,
            gpus_per_pod=program.gpus_per_pod,
            env=environment({**NCCL, **program.env}),
            rank_env={HOST: f"{name}-${{rank}}"} if program.per_pod > program.gpus_per_pod else {},
            working_directory=str(PROGRAMS),
            mounts=[f"{self.live}:{self.live}"],
            attempt_deadline=60.0,
            nodes=list(nodes),
        )

    def steps(self) -> list[int]:
        """How far each rank is."""
        found = []
        for rank in range(self.program.world):
            try:
                found.append(int((self.live / f"progress-{rank}").read_text()))
            except FileNotFoundError:
                found.append(0)
        return found

    def moves(self, least: int = 1, seconds: float = _STEP_SECONDS) -> None:
        """Until every rank has made some steps more."""
        wanted = [step + least for step in self.steps()]
        until = time.monotonic() + seconds
        while any(now < then for now, then in zip(self.steps(), wanted, strict=True)):
            phase = self.job.status().phase
            assert phase not in ("finished", "failed", "stopped"), f"the job is {phase}"
            assert time.monotonic() < until, f"no step in {seconds:g} s: {self.steps()}, {wanted} wanted ({phase})"
            time.sleep(0.01)

    def end(self) -> list[dict[str, Any]]:
        """Stop all ranks at one step; what each printed at its end."""
        path = self.live / "until"
        path.with_suffix(".new").write_text(str(max(self.steps()) + _MARGIN))
        path.with_suffix(".new").rename(path)
        info = self.job.wait(timeout=_END_SECONDS)
        lines = [self.lines(rank) for rank in range(self.program.world)]
        assert (info.phase, info.exit_code) == ("finished", 0), (info.phase, info.exit_code)
        results = [last_json(some) for some in lines]
        for some, result in zip(lines, results, strict=True):
            first = next(json.loads(line) for line in some if line.startswith("{"))
            assert first["nonce"] == result["nonce"], "a rank was started again"
        return results

    def lines(self, rank: int) -> list[str]:
        """What a rank has printed so far."""
        data = b"".join(piece.data for piece in self.job.logs(rank=rank))
        return data.decode(errors="replace").splitlines()

    def cuts(self) -> list[dict[str, Any]]:
        """What the coordinator said of the cuts of this job."""
        logged = (line for line in self.cluster.log("coordinator").splitlines() if self.job.id in line)
        found = [json.loads(line) for line in logged if '"event": "cut"' in line]
        names = ("processes", "rounds", "slides", "unequal", "behind", "communicators", "seconds")
        return [{name: one.get(name) for name in names} for one in found]


def disturb(
    ranks: Ranks,
    times: int,
    seed: int = 0,
    patience: float = 0.15,
    places: Sequence[Sequence[str]] = (),
    within: float = 600.0,
) -> dict[str, Any]:
    """Checkpoint the job ``times`` times at random instants; after half of them, in turn, it goes on in fresh pods on
    other nodes: on ``places`` one after another, or each pod on the node after its own. None is begun after ``within``
    seconds. Seconds of each."""
    chance = random.Random(f"{ranks.name} {seed}")
    nodes = ranks.cluster.nodes
    end = time.monotonic() + within
    ranks.moves(8, 90.0)
    measured: dict[str, Any] = {"checkpoints": [], "moves": []}
    for number in range(times):
        if time.monotonic() > end:
            break
        time.sleep(chance.random() * patience)
        began = time.monotonic()
        if number % 2 == 0:
            info = ranks.job.checkpoint()
            measured["checkpoints"].append(round(time.monotonic() - began, 2))
            measured.setdefault("pauses", []).append(round(info.pause_seconds, 3))
            if "bytes" not in measured:  # what the pause is spent on
                parts = ranks.cluster.client().inspect(info).parts
                measured["bytes"] = {f"{part.pod} {part.kind}": part.bytes for part in parts if part.bytes >> 20}
        else:
            here = [pod.node for pod in ranks.job.status().pods]
            there = [nodes[(nodes.index(node) + 1) % len(nodes)] for node in here]
            ranks.job.move(to=list(places[number // 2 % len(places)]) if places else there)
            measured["moves"].append(round(time.monotonic() - began, 2))
        ranks.moves(1)
        print(f"{ranks.name}: {number + 1} of {times}, steps {ranks.steps()}", flush=True)
    return measured


@contextlib.contextmanager
def explained(ranks: Ranks) -> Iterator[None]:
    """On failure: the job's story and its output on stdout, all logs into ``$MOORAGE_GPU_RESULTS``."""
    try:
        yield
    except BaseException:
        story = _story(ranks)
        print(*story[-60:], sep="\n")
        if folder := os.environ.get("MOORAGE_GPU_RESULTS"):
            state = ranks.cluster.folder / "state"
            with (Path(folder) / f"failed-{ranks.name}.log").open("w") as file:
                print(*story, sep="\n", file=file)
                for path in [*(state / "log").glob("*.log"), *(state / "nodes").glob("*/gpu/*.log")]:
                    lines = path.read_text(errors="replace").splitlines()
                    print(f"--- {path}", *lines[-150:], sep="\n", file=file)
        raise


def _story(ranks: Ranks) -> list[str]:
    found: list[str] = [f"--- cuts of {ranks.name}"]
    with contextlib.suppress(Exception):
        found += [json.dumps(cut) for cut in ranks.cuts()[-5:]]
    for rank in range(ranks.program.world):
        found.append(f"--- rank {rank}")
        with contextlib.suppress(Exception):
            found += ranks.lines(rank)[-15:]
    found.append("--- events")
    with contextlib.suppress(Exception):
        found += [event.sentence for event in ranks.job.events()][-25:]
    return found


def alike(found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> None:
    """Every rank of one run has computed what it has in the other; the nonces are of two runs."""
    for one, other in zip(found, expected, strict=True):
        assert one["nonce"] != other["nonce"], "the two runs drew the same nonce"
        assert {**one, "nonce": ""} == {**other, "nonce": ""}
