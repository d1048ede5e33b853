"""Unchanged programs of several ranks with NVIDIA's NCCL, checkpointed while they work, killed and restored.

Ranks that share one GPU have a different ``NCCL_HOSTID`` each, so that NCCL takes them for ranks of several hosts. Each
test prints one line of JSON, and with ``MOORAGE_GPU_RESULTS`` set writes it to ``nccl.jsonl`` there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import DevCluster
from tests.support.nccl_jobs import Program, Ranks, alike, disturb, explained, reference

pytestmark = [pytest.mark.gpu, pytest.mark.root]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=10) as cluster:
        yield cluster


def _told(line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text)
    if folder := os.environ.get("MOORAGE_GPU_RESULTS"):
        with (Path(folder) / "nccl.jsonl").open("a") as file:
            file.write(text + "\n")


def goes_on(cluster: DevCluster, name: str, program: Program, times: int) -> dict[str, Any]:
    """The line of one program: how often it was caught, and that its results are those of an undisturbed run."""
    ranks = Ranks(cluster, name, program)
    with explained(ranks):
        measured = disturb(ranks, times)
        found = ranks.end()
        cuts = ranks.cuts()
        expected = reference(program, found[0]["steps"])
        equal = [{**one, "nonce": ""} for one in found] == [{**one, "nonce": ""} for one in expected]
        line = {
            **{"program": name, "pods": program.pods, "ranks": program.world, "steps": found[0]["steps"]},
            **{"equal": equal, "nonce_survived": True, "checkpoints": len(measured["checkpoints"])},
            **{"moves": len(measured["moves"]), "unequal": sum(bool(cut["unequal"]) for cut in cuts)},
            **{"cut_seconds": [cut["seconds"] for cut in cuts], "slides": sum(cut["slides"] or 0 for cut in cuts)},
            **{"seconds": measured},
        }
        _told(line)
        alike(found, expected)
        assert program.device != "cuda" or (len(cuts) >= times and all(cut["communicators"] for cut in cuts)), cuts
    return line


def test_two_ranks_of_one_pod_go_on_bit_for_bit(cluster: DevCluster) -> None:
    goes_on(cluster, "smoke-ddp", Program("ddp.py", slow=("--uneven", "20"), env={"NCCL_DEBUG": "INFO"}), 4)
