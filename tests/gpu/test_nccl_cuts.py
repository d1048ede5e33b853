"""Programs with NVIDIA's NCCL are stopped at random instants, lose all communicators and get new ones: bit for bit.

Nothing is saved, so 2 and 4 ranks share one GPU, each a host of its own to NCCL. Each test prints one line of JSON, and
with ``MOORAGE_GPU_RESULTS`` set writes it to ``nccl_cuts.jsonl`` there.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from pathlib import Path
from statistics import median

import pytest

from tests.support.nccl_cuts import cut_again_and_again, proxied
from tests.support.nccl_jobs import Program, alike

pytestmark = [pytest.mark.gpu]

TIMES = 20
PINNED = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "2"}
CASES = {
    "ddp": Program("ddp.py"),
    "patterns": Program("patterns.py"),
    "ctypes": Program("with_ctypes.py"),
    "fsdp": Program("fsdp.py"),
    "tensor-parallel": Program("tensor_parallel.py"),
    "patterns-four-ranks": Program("patterns.py", per_pod=4, env=PINNED),
    "ctypes-four-ranks": Program("with_ctypes.py", per_pod=4, env=PINNED),
    "ddp-four-ranks": Program("ddp.py", per_pod=4, env=PINNED),
}


@pytest.mark.parametrize("name", list(CASES))
def test_new_communicators_take_the_place_of_the_old_ones(name: str) -> None:
    program = CASES[name]
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as folder:  # a socket's path must be short
        found, expected, cuts = asyncio.run(cut_again_and_again(program, Path(folder), proxied(), TIMES))
    equal = [{**one, "nonce": ""} for one in found] == [{**one, "nonce": ""} for one in expected]
    line = {
        **{"program": name, "ranks": program.world, "steps": found[0]["steps"], "equal": equal, "cuts": len(cuts)},
        **{"unequal": sum(cut["unequal"] for cut in cuts), "slides": sum(cut["slides"] for cut in cuts)},
        **{"again": sum(cut["again"] for cut in cuts), "communicators": max(cut["communicators"] for cut in cuts)},
        # Median and worst, in seconds.
        **{
            what: [round(median(cut[what] for cut in cuts), 4), max(cut[what] for cut in cuts)]
            for what in ("drained", "destroyed", "running")
        },
        "pinned": sorted(program.env),
    }
    print(json.dumps(line))
    if results := os.environ.get("MOORAGE_GPU_RESULTS"):
        with (Path(results) / "nccl_cuts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    alike(found, expected)
    assert all(cut["communicators"] for cut in cuts)
