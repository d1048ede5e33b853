"""The coordinator on a real etcd and a real store, with fake workers: whole lives of jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.errors import Conflict, NoCapacity, NotFound, UsageError
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2, worker_pb2
from tests.support.etcd import Etcd
from tests.support.fake_cluster import FakeCluster

pytestmark = pytest.mark.root

Story = Callable[[FakeCluster], Awaitable[None]]


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


@pytest.fixture
def tell(etcd: Etcd, tmp_path: Path) -> Callable[..., None]:
    """Run a story in a fresh cluster."""

    def run(story: Story, **options: Any) -> None:
        async def go() -> None:
            async with FakeCluster(etcd, tmp_path, **options) as cluster:
                await story(cluster)

        asyncio.run(go())

    return run


def _kinds(events: list[pb.JobEvent], *wanted: str) -> list[str]:
    return [event.kind for event in events if event.kind in wanted]


def test_a_job_runs_is_saved_loses_a_node_is_restored_and_finishes(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        assert running.incarnation == 1
        assert len({pod.node for pod in running.pods}) == 2
        saved = await cluster.checkpoint(job)
        assert saved.phase == "committed", saved
        assert saved.pause_seconds == 0.25
        counted = cluster.pod(job, 1).captured

        await cluster.nodes[running.pods[0].node].destroy()
        restored = await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
        assert restored.restarts == 1
        assert restored.last_restore_seconds > 0
        assert running.pods[0].node not in {pod.node for pod in restored.pods}
        assert cluster.pod(job, 1).counter >= counted > 0
        assert cluster.pod(job, 0).vni == cluster.pod(job, 1).vni

        for number in (0, 1):
            cluster.pod(job, number).exit(0)
        over = await cluster.until(job, "finished")
        assert over.has_exit_code
        assert over.exit_code == 0
        wanted = ["job.submitted", "checkpoint.committed", "node.lost", "restore.done", "job.finished"]
        assert _kinds(await cluster.events(job), *wanted) == wanted
        assert not cluster.pods()

    tell(story, nodes=3)


def test_the_next_coordinator_goes_on_from_etcd_alone(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        await cluster.stop_coordinator("c1")
        await cluster.start_coordinator("c2")
        assert (await cluster.checkpoint(job)).phase == "committed"
        await cluster.stop_coordinator("c2")
        for number in (0, 1):
            cluster.pod(job, number).exit(0)  # nobody sees it
        await cluster.start_coordinator("c3")
        assert (await cluster.until(job, "finished")).exit_code == 0

    tell(story)


def test_a_node_lost_while_no_coordinator_runs_is_noticed_by_the_next_one(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        await cluster.checkpoint(job)
        await cluster.stop_coordinator("c1")
        await cluster.nodes[running.pods[1].node].destroy()
        await cluster.start_coordinator("c2")
        await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)

    tell(story)


def test_a_stale_leader_writes_and_orders_nothing_any_more(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        stale = cluster.coordinators["c1"][0].service.leader
        assert stale is not None
        await cluster.start_coordinator("c2")
        # The leader key vanishes under the leader, as when its lease has run out while it was stopped.
        client = cluster.etcd.client()
        await client.delete(stale.leadership.key)
        await client.close()
        await cluster.until(job, "running")
        assert (await cluster.checkpoint(job)).phase == "committed"
        assert not stale.leading

    tell(story)


def test_a_follower_names_the_leader(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        await cluster.start_coordinator("c2")
        status = await cluster.call("Status", pb.StatusRequest())
        assert (status.cluster, status.leader) == (cluster.name, "c1")
        follower = cluster.coordinators["c2"][0].service
        await cluster.poll(lambda: bool(follower.leader_address))
        with pytest.raises(Exception, match="the leader is c1"):
            follower._leading()

    tell(story, nodes=0)


def test_a_parked_job_holds_nothing_and_comes_back_where_it_is_told(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        with pytest.raises(UsageError, match="cannot be kept on 'disk'"):
            await cluster.call("Park", pb.JobRequest(job=job, keep="disk"))
        reply = await cluster.call("Park", pb.JobRequest(job=job, keep="host"))
        assert (await cluster.attempt(job, reply.attempt)).phase == "committed"
        await cluster.until(job, "parked")
        assert {keep for node in cluster.nodes.values() for keep in node.keeps} == {"host"}
        assert not cluster.pods()
        saved = [c.id for c in (await cluster.call("ListCheckpoints", pb.ListCheckpointsRequest(job=job))).checkpoints]
        assert saved == [f"{job}-0001"]
        await cluster.call("Restore", pb.RestoreRequest(job=job, nodes=["n2"]))
        back = await cluster.until(job, "running")
        assert {pod.node for pod in back.pods} == {"n2"}
        with pytest.raises(NotFound, match="n9"):
            await cluster.call("Restore", pb.RestoreRequest(job=job, checkpoint=f"{job}-0001", nodes=["n9"]))
        assert (await cluster.job(job)).phase == "running"

    tell(story)


def test_a_job_is_moved_onto_one_node_and_back(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        for nodes in (["n1"], ["n0", "n2"]):
            before = (await cluster.job(job)).incarnation
            await cluster.call("Move", pb.MoveRequest(job=job, nodes=nodes))
            moved = await cluster.until(job, lambda j: j.phase == "running" and j.incarnation > before)  # noqa: B023
            assert sorted({pod.node for pod in moved.pods}) == nodes
        assert moved.restarts == 0

    tell(story)


def test_a_job_is_stopped_and_its_pods_are_gone(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        await cluster.call("Stop", pb.StopRequest(job=job, grace_seconds=1))
        over = await cluster.until(job, "stopped")
        assert over.over
        assert not cluster.pods()
        again = await cluster.call("Stop", pb.StopRequest(job=job))
        assert again.phase == "stopped"
        with pytest.raises(Conflict, match="has no checkpoint"):
            await cluster.call("Restore", pb.RestoreRequest(job=job))

    tell(story)


def test_a_job_on_a_lost_node_is_stopped_only_when_its_lease_has_run_out(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", on_failure=types_pb2.ON_FAILURE_FAIL)).id
        running = await cluster.until(job, "running")
        lost = cluster.nodes[running.pods[0].node]
        await lost.cut()
        over = await cluster.until(job, "failed")
        assert not over.has_exit_code
        assert lost.name in over.reason
        assert len(cluster.pods()) == 1
        await lost.heal()
        assert not cluster.pods(), "the guard kills what is no longer the job's"

    tell(story)


def test_a_node_that_was_cut_off_has_its_pods_killed_when_it_returns(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        await cluster.checkpoint(job)
        lost = cluster.nodes[running.pods[0].node]
        await lost.cut()
        await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
        await lost.heal()
        assert cluster.incarnations_that_run(job) == {2}

    tell(story)


def test_what_cannot_be_saved_is_named_and_the_job_runs_on(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        for node in cluster.nodes.values():
            node.refusals = [worker_pb2.Refusal(what="pid 7, fd 3", why="a raw device", cure="close it")]
        refused = await cluster.checkpoint(job)
        assert refused.phase == "aborted"
        assert refused.error_kind == "Refused"
        assert len(refused.refusals) == 2
        assert "pid 7, fd 3" in refused.reason
        for node in cluster.nodes.values():
            node.refusals = []
        assert (await cluster.checkpoint(job)).phase == "committed"
        assert (await cluster.job(job)).incarnation == 1

    tell(story)


def test_an_attempt_that_a_worker_aborts_leaves_the_job_running(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", attempt_deadline_seconds=0.6)).id
        await cluster.until(job, "running")
        stuck = asyncio.Event()

        async def before(order: str, pod: int) -> None:
            if order == "capture" and pod == 1:
                await stuck.wait()

        for node in cluster.nodes.values():
            node.before = before
        aborted = await cluster.checkpoint(job)
        assert aborted.phase == "aborted"
        stuck.set()
        assert cluster.incarnations_that_run(job) == {1}
        assert (await cluster.checkpoint(job)).phase == "committed"

    tell(story)


def test_a_rank_that_fails_takes_the_job_back_to_its_checkpoint(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", max_restarts=1)).id
        await cluster.until(job, "running")
        await cluster.checkpoint(job)
        cluster.pod(job, 1).exit(3)
        await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
        cluster.pod(job, 0).exit(4)
        over = await cluster.until(job, "failed")
        assert over.exit_code == 4
        assert "restarts are used up" in over.reason

    tell(story)


def test_a_script_that_dies_at_start_fails_the_job_with_its_code(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        cluster.pod(job, 0).exit(2)
        over = await cluster.until(job, "failed")
        assert over.exit_code == 2
        assert not cluster.pods()

    tell(story)


def test_a_pod_that_cannot_be_started_on_a_node_is_started_elsewhere(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        async def before(order: str, pod: int) -> None:
            if order == "start":
                raise NoCapacity("the disk is full")

        cluster.nodes["n0"].before = before
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        assert {pod.node for pod in running.pods} == {"n1", "n2"}

    tell(story)


def test_a_restore_that_works_nowhere_parks_the_job_with_its_checkpoint(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        await cluster.checkpoint(job)

        async def before(order: str, pod: int) -> None:
            if order == "restore":
                raise NoCapacity("the disk is full")

        for node in cluster.nodes.values():
            node.before = before
        cluster.pod(job, 1).exit(1)
        parked = await cluster.until(job, "parked")
        assert "the disk is full" in parked.reason
        assert parked.latest_checkpoint == f"{job}-0001"
        assert not cluster.pods()
        for node in cluster.nodes.values():
            node.before = None
        await cluster.call("Restore", pb.RestoreRequest(job=job))
        await cluster.until(job, "running")

    tell(story)


def test_a_lost_pod_is_noticed_when_its_worker_comes_back_without_it(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        await cluster.checkpoint(job)
        node = cluster.nodes[running.pods[0].node]
        node._remove(cluster.pod(job, 0))
        await node.server.stop(0)
        await node.connect()
        await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)

    tell(story)


def test_a_job_in_which_nothing_moves_is_taken_back(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", hang_seconds=0.8)).id
        await cluster.until(job, "running")
        await cluster.checkpoint(job)
        for number in (0, 1):
            pod = cluster.pod(job, number)
            pod.work = lambda: None  # type: ignore[method-assign]
        back = await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
        assert back.restarts == 1
        assert "job.hung" in {event.kind for event in await cluster.events(job)}

    tell(story)


def test_the_heartbeat_saves_by_itself_and_old_checkpoints_are_forgotten(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", checkpoint_every_seconds=0.1, keep_last=2)).id
        await cluster.until(job, lambda j: j.attempt > 4)
        await cluster.call("Stop", pb.StopRequest(job=job))
        await cluster.until(job, "stopped")

        async def kept() -> list[int]:
            reply = await cluster.call("ListCheckpoints", pb.ListCheckpointsRequest(job=job))
            return [checkpoint.attempt for checkpoint in reply.checkpoints]

        async def few() -> bool:
            return len(await kept()) == 2

        await cluster.poll(few)
        found = await kept()
        assert found[1] == found[0] + 1

    tell(story)


def test_a_name_that_is_taken(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        first = await cluster.submit("train")
        await cluster.until(first.id, "running")
        with pytest.raises(Conflict, match="job train exists and is running"):
            await cluster.submit("train")
        assert (await cluster.submit("train", if_exists=types_pb2.IF_EXISTS_RESUME)).id == first.id
        second = await cluster.submit("train", if_exists=types_pb2.IF_EXISTS_REPLACE)
        assert second.id != first.id
        assert (await cluster.job(first.id)).phase == "stopped"
        assert (await cluster.job("train")).id == second.id
        await cluster.until(second.id, "running")
        await cluster.call("Park", pb.JobRequest(job=second.id))
        await cluster.until(second.id, "parked")
        assert (await cluster.submit("train", if_exists=types_pb2.IF_EXISTS_RESUME)).id == second.id
        await cluster.until(second.id, "running")
        await cluster.call("Stop", pb.StopRequest(job="train"))
        await cluster.until(second.id, "stopped")
        third = await cluster.submit("train")
        assert third.id not in (first.id, second.id)

    tell(story)


def test_the_same_request_again_is_the_same_job_and_the_same_attempt(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        request = pb.SubmitRequest(spec=types_pb2.JobSpec(pods=1, command=["x"]), request_id="one")
        job = (await cluster.call("Submit", request)).id
        assert (await cluster.call("Submit", request)).id == job
        await cluster.until(job, "running")
        save = pb.CheckpointRequest(job=job, request_id="two")
        assert (await cluster.call("Checkpoint", save)).attempt == 1
        await cluster.stop_coordinator("c1")
        await cluster.start_coordinator("c2")
        assert (await cluster.call("Submit", request)).id == job
        assert (await cluster.call("Checkpoint", save)).attempt == 1
        assert (await cluster.attempt(job, 1)).phase == "committed"

    tell(story)


def test_what_cannot_be_is_told_at_once_and_leaves_nothing(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        with pytest.raises(NotFound, match="node n7 is not there"):
            await cluster.submit("train", nodes=["n7"])
        with pytest.raises(UsageError, match="cannot be used"):
            await cluster.submit("no such name!")
        with pytest.raises(NotFound, match="no job 'nothing'"):
            await cluster.job("nothing")
        for node in cluster.nodes.values():
            await node.destroy()
        await cluster.poll_live(0)
        with pytest.raises(NoCapacity, match="no node is live"):
            await cluster.submit("train")
        assert not (await cluster.call("ListJobs", pb.ListJobsRequest(all=True))).jobs

    tell(story)


def test_a_checkpoint_asked_for_during_another_one_follows_it(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        for node in cluster.nodes.values():
            node.persist_gate.clear()
        first = await cluster.call("Checkpoint", pb.CheckpointRequest(job=job))
        second = await cluster.call("Checkpoint", pb.CheckpointRequest(job=job))
        park = await cluster.call("Park", pb.JobRequest(job=job))
        assert (first.attempt, second.attempt, park.attempt) == (1, 2, 2)
        for node in cluster.nodes.values():
            node.persist_gate.set()
        assert (await cluster.attempt(job, 2)).phase == "committed"
        await cluster.until(job, "parked")

    tell(story)


def test_a_worker_that_hangs_with_its_connection_open_is_given_up_with_its_lease(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        await cluster.checkpoint(job)
        stopped = cluster.nodes[running.pods[1].node]

        async def before(order: str, pod: int) -> None:
            await asyncio.Event().wait()

        stopped.before = before
        reply = await cluster.call("Checkpoint", pb.CheckpointRequest(job=job))
        await cluster.poll(lambda: any(line.startswith("prepare") for line in stopped.log[-1:]))
        for pod in stopped.pods.values():
            pod.fenced = True
        await stopped.session.close()
        await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
        assert (await cluster.attempt(job, reply.attempt)).phase == "aborted"

    tell(story)
