"""Runs lanes of the kill matrix, each on a cluster of its own, side by side."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Sequence

from moorage.errors import MoorageError
from tests.support.cluster import DevCluster
from tests.support.faults import IDLE, NODE, SILENCE, Case
from tests.support.scenario import PATIENCE, Stage

#: A process that dies is started again within its lease, however busy the machine is. Where leases are to run out,
#: scenarios wait for that, so there it is short.
LEASE_SECONDS = 60
SHORT_LEASE_SECONDS = 8
_MOST_FAILURES = 3


def role_of(stage: Stage, case: Case) -> str:
    """The failpoint role that ``case.role`` stands for now."""
    if case.role == NODE:
        return stage.job.placement()[0]
    return stage.idle_node() if case.role == IDLE else case.role


def run_case(stage: Stage, case: Case) -> None:
    """Kill at each of the case's failpoints, and judge. Raises AssertionError."""
    role = role_of(stage, case)
    for kill in case.kills:
        stage.cluster.arm(kill, role=role)
    try:
        for _ in range(case.tries):
            case.scenario(stage)
            if not stage.cluster.armed():
                break
        assert not stage.cluster.armed(), f"never reached: {stage.cluster.armed()}"
    finally:
        stage.cluster.disarm()
    stage.judge(restored=case.restored)


def run_lane(name: str, cases: Sequence[Case], broken_off: threading.Event) -> list[str]:
    """All cases of a lane, one after another; returns what went wrong, one text for each case. Ends before the next
    case when the test run was broken off."""
    failures: list[str] = []
    began = time.monotonic()
    short = any(case in SILENCE for case in cases)
    lease = SHORT_LEASE_SECONDS if short else LEASE_SECONDS
    with DevCluster(nodes=3, lease_seconds=lease, client_patience=PATIENCE) as cluster:
        stage = Stage(cluster)
        for case in cases:
            if broken_off.is_set():
                return [*failures, f"{name}: broken off"]
            start = time.monotonic()
            try:
                run_case(stage, case)
            except Exception:
                failures.append(f"{name}: {case.label}\n{traceback.format_exc()}\n" + "\n".join(_told(stage)))
                if len(failures) >= _MOST_FAILURES:
                    return [*failures, f"{name}: given up"]
                stage.until_served()
                with contextlib.suppress(MoorageError):
                    stage.job.job.stop(grace=0)
                stage.begin()
            if os.environ.get("MOORAGE_TEST_TIMES"):
                took, at = time.monotonic() - start, time.monotonic() - began
                print(f"{at:6.1f} {took:5.1f} s  {name}: {case.label}", flush=True)
        try:
            stage.finish()
        except Exception:
            failures.append(f"{name}: at the end\n{traceback.format_exc()}\n" + "\n".join(_told(stage)))
    return failures


def _told(stage: Stage) -> list[str]:
    """What the cluster says of itself, for a failure's message."""
    try:
        return [f"  {sentence}" for sentence in stage.story()[-15:]]
    except Exception as error:
        return [f"  the coordinator does not answer: {error}"]
