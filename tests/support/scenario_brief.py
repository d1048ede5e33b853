"""Scenarios that end jobs: each brings a job of its own and sees it to its end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moorage.errors import MoorageError, NotFound
from tests.support.judge import incarnations_overlap
from tests.support.pingpong_job import PingPong
from tests.support.scenario import PATIENCE, STALL, Stage

Scenario = Callable[[Stage], None]
ORDER = "coordinator.order.{}.before"


@contextlib.contextmanager
def brief(stage: Stage, *, pods: int = 1, saved: bool = False, **options: Any) -> Iterator[PingPong]:
    """A job that runs (``saved``: with one checkpoint) within the block. Judged and gone after it."""
    job = PingPong(stage.cluster, pods=pods, steps=1_000_000, delay=0.02, **options)
    job.until_step(2)
    first: str = job.job.checkpoint().id if saved else ""
    yield job
    if not job.job.status().over:
        job.end()
    info = job.job.wait(timeout=PATIENCE)
    verdict = job.verdict()
    assert verdict.sound, verdict.faults
    assert not incarnations_overlap(job.lines())
    if saved:
        assert all(len(nonces) == 1 for nonces in verdict.nonces.values()), "started from nothing"
        stage.check(first)
    if info.phase == "finished" and all(len(nonces) == 1 for nonces in verdict.nonces.values()):
        job.assert_right()


def finish(stage: Stage) -> None:
    """A short job from its submission to its end."""
    job = PingPong(stage.cluster, pods=1, steps=20)
    info = job.assert_right()
    assert info.exit_code == 0


def start(stage: Stage) -> None:
    """The same, when a pod may be lost at its start."""
    PingPong(stage.cluster, pods=1, steps=20).assert_right(anew=True)


def fail(stage: Stage) -> None:
    """A rank fails, and the owner wants no restore."""
    with brief(stage, on_failure="fail") as job:
        stage.fail_rank(job)
        info = job.job.wait(timeout=PATIENCE)
        assert (info.phase, info.exit_code) == ("failed", 137), info


def fail_under(verb: str) -> Scenario:
    """The same in the middle of an attempt."""

    def scenario(stage: Stage) -> None:
        with brief(stage, on_failure="fail") as job, stage.armed(ORDER.format("prepare"), STALL, "coordinator"):
            under_way = stage.beside(getattr(job.job, verb))
            stage.until_passed(ORDER.format("prepare"))
            stage.fail_rank(job)
            assert job.job.wait(timeout=PATIENCE).phase == "failed"
            with contextlib.suppress(MoorageError):
                under_way.result()

    return scenario


def lost_before_first_checkpoint(stage: Stage) -> None:
    """A pod is lost, and there is no checkpoint yet: the job begins again."""
    with brief(stage) as job:
        stage.lose_pod(job)
        job.job.until(lambda info: info.incarnation > 1 and info.phase == "running", timeout=PATIENCE)


def lost_under(verb: str) -> Scenario:
    """The same in the middle of the first attempt."""

    def scenario(stage: Stage) -> None:
        with brief(stage) as job, stage.armed(ORDER.format("prepare"), STALL, "coordinator"):
            under_way = stage.beside(getattr(job.job, verb))
            stage.until_passed(ORDER.format("prepare"))
            stage.lose_pod(job)
            job.job.until(lambda info: info.incarnation > 1, timeout=PATIENCE)
            with contextlib.suppress(MoorageError):
                under_way.result()
            if job.job.status().phase == "parked":
                job.job.restore()

    return scenario


def no_such_command(stage: Stage) -> None:
    """A job that cannot start anywhere."""
    job = stage.client.run(["/no/such/command"], working_directory=str(stage.cluster.folder))
    assert job.wait(timeout=PATIENCE).phase == "failed"


def stop(stage: Stage) -> None:
    with brief(stage) as job:
        assert job.job.stop(grace=0).phase == "stopped"


def stop_with_checkpoint(stage: Stage) -> None:
    with brief(stage) as job:
        assert job.job.stop(checkpoint=True).phase == "stopped"


def stop_pending(stage: Stage) -> None:
    """A job that has no place yet."""
    with stage.armed("coordinator.counter.vni.before", STALL, "coordinator"):
        job = stage.client.run(["true"], working_directory="/tmp")
        stage.until_passed("coordinator.counter.vni.before")
        assert job.stop(grace=0).phase == "stopped"


def stop_starting(stage: Stage) -> None:
    with stage.armed(ORDER.format("start"), STALL, "coordinator"):
        job = stage.client.run(["sleep", "1000"], working_directory="/tmp")
        stage.until_passed(ORDER.format("start"))
        assert job.stop(grace=0).phase == "stopped"


def stop_under(verb: str, order: str, role: str = "coordinator", stall: str = STALL) -> Scenario:
    """The job is stopped in the middle of an attempt. ``order``: the failpoint at which it stands then."""

    def scenario(stage: Stage) -> None:
        with brief(stage) as job, stage.armed(order, stall, role):
            under_way = stage.beside(getattr(job.job, verb))
            stage.until_passed(order)
            assert job.job.stop(grace=0).phase == "stopped"
            with contextlib.suppress(MoorageError):
                under_way.result()

    return scenario


def stop_restoring(stage: Stage) -> None:
    with brief(stage, saved=True) as job:
        job.job.park()
        with stage.armed(ORDER.format("restore"), STALL, "coordinator"):
            under_way = stage.beside(job.job.restore)
            stage.until_passed(ORDER.format("restore"))
            assert job.job.stop(grace=0).phase == "stopped"
            with contextlib.suppress(MoorageError):
                under_way.result()


def stop_parked(stage: Stage) -> None:
    with brief(stage, saved=True) as job:
        job.job.park()
        assert job.job.stop().phase == "stopped"


def lose_node_at_the_end(stage: Stage) -> None:
    """The node falls silent when the job has finished and its logs are still there."""
    node = stage.idle_node()
    with (
        brief(stage, nodes=[node]) as job,
        stage.armed(ORDER.format("finish"), stage.longer_than_a_lease, "coordinator"),
    ):
        job.end(2)
        stage.until_passed(ORDER.format("finish"))
        stage.cluster.stop(node)
        try:
            info = job.job.wait(timeout=PATIENCE)
            assert info.phase == "finished"
        finally:
            stage.cluster.start(node)
            stage.until_served()
        job.pods = 0  # its output went with the node


def back_from(over: str) -> Scenario:
    """A job that is over is brought back from its checkpoint."""

    def scenario(stage: Stage) -> None:
        with brief(stage, saved=True, on_failure="fail") as job:
            if over == "stopped":
                job.job.stop(grace=0)
            elif over == "failed":
                stage.fail_rank(job)
            else:
                job.end(60)
            assert job.job.wait(timeout=PATIENCE).phase == over
            for result in job.work.iterdir():  # else what the first end wrote back stands in the second's way
                result.unlink()
            job.job.restore()

    return scenario


def cold_start(stage: Stage) -> None:
    """No node fits the checkpoint, and the owner prefers a start from nothing to none."""
    job = PingPong(stage.cluster, pods=1, steps=1_000_000, if_incompatible="cold-start")
    job.until_step(2)
    job.job.park()
    node = stage.cluster.nodes[0]
    with stage.armed("worker.restore.rebuild.before", "error Incompatible: another processor"):
        job.job.restore(on=[node])
    job.end()
    assert job.job.wait(timeout=PATIENCE).phase == "finished"


def hopeless_restore(stage: Stage) -> None:
    """A checkpoint that no node can read: the job is parked again."""
    with brief(stage, saved=True) as job:
        job.job.park()
        with (
            stage.armed("worker.restore.fetch.before", "error CorruptData: it is damaged"),
            contextlib.suppress(MoorageError),
        ):
            job.job.restore()
        if job.job.status().phase == "parked":
            job.job.restore()


def restore_without_nodes(stage: Stage) -> None:
    """The node that was asked for is lost before anything is placed there: the job stays parked."""
    node = stage.idle_node()
    with brief(stage, saved=True) as job:
        job.job.park()
        with stage.armed("job.bringup.none-placing.after", stage.longer_than_a_lease, "coordinator"):
            under_way = stage.beside(lambda: job.job.restore(on=[node]))
            stage.until_passed("job.bringup.none-placing.after")
            stage.cluster.stop(node)
            try:
                with contextlib.suppress(MoorageError):
                    under_way.result()
            finally:
                stage.cluster.start(node)
                stage.until_served()
        if job.job.status().phase == "parked":
            job.job.restore()


def late_outcome(stage: Stage) -> None:
    """No coordinator for the whole time of an attempt: a worker ends it, and the pods run."""
    with brief(stage, pods=2, saved=True, attempt_deadline=3.0) as job:
        with stage.armed(ORDER.format("seal"), STALL, "coordinator"):
            under_way = stage.beside(job.job.checkpoint)
            stage.until_passed(ORDER.format("seal"))
            stage.cluster.stop("coordinator")
            try:
                stage.moves(job=job)
            finally:
                stage.cluster.start("coordinator")
            with contextlib.suppress(MoorageError):
                under_way.result()
        info = job.job.status()
        assert (info.phase, info.incarnation) == ("running", 1), info


def forget_and_prune(stage: Stage) -> None:
    """Old checkpoints are forgotten, what they alone needed is condemned, then deleted; the newest stays whole."""
    with brief(stage, keep_last=1) as job:
        for _ in range(3):
            job.job.checkpoint()
        stage.moves(10, job)
        job.job.checkpoint()
        for _ in range(8):
            _age(Path(stage.cluster.record.folder) / "store")
            stage.client.prune()
            if not stage.cluster.armed():
                break
        for checkpoint in stage.client.checkpoints(job.job.id):
            stage.check(checkpoint.id, read_data=True)
        job.job.restore()


def delete(stage: Stage) -> None:
    """A job that has ended is deleted: all of it is gone, and the checkpoints of others are not."""
    with brief(stage, saved=True) as job:
        pass
    job.job.delete()
    with contextlib.suppress(NotFound):
        raise AssertionError(f"{job.job.status()} is still there")
    assert not [one for one in stage.client.checkpoints() if one.job == job.job.id]
    store = Path(stage.cluster.record.folder) / "store"
    assert not [path for path in (store / "objects" / "logs" / job.job.id).rglob("*") if path.is_file()]


def _age(store: Path) -> None:
    """Let everything in the store look as if it had been written an hour ago."""
    past = time.time() - 3600
    for path in store.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (past, past))


def pin(stage: Stage) -> None:
    if not stage.known:
        stage.job.job.checkpoint()
    name = stage.client.checkpoints(stage.job.job.id)[0].id
    assert stage.client.pin(name).pinned
    assert not stage.client.pin(name, unpin=True).pinned
