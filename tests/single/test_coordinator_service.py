"""What the API serves beside the lives of jobs: logs, events, commands, files, checkpoints and the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.coordinator import checkpoints, ended
from moorage.errors import Conflict, CorruptData, Forbidden, NotFound, UsageError
from moorage.store import Store
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
    def run(story: Story, **options: Any) -> None:
        async def go() -> None:
            async with FakeCluster(etcd, tmp_path, **options) as cluster:
                await story(cluster)

        asyncio.run(go())

    return run


def test_watching_a_job_ends_when_it_is_over(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", pods=1)).id
        phases: list[str] = []
        async for message in cluster.stream("WatchJob", pb.JobRef(job="train")):
            if message.phase not in phases:
                phases.append(message.phase)
            if message.phase == "running" and cluster.pod(job, 0).phase == "running":
                cluster.pod(job, 0).exit(0)
        assert phases[-1] == "finished"
        assert message.over

    tell(story)


def test_watching_an_attempt_ends_with_its_end(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        reply = await cluster.call("Checkpoint", pb.CheckpointRequest(job=job))
        request = pb.GetAttemptRequest(job=job, attempt=reply.attempt)
        last = [message async for message in cluster.stream("WatchAttempt", request)][-1]
        assert (last.phase, last.checkpoint, last.pods_persisted) == ("committed", f"{job}-0001", 2)
        with pytest.raises(NotFound, match="remembers no attempt 9"):
            await cluster.call("GetAttempt", pb.GetAttemptRequest(job=job, attempt=9))

    tell(story)


def test_events_are_followed_until_the_job_is_over(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", pods=1)).id

        async def follow() -> list[str]:
            request = pb.ListEventsRequest(job=job, follow=True)
            return [event.kind async for event in cluster.stream("ListEvents", request)]

        following = asyncio.create_task(follow())
        await cluster.until(job, "running")
        cluster.pod(job, 0).exit(0)
        kinds = await asyncio.wait_for(following, 60)
        assert kinds[0] == "job.submitted"
        assert kinds[-1] == "job.finished"
        assert len(kinds) == len(set(kinds))
        everything = [e.job async for e in cluster.stream("ListEvents", pb.ListEventsRequest())]
        assert set(everything) == {job}

    tell(story)


def test_logs_go_on_across_a_restore_and_end_with_the_job(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")
        await cluster.checkpoint(job)
        chunks: list[worker_pb2.LogChunk] = []

        async def follow() -> None:
            request = pb.LogsRequest(job=job, rank=-1, follow=True)
            async for chunk in cluster.stream("ReadLogs", request):
                chunks.append(chunk)

        following = asyncio.create_task(follow())
        await cluster.poll(lambda: {chunk.pod for chunk in chunks} == {0, 1})
        await cluster.nodes[running.pods[0].node].destroy()
        await cluster.until(job, lambda j: j.phase == "running" and j.incarnation == 2)
        await cluster.poll(lambda: {c.pod for c in chunks if c.incarnation == 2} == {0, 1})
        for number in (0, 1):
            cluster.pod(job, number).exit(0)
        await asyncio.wait_for(following, 60)
        one = [c async for c in cluster.stream("ReadLogs", pb.LogsRequest(job=job, rank=1))]
        assert not one, "the fake worker archives nothing"
        with pytest.raises(UsageError, match="no rank 2"):
            async for _ in cluster.stream("ReadLogs", pb.LogsRequest(job=job, rank=2)):
                pass

    tell(story)


def test_commands_and_files_come_from_the_pod_that_has_them(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        running = await cluster.until(job, "running")

        async def inputs() -> Any:
            yield worker_pb2.ExecInput(fence=worker_pb2.Fence(job="train"), command=["ls", "-l"], rank=1)
            yield worker_pb2.ExecInput(stdin=b"+in", stdin_eof=True)

        outputs = [output async for output in cluster.stream("Exec", inputs())]
        where = running.pods[1].node
        assert b"".join(output.stdout for output in outputs) == f"{where} 1 1: ls -l+in".encode()
        assert (outputs[-1].exited, outputs[-1].exit_code) == (True, 3)
        parts = [part async for part in cluster.stream("Pull", pb.PullRequest(job=job))]
        assert [part.path for part in parts] == ["same.txt", "0.txt", "1.txt"]
        assert parts[0].data == running.pods[0].node.encode()
        await cluster.call("Park", pb.JobRequest(job=job))
        await cluster.until(job, "parked")
        with pytest.raises(Conflict, match="is parked"):
            async for _ in cluster.stream("Pull", pb.PullRequest(job=job)):
                pass

    tell(story)


def test_a_checkpoint_is_listed_inspected_checked_and_pinned(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        await cluster.checkpoint(job)
        name = f"{job}-0001"
        (listed,) = (await cluster.call("ListCheckpoints", pb.ListCheckpointsRequest())).checkpoints
        assert (listed.id, listed.job_name, listed.latest, listed.pinned) == (name, "train", True, False)
        inside = await cluster.call("InspectCheckpoint", pb.CheckpointRef(checkpoint=name))
        assert [(part.pod, part.kind, part.items) for part in inside.parts] == [
            (0, "process memory", 1),
            (1, "process memory", 1),
        ]
        assert [rank.rank for rank in inside.ranks] == [0, 1]
        request = pb.CheckRequest(checkpoint="train", read_data=True)
        last = [news async for news in cluster.stream("CheckCheckpoint", request)][-1]
        assert last.done
        assert not last.errors
        assert (await cluster.call("PinCheckpoint", pb.PinRequest(checkpoint=name))).pinned
        assert not (await cluster.call("PinCheckpoint", pb.PinRequest(checkpoint=name, unpin=True))).pinned
        with pytest.raises(NotFound, match="no checkpoint 'nothing'"):
            await cluster.call("InspectCheckpoint", pb.CheckpointRef(checkpoint="nothing"))
        for manifest in (Path(cluster.store) / "checkpoints").iterdir():
            manifest.unlink()
        with pytest.raises(CorruptData, match="is missing, though the checkpoint needs it"):
            await cluster.call("InspectCheckpoint", pb.CheckpointRef(checkpoint=name))
        with pytest.raises(CorruptData, match=f"nothing was pruned: checkpoint {name} is damaged") as raised:
            await cluster.call("Prune", pb.PruneRequest())
        assert f"moorage delete {job}" in raised.value.hint

    tell(story)


def test_a_prune_beside_an_attempt_costs_neither(tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PROTECT", -60.0)

    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", keep_last=1)).id
        await cluster.until(job, "running")
        await cluster.checkpoint(job)
        for node in cluster.nodes.values():
            node.persist_gate.clear()
        reply = await cluster.call("Checkpoint", pb.CheckpointRequest(job=job))
        pruned = await cluster.call("Prune", pb.PruneRequest())
        assert list(pruned.checkpoints) == [f"{job}-0001"]
        for node in cluster.nodes.values():
            node.persist_gate.set()
        assert (await cluster.attempt(job, reply.attempt)).phase == "committed"
        last = [n async for n in cluster.stream("CheckCheckpoint", pb.CheckRequest(checkpoint=f"{job}-0002"))][-1]
        assert not last.errors
        dry = await cluster.call("Prune", pb.PruneRequest(dry_run=True))
        assert dry.dry_run
        store = await asyncio.to_thread(Store.open, cluster.store)
        assert store.free_bytes() > 0

    tell(story)


def test_the_logs_of_a_job_that_is_over_come_from_the_archive(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train", pods=1)).id
        await cluster.until(job, "running")
        store = await asyncio.to_thread(Store.open, cluster.store)
        from tests.unit.test_coordinator_parts import export, frame

        data = export(frame(0, 1, b"hello\n") + frame(0, 2, b"oops\n"))
        await asyncio.to_thread(store.put_object, f"logs/{job}/1/0", data)
        cluster.pod(job, 0).exit(0)
        await cluster.until(job, "finished")
        for follow in (False, True):
            request = pb.LogsRequest(job=job, rank=-1, follow=follow)
            found = [(c.data, c.is_stderr) async for c in cluster.stream("ReadLogs", request)]
            assert found == [(b"hello\n", False), (b"oops\n", True)]

    tell(story)


async def _left(cluster: FakeCluster, job: str) -> list[str]:
    """The keys of a job and the objects of its logs."""
    store = await asyncio.to_thread(Store.open, cluster.store)
    async with cluster.etcd.client() as client:
        listing = await client.list(cluster.keys.root, keys_only=True)
    return [kv.key for kv in listing.items if f"/{job}/" in kv.key] + store.list_objects(f"logs/{job}/")


async def _over(cluster: FakeCluster, name: str, *, code: int = 0, saved: bool = True) -> str:
    """A job that is over, with a checkpoint and a log in the archive."""
    job: str = (await cluster.submit(name, pods=1, on_failure=types_pb2.ON_FAILURE_FAIL)).id
    await cluster.until(job, "running")
    if saved:
        await cluster.checkpoint(job)
    store = await asyncio.to_thread(Store.open, cluster.store)
    await asyncio.to_thread(store.put_object, f"logs/{job}/1/0", b"log")
    cluster.pod(job, 0).exit(code)
    await cluster.until(job, lambda found: bool(found.over))
    return job


def test_a_deleted_job_leaves_nothing_and_its_name_is_free(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        running = (await cluster.submit("train", pods=1)).id
        await cluster.until(running, "running")
        with pytest.raises(Conflict, match="is running"):
            await cluster.call("DeleteJob", pb.DeleteJobRequest(job="train"))
        job = await _over(cluster, "old")
        name = f"{job}-0001"
        await cluster.call("PinCheckpoint", pb.PinRequest(checkpoint=name))
        with pytest.raises(Conflict, match=f"pinned checkpoints: {name}"):
            await cluster.call("DeleteJob", pb.DeleteJobRequest(job=job))
        await cluster.call("PinCheckpoint", pb.PinRequest(checkpoint=name, unpin=True))
        dry = await cluster.call("DeleteJob", pb.DeleteJobRequest(job="old", dry_run=True))
        assert list(dry.checkpoints) == [name]
        assert len(await _left(cluster, job)) > 5
        # Two at once, beside somebody who wants it back: one of the three wins, and all are answered.
        calls = [
            cluster.call("DeleteJob", pb.DeleteJobRequest(job=job)),
            cluster.call("DeleteJob", pb.DeleteJobRequest(job=job)),
            cluster.call("Restore", pb.RestoreRequest(job=job)),
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], pb.DeleteJobReply), answers
        assert all(isinstance(answer, NotFound) for answer in answers[1:]), answers
        assert await _left(cluster, job) == []
        async with cluster.etcd.client() as client:
            assert await client.get(cluster.keys.name("old")) is None
        with pytest.raises(NotFound):
            await cluster.call("GetJob", pb.JobRef(job=job))
        again = (await cluster.submit("old", pods=1)).id
        await cluster.until(again, "running")
        await cluster.stop_coordinator("c1")
        await cluster.start_coordinator("c2")
        listed = await cluster.call("ListJobs", pb.ListJobsRequest(all=True))
        assert {found.id for found in listed.jobs} == {running, again}

    tell(story)


def test_jobs_that_are_over_are_forgotten_but_not_what_could_be_gone_on_with(
    tell: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended, "EVERY", 0.05)

    async def story(cluster: FakeCluster) -> None:
        failed = await _over(cluster, "failed", code=3)
        pinned = await _over(cluster, "pinned")
        await cluster.call("PinCheckpoint", pb.PinRequest(checkpoint=f"{pinned}-0001"))
        old = await _over(cluster, "old")
        lost = await _over(cluster, "lost", code=3, saved=False)
        newest = await _over(cluster, "newest")

        async def jobs() -> set[str]:
            return {job.id for job in (await cluster.call("ListJobs", pb.ListJobsRequest(all=True))).jobs}

        while await jobs() != {failed, pinned, newest}:  # noqa: ASYNC110 - the API has nothing to wait for
            await asyncio.sleep(0.05)
        for job in (old, lost):
            assert await _left(cluster, job) == []
        names = {c.id for c in (await cluster.call("ListCheckpoints", pb.ListCheckpointsRequest())).checkpoints}
        assert names == {f"{job}-0001" for job in (failed, pinned, newest)}
        back = await cluster.call("Restore", pb.RestoreRequest(job=failed))
        assert not back.over

    tell(story, keep_ended=1)


def test_nodes_are_listed_with_what_runs_there(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        await cluster.nodes["n2"].destroy()
        await cluster.poll_live(2)
        nodes = {node.node: node for node in (await cluster.call("ListNodes", pb.ListNodesRequest())).nodes}
        assert [nodes[name].live for name in ("n0", "n1", "n2")] == [True, True, False]
        assert list(nodes["n0"].jobs) == [job]
        assert nodes["n0"].pods == 1
        described = await cluster.call("DescribeNode", pb.NodeRef(node="n0"))
        assert described.findings[0].name == "criu"
        with pytest.raises(NotFound, match="no node 'x'"):
            await cluster.call("DescribeNode", pb.NodeRef(node="x"))

    tell(story)


def test_a_worker_may_not_call_the_coordinator(tell: Callable[..., None]) -> None:
    async def story(cluster: FakeCluster) -> None:
        with pytest.raises(Forbidden, match=r"worker:n .worker. may not call ListJobs"):
            await cluster.call_as("worker:n", "ListJobs", pb.ListJobsRequest())

    tell(story, nodes=0)


def test_etcd_may_be_away_for_a_while(tell: Callable[..., None], etcd: Etcd) -> None:
    async def story(cluster: FakeCluster) -> None:
        job = (await cluster.submit("train")).id
        await cluster.until(job, "running")
        began = time.monotonic()
        saving = asyncio.create_task(cluster.checkpoint(job))
        await asyncio.to_thread(etcd.restart_member)
        assert (await saving).phase == "committed"
        assert (await cluster.job(job)).incarnation == 1
        assert time.monotonic() - began < 60

    tell(story)
