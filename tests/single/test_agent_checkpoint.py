"""Attempts on one node: run on, stop and restore, abort, refuse; the pod is never worse off than before."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import AttemptAborted, Conflict, MoorageError
from moorage.store import Store
from tests.support.worker_rig import Orders, WorkerRig, counter_spec, in_order, steps

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def rig() -> Iterator[WorkerRig]:
    with WorkerRig() as made:
        yield made


async def _counts_on(orders: Orders, job: str, pod: int = 0) -> str:
    """Wait until the counter has said five more numbers; all that it said is in order, by one and the same process."""
    said = len(steps(await orders.output(job, pod)))
    text = await orders.until_output(job, lambda text: len(steps(text)) >= said + 5, pod)
    assert in_order(steps(text))
    assert text.count("nonce") == 1
    return text


def _nothing_staged(rig: WorkerRig, job: str, incarnation: int = 1) -> bool:
    in_memory = Path("/dev/shm") / f"moorage-{rig.cluster}-node-1" / f"{job}-{incarnation}-0"
    return not (rig.pod_folder(job, incarnation) / "staging").exists() and not in_memory.exists()


def test_the_job_runs_on_after_each_of_three_checkpoints(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("on", counter_spec())
            await _counts_on(orders, "on")
            new = []
            for attempt in (1, 2, 3):
                (vote,) = (await orders.checkpoint("on", attempt)).values()
                assert vote.ok, vote.reason
                assert 0 < vote.pause_seconds < 10
                new.append(vote.bytes_new)
                await _counts_on(orders, "on")
            assert max(new[1:]) < new[0]  # much of it was in the store already
            assert _nothing_staged(rig, "on")
            await orders.kill("on")

    asyncio.run(main())


def test_a_stopped_job_goes_on_in_a_new_incarnation_where_it_stood(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("stop", counter_spec())
            before = await _counts_on(orders, "stop")
            await orders.capture("stop", 1, kind="stop")
            (vote,) = (await orders.votes("stop", 1, "persisted")).values()
            assert vote.ok, vote.reason
            assert (await orders.status("stop")).phase == "captured"
            await orders.conclude("stop", 1, "stop")
            await orders.until("stop", "killed")
            assert not rig.cgroup("stop").processes()
            (reply,) = await orders.restore("stop", {0: vote.manifest}, release=False)
            assert reply.status.phase == "restored"
            standing = await orders.output("stop")
            assert len(steps(standing)) >= len(steps(before))
            assert rig.cgroup("stop", 2).state() == "frozen"
            await orders.release("stop")
            after = await _counts_on(orders, "stop")
            assert after.startswith(standing)
            await orders.kill("stop", any_incarnation=True)
            assert not rig.pod_folder("stop", 1).exists()

    asyncio.run(main())


def test_two_pods_come_back_three_times_in_a_row(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("chain", counter_spec(pods=2))
            for attempt in range(1, 4):
                for pod in (0, 1):
                    await _counts_on(orders, "chain", pod)
                votes = await orders.checkpoint("chain", attempt)
                await orders.kill("chain")
                await orders.restore("chain", {pod: vote.manifest for pod, vote in votes.items()})
            for pod in (0, 1):
                await _counts_on(orders, "chain", pod)
            await orders.finish("chain")

    asyncio.run(main())


def test_without_an_outcome_the_deadline_lets_the_pod_run_on_from_every_step(rig: WorkerRig) -> None:
    methods = ("PreparePod", "FreezePod", "SealPod", "CapturePod")

    async def one(orders: Orders, reached: int) -> None:
        job = f"late-{reached}"
        await orders.start(job, counter_spec())
        await _counts_on(orders, job)
        await orders.begin(job, 1, deadline=3.0)
        for method in methods[: reached + 1]:
            await orders.all_pods(method, job, 1, "resume", 3.0)
        await orders.until(job, "running")
        outcome = await orders.attempts(job).outcome(1)
        assert outcome is not None
        assert (outcome.kind, outcome.by) == ("abort", "node-1")
        await _counts_on(orders, job)
        assert _nothing_staged(rig, job)
        with pytest.raises(Conflict, match="attempt 1"):
            await orders.all_pods("SealPod", job, 1, "resume")
        (vote,) = (await orders.checkpoint(job, 2)).values()  # and the next one works
        assert vote.ok
        await orders.kill(job)

    async def main() -> None:
        async with rig.orders() as orders:
            await asyncio.gather(*(one(orders, reached) for reached in range(len(methods))))

    asyncio.run(main())


def test_a_stop_that_is_aborted_lets_the_pod_run_on(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("unstopped", counter_spec())
            await _counts_on(orders, "unstopped")
            await orders.capture("unstopped", 1, kind="stop")
            await orders.votes("unstopped", 1, "persisted")
            await orders.attempts("unstopped").abort(1, 1, "no", "coordinator")
            (reply,) = await orders.all_pods("ResumePod", "unstopped", 1, "stop")
            assert reply.status.phase == "running"
            await _counts_on(orders, "unstopped")
            await orders.kill("unstopped")

    asyncio.run(main())


def test_a_dump_that_fails_ends_the_attempt_and_not_the_job(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("failing", counter_spec())
            await _counts_on(orders, "failing")
            rig.arm("worker.capture.dump.before", "error the dump broke")
            with pytest.raises(MoorageError, match="the dump broke"):
                await orders.capture("failing", 1)
            (vote,) = (await orders.votes("failing", 1, "captured")).values()
            assert (vote.ok, vote.reason) == (False, "the dump broke")
            await orders.attempts("failing").abort(1, 1, vote.reason, "coordinator")
            await orders.until("failing", "running")
            await _counts_on(orders, "failing")
            assert _nothing_staged(rig, "failing")
            assert (await orders.checkpoint("failing", 2))[0].ok
            await orders.kill("failing")

    asyncio.run(main())


def test_a_store_that_fails_after_the_job_runs_on_is_a_vote_against(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("unkept", counter_spec())
            rig.arm("worker.persist.images.before", "error no space left")
            (vote,) = (await orders.checkpoint("unkept", 1)).values()
            assert not vote.ok
            assert "no space left" in vote.reason
            await _counts_on(orders, "unkept")
            assert _nothing_staged(rig, "unkept")
            assert (await orders.checkpoint("unkept", 2))[0].ok
            await orders.kill("unkept")

    asyncio.run(main())


def test_what_cannot_be_saved_is_refused_before_the_pod_is_touched(rig: WorkerRig) -> None:
    script = (
        "import socket, time, os, sys\n"
        "raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)\n"
        "print('up', raw.fileno(), flush=True)\n"
        "time.sleep(1000)\n"
    )

    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("raw", counter_spec(command=[sys.executable, "-S", "-c", script]))
            text = await orders.until_output("raw", lambda text: text.endswith("\n"))
            descriptor = text.split()[1]
            await orders.begin("raw", 1)
            (reply,) = await orders.all_pods("PreparePod", "raw", 1, "resume")
            (refusal,) = reply.refusals
            assert f"descriptor {descriptor} (socket:" in refusal.what
            assert "RAW" in refusal.why
            assert reply.status.phase == "running"
            assert reply.bytes_needed > 0
            assert reply.bytes_free > reply.bytes_needed
            await orders.kill("raw")

    asyncio.run(main())


def test_a_rank_that_fails_during_the_attempt_votes_against_it(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("dies", counter_spec(ranks_per_pod=2, rendezvous=True))
            await _both_ranks_count(orders)
            await orders.begin("dies", 1)
            await orders.all_pods("PreparePod", "dies", 1, "resume")
            os.kill(max(rig.cgroup("dies").processes()), signal.SIGKILL)
            (vote,) = (await orders.votes("dies", 1, "captured")).values()
            assert not vote.ok
            assert "exited with code 137" in vote.reason
            status = await orders.until("dies", "exited")
            assert status.exit_code == 137
            await orders.kill("dies")

    async def _both_ranks_count(orders: Orders) -> None:
        await orders.until_output("dies", lambda text: text.count("step 3\n") == 2)

    asyncio.run(main())


def test_a_pod_that_has_finished_takes_part_without_images_and_comes_back_finished(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("done", counter_spec(last=3))
            await orders.until("done", "exited")
            (reply,) = await orders.capture("done", 1)
            assert reply.image_bytes == 0
            (vote,) = (await orders.votes("done", 1, "captured")).values()
            assert (vote.ok, vote.finished) == (True, True)
            await orders.conclude("done", 1, "resume")
            (vote,) = (await orders.votes("done", 1, "persisted")).values()
            assert vote.ok, vote.reason
            manifest = Store.open(str(rig.folder / "store")).read_pod_manifest(vote.manifest)
            assert not manifest.images
            assert manifest.ranks[0]["exited"]
            await orders.kill("done")
            await orders.restore("done", {0: vote.manifest})
            status = await orders.status("done")
            assert (status.phase, status.exit_code) == ("exited", 0)
            assert steps(await orders.output("done")) == [1, 2, 3]
            await orders.finish("done")

    asyncio.run(main())


def test_a_vote_that_comes_too_late_is_told(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("toolate", counter_spec())
            await orders.begin("toolate", 1)
            for method in ("PreparePod", "FreezePod", "SealPod"):
                await orders.all_pods(method, "toolate", 1, "resume")
            rig.arm("worker.vote.captured.before", "stall 0.5")
            capturing = asyncio.create_task(orders.all_pods("CapturePod", "toolate", 1, "resume"))
            await orders.until("toolate", "captured")
            await orders.attempts("toolate").abort(1, 1, "enough", "coordinator")
            with pytest.raises(AttemptAborted):
                await capturing
            await orders.until("toolate", "running")
            await _counts_on(orders, "toolate")
            await orders.kill("toolate")

    asyncio.run(main())


def test_files_that_the_pod_wrote_come_back_with_its_memory(rig: WorkerRig) -> None:
    script = (
        "import os, time\n"
        "os.makedirs('/tmp/moorage-kept', exist_ok=True)\n"
        "for number in range(1, 10**6):\n"
        "    with open('/tmp/moorage-kept/file', 'w') as file: file.write(str(number))\n"
        "    kept = int(open('/tmp/moorage-kept/file').read())\n"
        "    assert kept == number, (kept, number)\n"
        "    print('step', number, flush=True)\n"
        "    time.sleep(0.02)\n"
    )

    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("files", counter_spec(command=[sys.executable, "-S", "-c", script]))
            await orders.until_output("files", lambda text: len(steps(text)) > 5)
            first = (await orders.checkpoint("files", 1))[0]
            await orders.until_output("files", lambda text: len(steps(text)) > 20)
            await orders.kill("files")
            await orders.restore("files", {0: first.manifest})
            text = await orders.until_output("files", lambda text: len(steps(text)) > 30)
            assert in_order(steps(text))
            await orders.kill("files", any_incarnation=True)

    asyncio.run(main())
    assert not Path("/tmp/moorage-kept").exists()
