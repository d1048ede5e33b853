"""Scenarios with the long-lived job: it runs before and after each of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from moorage.errors import MoorageError
from tests.support.scenario import STALL, Stage

Scenario = Callable[[Stage], None]


def checkpoint(stage: Stage) -> None:
    """All nodes live, so whoever dies, a checkpoint is committed or ends in an error that says why."""
    with contextlib.suppress(MoorageError):
        stage.job.job.checkpoint()


def checkpoint_surely(stage: Stage) -> None:
    """The death of a coordinator costs no checkpoint."""
    stage.job.job.checkpoint()


def two_checkpoints(stage: Stage) -> None:
    """The second is asked for while the first is under way."""
    with stage.armed("coordinator.order.seal.before", "stall 1", "coordinator"):
        first = stage.beside(stage.job.job.checkpoint)
        stage.until_passed("coordinator.order.seal.before")
        stage.job.job.checkpoint()
        first.result()


def refused(failpoint: str, role: str = "", *, verb: str = "checkpoint") -> Scenario:
    """An attempt in which one step goes wrong on a pod: it is aborted, and the job runs on."""

    def scenario(stage: Stage) -> None:
        with stage.armed(failpoint, "error it does not work", role):
            try:
                getattr(stage.job.job, verb)()
            except MoorageError:
                return
        if verb == "park":
            stage.job.job.restore()  # whoever died took the error with it

    return scenario


def overruled(stall: str, role: str = "", *, verb: str = "checkpoint", seconds: str = STALL) -> Scenario:
    """The job is taken back to its newest checkpoint while an attempt stands in one of its steps."""

    def scenario(stage: Stage) -> None:
        if not stage.known:
            stage.job.job.checkpoint()
        with stage.armed(stall, seconds, role):
            under_way = stage.beside(getattr(stage.job.job, verb))
            stage.until_passed(stall)
            try:
                stage.job.job.restore()
            finally:
                with contextlib.suppress(MoorageError):
                    under_way.result()
        if stage.job.job.status().phase == "parked":
            stage.job.job.restore()

    return scenario


def park_and_restore(stage: Stage) -> None:
    with contextlib.suppress(MoorageError):
        stage.job.job.park()
    if stage.job.job.status().phase == "parked":
        stage.job.job.restore()


def move(stage: Stage) -> None:
    """To a pair of nodes that is another one than before."""
    nodes, here = stage.cluster.nodes, stage.job.placement()
    turn = (nodes.index(here[0]) + 1) % len(nodes)
    with contextlib.suppress(MoorageError):
        stage.job.job.move(to=[nodes[turn], nodes[(turn + 1) % len(nodes)]])
    if stage.job.job.status().phase == "parked":  # both of these nodes were given up, and no other was allowed
        stage.job.job.restore()


def restore(stage: Stage) -> None:
    """Back to the newest checkpoint, from where it runs."""
    if not stage.known:
        stage.job.job.checkpoint()
    stage.job.job.restore()


def restore_elsewhere(failpoint: str) -> Scenario:
    """A restore in which one pod fails on a node: other nodes are taken."""

    def scenario(stage: Stage) -> None:
        with stage.armed(failpoint, "error it does not work"):
            restore(stage)

    return scenario


def lose_node_while_fencing(stage: Stage) -> None:
    """A node of the new placement falls silent before anything was ordered there."""
    if not stage.known:
        stage.job.job.checkpoint()
    here = stage.job.placement()
    with stage.armed("coordinator.order.kill.before", stage.longer_than_a_lease, "coordinator"):
        under_way = stage.beside(stage.job.job.restore)
        stage.until_passed("coordinator.order.kill.before")
        stage.cluster.stop(here[1])
        try:
            under_way.result()
        finally:
            stage.cluster.start(here[1])
            stage.until_served()


def restart_coordinator(stage: Stage) -> None:
    stage.cluster.kill("coordinator")
    stage.until_all_passed()


def end_coordinator(stage: Stage) -> None:
    """As an operator would."""
    stage.cluster.restart("coordinator")
    stage.until_served()


def restart_worker(stage: Stage) -> None:
    stage.cluster.kill(stage.job.placement()[0])
    stage.until_all_passed()


def end_idle_worker(stage: Stage) -> None:
    node = stage.idle_node()
    served = stage.served(node)
    stage.cluster.restart(node)
    stage.until_served(node, served + 1)


def wait(stage: Stage) -> None:
    """Nothing is asked; leases are renewed."""
    stage.until_all_passed()


def kill_guards(stage: Stage) -> None:
    for pid in stage.guard_pids(stage.job.placement()[0]):
        os.kill(pid, signal.SIGKILL)
    stage.until_all_passed()


def blackout(stage: Stage) -> None:
    """A node without etcd, and nobody who would miss it: the pod stands still and runs again, the same one."""
    node = stage.job.placement()[0]
    stage.cluster.stop("coordinator")
    try:
        with stage.cluster.isolated(node, control_only=True):
            _until_still(stage)
        stage.moves()
    finally:
        stage.cluster.start("coordinator")
    stage.until_served()


def _until_still(stage: Stage) -> None:
    """Until the witness has seen nothing for a while."""
    witness = stage.job.live / "witness"
    size, since = -1, time.monotonic()
    deadline = time.monotonic() + 60
    while time.monotonic() - since < 1.5:
        now = witness.stat().st_size
        if now != size:
            size, since = now, time.monotonic()
        assert time.monotonic() < deadline, "the pod does not stand still"
        time.sleep(0.1)


def drain(stage: Stage) -> None:
    """One of the job's nodes is taken out of service and taken in again."""
    leaving = [stage.job.placement()[0]]
    try:
        started = stage.client.drain(leaving)
        done = stage.client.follow_drain(started.id)
        assert done.phase == "done", done
        assert leaving[0] not in stage.job.placement()
    finally:
        stage.client.uncordon(leaving)
