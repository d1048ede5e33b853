"""Pods on one node by the orders of a coordinator: start, output, commands inside, files, end; and who is refused."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage import rpc
from moorage.dev import sweep
from moorage.errors import Conflict, Fenced, Forbidden, NotFound, UsageError
from moorage.store import Store
from moorage.v1 import worker_pb2
from moorage.v1.worker_pb2_grpc import WorkerStub
from moorage.worker.journal import JournalReader, restore
from tests.support.worker_rig import NODE, Orders, WorkerRig, counter_spec, in_order, steps, wait_for

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def rig() -> Iterator[WorkerRig]:
    with WorkerRig() as made:
        yield made


async def _exec(orders: Orders, job: str, *command: str, stdin: bytes = b"") -> tuple[str, str, int]:
    async def inputs() -> object:
        yield worker_pb2.ExecInput(fence=orders.fence(job), command=command, stdin=stdin, stdin_eof=True)

    out, errors, code = b"", b"", -1
    async for message in orders.stub.Exec(inputs()):
        out, errors = out + message.stdout, errors + message.stderr
        if message.exited:
            code = message.exit_code
    return out.decode(), errors.decode(), code


def test_a_pod_runs_to_its_end_and_its_output_and_exit_code_are_kept(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("ends", counter_spec(last=5, code=3, ranks_per_pod=2, rendezvous=True))
            status = await orders.until("ends", "exited")
            assert status.exit_code == 3
            assert {rank.rank for rank in status.ranks} == {0, 1}
            assert all(rank.exited for rank in status.ranks)
            for rank in (0, 1):
                said = steps(await orders.output("ends", rank=rank, follow=True))
                assert in_order(said)
            assert max(steps(await orders.output("ends", rank=0)) + steps(await orders.output("ends", rank=1))) == 5

    asyncio.run(main())


def test_the_same_order_again_does_not_start_a_second_pod(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            first, second = (await orders.start("once", counter_spec()))[0], await orders.start_pod("once")
            assert [r.pid for r in first.status.ranks] == [r.pid for r in second.status.ranks] or not first.status.ranks
            output = await orders.until_output("once", lambda text: len(steps(text)) > 3)
            assert output.count("nonce") == 1
            await orders.kill("once")

    asyncio.run(main())


def test_output_is_followed_from_an_offset_without_loss_or_doubling(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("tail", counter_spec(last=60, pause=0.01))
            offset, text = 0, ""
            while "step 60" not in text:
                request = worker_pb2.ReadLogsRequest(job="tail", rank=-1, follow=True, offset=offset)
                call = orders.stub.ReadLogs(request)
                async for chunk in call:
                    text, offset = text + chunk.data.decode(), chunk.offset
                    break
                call.cancel()
            assert in_order(steps(text))

    asyncio.run(main())


def test_a_command_runs_inside_the_pod_with_the_ranks_environment(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("inside", counter_spec(env={"COLOUR": "blue"}))
            out, errors, code = await _exec(
                orders,
                "inside",
                "/bin/sh",
                "-c",
                "cat; echo $COLOUR $MOORAGE_RANK; echo no >&2; exit 7",
                stdin=b"hello ",
            )
            assert (out, errors, code) == ("hello blue 0\n", "no\n", 7)
            assert "pod" not in (await _exec(orders, "inside", "/bin/ls", str(rig.folder)))[0]
            for command, code in (("no-such", 127), ("/no/such", 127), ("/etc/passwd", 126), ("/tmp", 126)):
                assert (await _exec(orders, "inside", command))[2] == code
            assert (await _exec(orders, "inside", "/bin/sh", "-c", "exit 255"))[2] == 255
            assert not [path.name for path in rig.pod_folder("inside").glob("exec-*")]
            with pytest.raises(Exception, match="rank 5 is not in pod 0"):
                call = orders.stub.Exec(
                    iter([worker_pb2.ExecInput(fence=orders.fence("inside"), command=["x"], rank=5)])
                )
                async for _ in call:
                    pass
            await orders.kill("inside")

    asyncio.run(main())


def test_a_command_is_killed_when_its_caller_goes_away(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("gone", counter_spec())
            before = set(rig.cgroup("gone").processes())

            async def inputs() -> object:
                yield worker_pb2.ExecInput(fence=orders.fence("gone"), command=["/bin/sh", "-c", "echo up; sleep 1000"])
                await asyncio.sleep(1000)

            call = orders.stub.Exec(inputs())
            async for message in call:
                assert message.stdout == b"up\n"
                break
            assert set(rig.cgroup("gone").processes()) > before
            call.cancel()
            await asyncio.to_thread(
                wait_for, lambda: set(rig.cgroup("gone").processes()) <= before, "the command's end"
            )
            await orders.kill("gone")

    asyncio.run(main())


def test_results_come_back_when_the_job_ends_and_nothing_else_of_the_pod_stays(rig: WorkerRig) -> None:
    folder = rig.folder / "job"
    folder.mkdir()
    script = "import pathlib, os; pathlib.Path('result.txt').write_text('42'); pathlib.Path('/etc/moorage-x').touch()"

    async def main() -> None:
        async with rig.orders() as orders:
            spec = counter_spec(command=[sys.executable, "-S", "-c", script], working_directory=str(folder))
            await orders.start("result", spec)
            assert (await orders.until("result", "exited")).exit_code == 0
            assert not (folder / "result.txt").exists()
            parts = [part async for part in orders.stub.Pull(worker_pb2.PullPodRequest(fence=orders.fence("result")))]
            assert [(part.path, part.data) for part in parts if part.data] == [("result.txt", b"42")]
            (reply,) = await orders.finish("result")
            assert str(folder) in reply.status.reason
            assert (folder / "result.txt").read_text() == "42"
            with pytest.raises(NotFound):
                await orders.status("result")
            assert not rig.pod_folder("result").exists()

    asyncio.run(main())
    assert not Path("/etc/moorage-x").exists()


def test_the_logs_of_a_job_that_has_ended_are_in_the_store(rig: WorkerRig, tmp_path: Path) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("logs", counter_spec(last=3))
            await orders.until("logs", "exited")
            await orders.finish("logs")

    asyncio.run(main())
    (tmp_path / "export").write_bytes(Store.open(str(rig.folder / "store")).get_object("logs/logs/1/0"))
    restore(tmp_path / "export", tmp_path / "journal")
    with JournalReader(tmp_path / "journal") as reader:
        text = b"".join(entry.frame.payload for entry in reader.read().entries if entry.frame.kind == 1)
    assert steps(text.decode()) == [1, 2, 3]


def test_what_cannot_start_says_why_and_leaves_nothing(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            with pytest.raises(UsageError, match="command no-such-command does not exist on this node"):
                await orders.start("bad1", counter_spec(command=["no-such-command"]))
            assert (await orders.status("bad1")).phase == "failed"
            with pytest.raises(UsageError, match="user nobody-knows does not exist"):
                await orders.start("bad2", counter_spec(user="nobody-knows"))
            with pytest.raises(UsageError, match="/no/such/folder"):
                await orders.start("bad3", counter_spec(working_directory="/no/such/folder"))
            for job in ("bad1", "bad2", "bad3"):
                assert not rig.cgroup(job).processes()
                await orders.finish(job)

    asyncio.run(main())
    assert not [point for job in ("bad1", "bad2", "bad3") for point in sweep.mounts_below(rig.state / "pods" / job)]


def test_a_pod_that_is_not_there_counts_as_killed_and_as_finished(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            orders.specs["never"] = counter_spec()
            await orders.incarnate("never", 4)
            (killed,) = await orders.kill("never", any_incarnation=True)
            assert killed.status.phase == "killed"
            (finished,) = await orders.finish("never")
            assert finished.status.phase == "exited"

    asyncio.run(main())


def test_only_the_coordinator_may_give_orders(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders, rpc.aio_channel(rig.endpoint, rig.stranger) as channel:
            orders.specs["mine"] = counter_spec()
            await orders.incarnate("mine", 1)
            request = worker_pb2.KillPodRequest(fence=orders.fence("mine"))
            with pytest.raises(Forbidden, match=r"user:ann .operate. may not call KillPod"):
                await rpc.unary(WorkerStub(channel).KillPod, request, what="worker", timeout=10)

    asyncio.run(main())


def test_orders_of_a_replaced_coordinator_and_of_a_given_up_incarnation_are_refused(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as old, rig.orders() as new:
            assert new.epoch > old.epoch
            await new.start("fenced", counter_spec())
            old.specs, old.incarnations = new.specs, new.incarnations
            with pytest.raises(Fenced, match="one of epoch"):
                await old.kill("fenced")
            await new.incarnate("fenced", 3)
            with pytest.raises(NotFound):
                await new.call("PreparePod", new.attempt_order("fenced", 1, 0, "resume", 10))
            new.incarnations["fenced"] = 2
            with pytest.raises(Fenced, match="incarnation 2 of job fenced"):
                await new.start_pod("fenced")
            new.incarnations["fenced"] = 3
            (reply,) = await new.kill("fenced", any_incarnation=True)
            assert reply.status.phase == "killed"
            assert not rig.cgroup("fenced").processes()
            assert not rig.pod_folder("fenced").exists()

    asyncio.run(main())


def test_an_order_of_yesterdays_leader_is_ignored_although_nobody_told_the_worker(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as old, rig.orders() as new:
            old.epoch, leading = 0, new.epoch
            await new.start("led", counter_spec())
            await new.lead()  # only etcd knows: the worker has heard of nobody newer than the one it obeyed
            assert new.epoch > leading
            old.specs, old.incarnations = new.specs, new.incarnations
            # Replayed as it was, with an epoch that nobody has, and with one that is still to come.
            for epoch in (leading, leading + 1, new.epoch + 1000):
                old.epoch = epoch
                orders = [old.attempt_order("led", 1, 0, "resume", 10)]
                for method in ("PreparePod", "FreezePod", "SealPod", "CapturePod", "ResumePod"):
                    with pytest.raises(Fenced, match=f"epoch {epoch}; etcd names the one of epoch {new.epoch}"):
                        await old.call(method, orders[0])
                for call in (old.kill("led"), old.finish("led"), old.release("led"), old.start_pod("led")):
                    with pytest.raises(Fenced, match=f"epoch {epoch}; etcd names"):
                        await call
            assert (await new.status("led")).phase == "running"
            (reply,) = await new.kill("led")  # what it heard of the future has not made it deaf to the present
            assert reply.status.phase == "killed"

    asyncio.run(main())


def test_no_pod_starts_for_a_job_that_may_not_run(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            orders.specs["parked"] = counter_spec()
            await orders.incarnate("parked", 1, placed=False)
            with pytest.raises(Fenced, match="no pod of job parked may run"):
                await orders.start_pod("parked")

    asyncio.run(main())


def test_the_watch_shows_all_pods_then_the_end_of_the_list_then_changes(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("seen", counter_spec())
            seen: list[str] = []
            listed = False
            async for status in orders.watch():
                if not status.job:
                    listed = True
                    await orders.kill("seen")
                elif status.job == "seen":
                    assert listed or status.phase == "running"
                    assert status.node == NODE
                    seen.append(status.phase)
                    if status.phase == "killed":
                        break
            assert seen[0] == "running"
            assert listed

    asyncio.run(main())


def test_two_different_pods_cannot_have_the_same_place(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("place", counter_spec())
            request = worker_pb2.RestorePodRequest(
                fence=orders.fence("place"), spec=orders.specs["place"], membership=orders.membership("place"),
                manifest="0" * 64,
            )  # fmt: skip
            with pytest.raises(Conflict, match="was made in another way"):
                await orders.call("RestorePod", request)
            await orders.kill("place")

    asyncio.run(main())
