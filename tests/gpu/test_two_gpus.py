"""Jobs on two GPUs, NCCL with its fast transports: restored with the GPUs exchanged, side by side, and apart.

The nodes are all of one machine: ``node-1`` gives out its two GPUs in bus order and ``node-2`` the other way round, so
whoever moves from one to the other has them exchanged; ``node-3`` and ``node-4`` have one each, the others are for the
CUDA programs, which run side by side. Each test has a number of seconds, after which it fails. With
``MOORAGE_GPU_RESULTS`` set each writes one line of JSON to ``two_gpus.jsonl`` there.

Only one job of several ranks may run at a time: after a driver restore, driver 580 does not switch from a kernel that
waits for another rank to another process's work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from moorage.worker import gpu_host
from tests.support.cluster import DevCluster
from tests.support.gpu_jobs import PROGRAMS, disturbed
from tests.support.gpu_jobs import reference as alone
from tests.support.nccl_jobs import Program, Ranks, alike, disturb, explained, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.root,
    pytest.mark.skipif(len(gpu_host.information()) < 2, reason="needs two GPUs"),
]

BOTH, EXCHANGED = ["0", "1"], ["1", "0"]
NODES = [BOTH, EXCHANGED, ["0"], ["1"], BOTH, EXCHANGED, BOTH, EXCHANGED]
CUDA = ("peer", "peer_copy", "ipc_two")
#: Where jobs go back and forth.
_pair = ["node-1", "node-2"]
#: The transports are said at INFO.
LOUD = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=len(NODES), gpus=NODES, lease_seconds=10) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def built() -> Iterator[dict[str, Path]]:
    """The CUDA C++ programs."""
    folder = Path(tempfile.mkdtemp(prefix="moorage-cuda-", dir="/var/tmp"))
    folder.chmod(0o755)

    def build(name: str) -> Path:
        source = PROGRAMS / "two" / f"{name}.cu"
        command = ["nvcc", "-std=c++17", "-O2", "-arch=native", "-diag-suppress=177", str(source)]
        command += ["-o", str(folder / name)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / name

    with ThreadPoolExecutor(len(CUDA)) as pool:
        yield dict(zip(CUDA, pool.map(build, CUDA), strict=True))
    shutil.rmtree(folder)


class OutOfTimeError(Exception):
    """The test's seconds are over."""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Whatever blocks is broken off then: the machine is there for minutes only."""

    def over(*_: object) -> None:
        raise OutOfTimeError(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def told(line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if folder := os.environ.get("MOORAGE_GPU_RESULTS"):
        with (Path(folder) / "two_gpus.jsonl").open("a") as file:
            file.write(text + "\n")


@contextlib.contextmanager
def ended(ranks: Ranks) -> Iterator[None]:
    """Nothing of the job runs afterwards: the next one needs the GPUs for itself."""
    try:
        with explained(ranks):
            yield
    except BaseException as error:
        told({"program": ranks.name, "failed": f"{type(error).__name__}: {error}"[-600:], "steps": ranks.steps()})
        _pair[1] = "node-5"  # the next one tries without an exchange: what else works is worth knowing
        with contextlib.suppress(Exception), within(20):
            ranks.job.stop(grace=0.5)
        raise


def transports(ranks: Ranks) -> list[str]:
    """What NCCL said of how it reaches the other rank."""
    said = [line for line in ranks.lines(0) if "NCCL INFO" in line and " via " in line]
    return sorted({line.rpartition(" via ")[2].split()[0] for line in said})


def goes_on(cluster: DevCluster, name: str, program: Program, times: int = 10, seconds: float = 120.0) -> None:
    began = time.monotonic()
    ranks = Ranks(cluster, name, program, nodes=_pair)
    line: dict[str, Any] = {"program": name, "ranks": program.world, "gpus": 2, "nodes": list(_pair)}
    with ended(ranks):
        line["seconds"] = disturb(ranks, times, places=[[_pair[1]], [_pair[0]]], within=seconds)
        found = ranks.end()
        cuts = ranks.cuts()
        line |= {"steps": found[0]["steps"], "transports": transports(ranks), "job_seconds": time.monotonic() - began}
        expected = reference(program, found[0]["steps"], 60.0)
    line["equal"] = [{**one, "nonce": ""} for one in found] == [{**one, "nonce": ""} for one in expected]
    line["checkpoints"], line["moves"] = len(line["seconds"]["checkpoints"]), len(line["seconds"]["moves"])
    line["unequal"] = sum(bool(cut["unequal"]) for cut in cuts)
    line["cut_seconds"] = [cut["seconds"] for cut in cuts]
    told(line | {"test_seconds": time.monotonic() - began})
    alike(found, expected)
    assert line["transports"], "NCCL did not say how it reaches the other GPU"
    assert not any(way.startswith("NET") for way in line["transports"]), line["transports"]
    assert line["checkpoints"] + line["moves"] == times, "there was no time for all of them"


def test_data_parallel_training_goes_on_with_the_gpus_exchanged(cluster: DevCluster) -> None:
    with within(200):
        goes_on(cluster, "ddp", Program("ddp.py", env=LOUD))


def test_tensor_parallel_inference_goes_on_with_the_gpus_exchanged(cluster: DevCluster) -> None:
    with within(200):
        goes_on(cluster, "tensor-parallel", Program("tensor_parallel.py", env=LOUD))


def test_memory_shared_between_gpus_goes_on_with_the_gpus_exchanged(
    cluster: DevCluster, built: dict[str, Path]
) -> None:
    """Peer access and copies in one process, CUDA IPC between two; these do not wait for each other on a GPU."""
    pairs = [("node-1", "node-2"), ("node-5", "node-6"), ("node-7", "node-8")]

    def one(name: str, nodes: tuple[str, str]) -> dict[str, Any]:
        line: dict[str, Any] = {"program": name, "gpus": 2}
        try:
            command = [str(built[name]), "500"]
            expected = alone(command, {})
            result = disturbed(cluster, name.replace("_", "-"), command, {}, moves=2, gpus=2, nodes=nodes)
            line |= result.pop("moorage")
            nonces = {expected.pop("nonce"), result.pop("nonce")}
            line["equal"] = len(nonces) == 2 and result == expected
        except BaseException as error:
            line |= {"equal": False, "error": str(error)[-600:]}
        told(line)
        return line

    lines: list[dict[str, Any]] = []
    work = [
        threading.Thread(target=lambda n=name, p=pair: lines.append(one(n, p)), daemon=True)
        for name, pair in zip(CUDA, pairs, strict=True)
    ]
    until = time.monotonic() + 75
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(max(0.0, until - time.monotonic()))
    assert [line for line in lines if not line["equal"]] == []
    assert len(lines) == len(CUDA), "there was no time for all of them"


def test_pods_of_one_gpu_come_back_side_by_side_and_apart_again(cluster: DevCluster) -> None:
    began = time.monotonic()
    program = Program("ddp.py", pods=2, per_pod=1, env=LOUD)
    with within(100):
        ranks = Ranks(cluster, "pods", program, nodes=["node-1", "node-2", "node-3", "node-4"])
        line: dict[str, Any] = {"program": "pods", "gpus": 2, "places": []}
        with ended(ranks):
            for nodes in (["node-1"], ["node-4", "node-3"], ["node-2"]):
                ranks.moves(8, 60.0)
                line["places"].append([pod.node for pod in ranks.job.status().pods])
                ranks.job.move(to=nodes)
            ranks.moves(8)
            line["places"].append([pod.node for pod in ranks.job.status().pods])
            found = ranks.end()
            line |= {"steps": found[0]["steps"], "transports": transports(ranks)}
            expected = reference(program, found[0]["steps"], 60.0)
        line["equal"] = [{**one, "nonce": ""} for one in found] == [{**one, "nonce": ""} for one in expected]
        told(line | {"test_seconds": time.monotonic() - began})
        alike(found, expected)


def test_fully_sharded_training_goes_on_with_the_gpus_exchanged(cluster: DevCluster) -> None:
    with within(200):
        goes_on(cluster, "fsdp", Program("fsdp.py", env=LOUD))
