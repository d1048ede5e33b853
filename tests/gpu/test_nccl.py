"""Unchanged programs of several ranks with NVIDIA's NCCL, checkpointed while they work, killed and restored.

One rank for each GPU: driver 580 cannot switch between two processes inside of a kernel once they were restored, and
NCCL's kernels wait for each other (docs/gpu.md). One job at a time, for the same reason. Each test prints one line of
JSON, and with ``MOORAGE_GPU_RESULTS`` set writes it to ``nccl.jsonl`` there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moorage.worker import gpu_host
from tests.support.cluster import DevCluster
from tests.support.nccl_jobs import Program, Ranks, alike, disturb, explained, reference

pytestmark = [pytest.mark.gpu, pytest.mark.root]


GPUS = len(gpu_host.information())
#: How often a program is checkpointed; in turn it runs on, or goes on in fresh pods.
TIMES = int(os.environ.get("MOORAGE_NCCL_TIMES", "20"))
#: No further checkpoint is begun after so many seconds; a line says how many there were.
WITHIN = float(os.environ.get("MOORAGE_NCCL_WITHIN", "600"))
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "2"}
#: Where the two pods of a job are: together, apart, together elsewhere, apart.
TOGETHER = (("node-1", "node-1"), ("node-2", "node-1"), ("node-2", "node-2"), ("node-1", "node-2"))


@dataclass(frozen=True)
class Case:
    """``places``: of each move; empty: every pod to the node after its own, to the same GPUs the other way round."""

    program: Program
    times: int = TIMES
    places: Sequence[Sequence[str]] = ()


#: What is worth most comes first. With two ranks an addition has one order only; where there are more, or the pods come
#: together, what NCCL could choose anew by the topology is pinned.
CASES = {
    "ddp": Case(Program("ddp.py"), times=20),
    "patterns": Case(Program("patterns.py")),
    "fsdp": Case(Program("fsdp.py")),
    "ddp-two-pods": Case(Program("ddp.py", pods=2, per_pod=1)),
    "together-and-apart": Case(Program("ddp.py", pods=2, per_pod=1, env=PINNED), min(TIMES, 8), TOGETHER),
    "ctypes": Case(Program("with_ctypes.py")),
    "graph-step": Case(Program("graph_step.py")),
    "graph-decode": Case(Program("graph_decode.py")),
    "patterns-two-pods": Case(Program("patterns.py", pods=2, per_pod=1)),
    "tensor-parallel": Case(Program("tensor_parallel.py")),
    "ddp-four-ranks": Case(Program("ddp.py", pods=2, env=PINNED)),
    "patterns-four-ranks": Case(Program("patterns.py", pods=2, env=PINNED)),
}


@pytest.fixture
def cluster() -> Iterator[DevCluster]:
    """Two nodes; each gives its pods the GPUs of this machine, from the other end. Gone with its checkpoints after each
    program: they may lie in memory."""
    numbers = [str(number) for number in range(GPUS)]
    with DevCluster(nodes=2, lease_seconds=10, gpus=[numbers, numbers[::-1]]) as cluster:
        yield cluster


def _told(line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text)
    if folder := os.environ.get("MOORAGE_GPU_RESULTS"):
        with (Path(folder) / "nccl.jsonl").open("a") as file:
            file.write(text + "\n")


def goes_on(cluster: DevCluster, name: str, case: Case) -> dict[str, Any]:
    """The line of one program: how often it was caught, and that its results are those of an undisturbed run."""
    program, times = case.program, case.times
    ranks = Ranks(cluster, name, program)
    with explained(ranks):
        measured = disturb(ranks, times, places=case.places, within=WITHIN)
        found = ranks.end()
        cuts = ranks.cuts()
        expected = reference(program, found[0]["steps"])
        equal = [{**one, "nonce": ""} for one in found] == [{**one, "nonce": ""} for one in expected]
        line = {
            **{
                "program": name,
                "pods": program.pods,
                "ranks": program.world,
                "gpus": program.gpus_per_pod * program.pods,
            },
            **{"steps": found[0]["steps"], "pinned": sorted(program.env)},
            **{"equal": equal, "nonce_survived": True, "checkpoints": len(measured["checkpoints"])},
            **{"moves": len(measured["moves"]), "unequal": sum(bool(cut["unequal"]) for cut in cuts)},
            **{"cut_seconds": [cut["seconds"] for cut in cuts], "slides": sum(cut["slides"] or 0 for cut in cuts)},
            "communicators": max((cut["communicators"] for cut in cuts), default=0),
            # Of each cut: how many lanes were unequal, and how far the furthest was behind.
            "behind": [
                [len(cut["behind"]), max((need - count for *_, count, need in cut["behind"]), default=0)]
                for cut in cuts
            ],
            **{"seconds": measured},
        }
        _told(line)
        alike(found, expected)
        made = len(measured["checkpoints"]) + len(measured["moves"])
        assert made == times or (made >= 2 and WITHIN < 600), f"{made} of {times} checkpoints"
        assert len(cuts) >= made and all(cut["communicators"] for cut in cuts), cuts
    return line


def test_two_ranks_of_one_pod_go_on_bit_for_bit(cluster: DevCluster) -> None:
    goes_on(cluster, "smoke-ddp", Case(Program("ddp.py", env={"NCCL_DEBUG": "INFO"}), times=4))


@pytest.mark.parametrize("name", list(CASES))
def test_a_program_goes_on_bit_for_bit(cluster: DevCluster, name: str) -> None:
    case = CASES[name]
    if case.program.world > GPUS:
        pytest.skip(f"needs a GPU for each rank: {case.program.world}")
    goes_on(cluster, name, case)
