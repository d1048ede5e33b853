"""Whoever dies while a pod's GPU is saved or brought back: the job runs on, or is restored, and ends bit for bit."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import MoorageError
from tests.support.cluster import DevCluster
from tests.support.gpu_jobs import Watched, environment, explained, last_json, python, reference

pytestmark = [pytest.mark.gpu, pytest.mark.root]

STEPS = ("precopy", "quiesce", "capture", "back", "fill")
COMMAND = python("with_cupy.py", "900")


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    found = reference(COMMAND, {})
    del found["nonce"]
    return found


def _broker(cluster: DevCluster) -> list[int]:
    """The GPU brokers of the cluster's nodes."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if b"moorage.worker.gpu\0" in words and os.fsencode(cluster.folder) in words:
                found.append(int(entry.name))
    return found


def _job_with(cluster: DevCluster, name: str, expected: dict[str, object], hurt: str) -> None:
    client = cluster.client()
    job = client.run(COMMAND, name=name, gpus_per_pod=1, env=environment({}), on_failure="restore", max_restarts=5)
    seen: list[Watched] = []
    with explained(cluster, name, seen):
        watched = Watched(client, name)
        seen.append(watched)
        watched.wait_for_steps(2)
        job.checkpoint()
        if hurt == "broker":
            for pid in _broker(cluster):
                os.kill(pid, signal.SIGKILL)
        elif hurt == "broker in the pause":
            _kill_when_evicted(cluster)
        else:
            cluster.arm(hurt)
        with contextlib.suppress(MoorageError):  # that it fails is allowed; that the job ends wrong is not
            job.checkpoint()
        with contextlib.suppress(MoorageError):
            here = job.status().pods[0].node
            job.move(to=["node-1" if here == "node-2" else "node-2"])
        if job.status().phase == "parked":
            job.restore()
        ended = job.wait(timeout=300)
        watched.end()
        assert ended.exit_code == 0
        result = last_json(watched.lines)
        result.pop("nonce")
        assert result == expected


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_worker_that_dies_at_a_step_loses_nothing(
    cluster: DevCluster, expected: dict[str, object], step: str, side: str
) -> None:
    _job_with(cluster, f"{step}-{side}", expected, f"worker.gpu.{step}.{side}")


def _kill_when_evicted(cluster: DevCluster) -> None:
    """In the background: brokers die when the pod's socket is gone: from then on its memory is theirs alone."""

    def watch() -> None:
        end = time.monotonic() + 60
        while list((cluster.folder / "state" / "nodes").glob("*/pods/*/*/*/gpu/gpu.sock")):
            if time.monotonic() > end:
                return
            time.sleep(0.001)
        for pid in _broker(cluster):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def test_a_broker_that_is_killed_while_it_alone_has_the_memory_loses_nothing(
    cluster: DevCluster, expected: dict[str, object]
) -> None:
    _job_with(cluster, "broker-pause", expected, "broker in the pause")


def test_a_broker_that_is_killed_loses_nothing(cluster: DevCluster, expected: dict[str, object]) -> None:
    _job_with(cluster, "broker", expected, "broker")
