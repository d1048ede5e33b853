"""The worker, its guards, or both die or stand still at any point; the pods come through, once each."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from moorage.errors import Fenced, MoorageError, Unavailable
from tests.support.worker_rig import Orders, WorkerRig, counter_spec, in_order, steps, wait_for

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def rig() -> Iterator[WorkerRig]:
    with WorkerRig(lease_seconds=3) as made:
        yield made


@pytest.fixture(autouse=True)
def with_worker(rig: WorkerRig) -> None:
    """Each test begins with a worker that serves."""
    if rig.process is None or rig.process.poll() is not None:
        rig.kill_worker()
        rig.start_worker()


async def _counts_on(orders: Orders, job: str) -> str:
    said = len(steps(await orders.output(job)))
    text = await orders.until_output(job, lambda text: len(steps(text)) >= said + 5)
    assert in_order(steps(text))
    assert text.count("nonce") == 1
    return text


def _dies(rig: WorkerRig) -> None:
    assert rig.process is not None
    assert rig.process.wait(30) == -signal.SIGKILL
    rig.process = None


def test_a_killed_worker_is_followed_by_one_that_adopts_its_pods(rig: WorkerRig) -> None:
    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start("a", counter_spec())
            await orders.start("b", counter_spec(last=3))
            await orders.until("b", "exited")
            await _counts_on(orders, "a")

    async def after() -> None:
        async with rig.orders() as orders:
            for job in ("a", "b"):
                orders.specs[job], orders.incarnations[job] = counter_spec(), 1
            assert (await orders.status("a")).phase == "running"
            assert (await orders.status("b")).phase == "exited"
            assert steps(await orders.output("b")) == [1, 2, 3]
            await _counts_on(orders, "a")
            assert (await orders.checkpoint("a", 1))[0].ok
            await orders.kill("a")
            await orders.kill("b")

    asyncio.run(before())
    guards = rig.guards()
    rig.kill_worker()
    rig.start_worker()
    assert set(rig.guards()) <= set(guards)
    asyncio.run(after())


def test_a_killed_guard_is_followed_by_one_that_adopts_its_pod(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("g", counter_spec())
            await _counts_on(orders, "g")
            (guard,) = rig.guards()
            os.kill(guard, signal.SIGKILL)
            await asyncio.to_thread(wait_for, lambda: set(rig.guards()) - {guard}, "another guard")
            await _counts_on(orders, "g")
            assert (await orders.checkpoint("g", 1))[0].ok
            await _counts_on(orders, "g")
            await orders.kill("g")

    asyncio.run(main())


def test_worker_and_guard_killed_together_leave_the_pod_to_their_successors(rig: WorkerRig) -> None:
    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start("both", counter_spec())
            await _counts_on(orders, "both")

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs["both"], orders.incarnations["both"] = counter_spec(), 1
            assert (await orders.status("both")).phase == "running"
            await _counts_on(orders, "both")
            await orders.kill("both")

    asyncio.run(before())
    guards = rig.guards()
    rig.kill_worker()
    for pid in guards:
        os.kill(pid, signal.SIGKILL)
    rig.start_worker()
    asyncio.run(after())


@pytest.mark.parametrize(
    "failpoint",
    [
        "worker.freeze.cgroup.after",
        "worker.capture.dump.after",
        "worker.vote.captured.before",
    ],
)
def test_a_worker_that_dies_within_an_attempt_costs_only_the_attempt(rig: WorkerRig, failpoint: str) -> None:
    job = failpoint.replace(".", "-")

    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start(job, counter_spec())
            await _counts_on(orders, job)
            rig.arm(failpoint, "kill")
            with pytest.raises(Unavailable):
                await orders.capture(job, 1, deadline=6.0)

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs[job], orders.incarnations[job] = counter_spec(), 1
            await orders.attempts(job).abort(1, 1, "the worker died", "coordinator")
            await orders.until(job, "running")
            await _counts_on(orders, job)
            assert (await orders.checkpoint(job, 2))[0].ok
            await orders.kill(job)

    asyncio.run(before())
    _dies(rig)
    rig.start_worker()
    asyncio.run(after())


#: Holds connections that wait to be accepted and a pipe of packets, and looks at them at step 300.
_SET_ASIDE = """
import itertools, os, socket, time
def say(text):
    os.write(1, text.encode() + b"\\n")
say("nonce " + os.urandom(8).hex())
listener = socket.create_server(("127.0.0.1", 0))
clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
clients[1].sendall(b"from the second")
local = socket.socket(socket.AF_UNIX)
local.bind("\\0early")
local.listen(5)
early = [socket.socket(socket.AF_UNIX) for _ in range(3)]
for client, text in zip(early, (b"one", b"two", b"three")):
    client.connect("\\0early")
    client.sendall(text)
early.pop(1).close()
reader, writer = os.pipe2(os.O_DIRECT)
os.write(writer, b"one")
for number in itertools.count(1):
    say("step %d" % number)
    time.sleep(0.02)
    if number == 300:
        os.write(writer, b"two")
        packets = os.read(reader, 100), os.read(reader, 100)
        accepted = [listener.accept() for _ in clients]
        same = [peer for _, peer in accepted] == [client.getsockname() for client in clients]
        heard = accepted[1][0].recv(100)
        accepted[0][0].sendall(b"to the first")
        say("found %r %r %r %r" % (packets, same, heard, clients[0].recv(100)))
        servers = [local.accept()[0] for _ in range(3)]
        texts = [server.recv(100) for server in servers]
        servers[2].sendall(b"to the third")
        say("early %r %r" % (texts, early[1].recv(100)))
"""


def test_what_is_set_aside_for_a_dump_is_put_back_by_the_next_worker(rig: WorkerRig) -> None:
    spec = counter_spec(command=[sys.executable, "-S", "-c", _SET_ASIDE])

    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start("aside", spec)
            await _counts_on(orders, "aside")
            rig.arm("worker.capture.dump.before", "kill")
            with pytest.raises(Unavailable):
                await orders.capture("aside", 1, deadline=6.0)

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs["aside"], orders.incarnations["aside"] = spec, 1
            await orders.attempts("aside").abort(1, 1, "the worker died", "coordinator")
            await orders.until("aside", "running")
            text = await orders.until_output("aside", lambda text: "found" in text)
            assert "found (b'one', b'two') True b'from the second' b'to the first'" in text
            text = await orders.until_output("aside", lambda text: "early" in text)
            assert "early [b'one', b'two', b'three'] b'to the third'" in text
            await orders.kill("aside")

    asyncio.run(before())
    _dies(rig)
    assert (rig.pod_folder("aside") / "aside.json").exists()
    rig.start_worker()
    asyncio.run(after())


@pytest.mark.parametrize(
    "failpoint", ["worker.outcome.unseal.before", "worker.outcome.thaw.after", "worker.vote.persisted.before"]
)
def test_a_capture_is_brought_into_the_store_by_the_next_worker(rig: WorkerRig, failpoint: str) -> None:
    job = failpoint.replace(".", "-")

    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start(job, counter_spec())
            await _counts_on(orders, job)
            rig.arm(failpoint, "kill")
            await orders.capture(job, 1)
            await orders.conclude(job, 1, "resume")
            await asyncio.to_thread(_dies, rig)

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs[job], orders.incarnations[job] = counter_spec(), 1
            (vote,) = (await orders.votes(job, 1, "persisted")).values()
            assert vote.ok, vote.reason
            await orders.until(job, "running")
            await _counts_on(orders, job)
            await orders.kill(job)
            await orders.restore(job, {0: vote.manifest})
            await _counts_on(orders, job)
            await orders.kill(job, any_incarnation=True)

    asyncio.run(before())
    rig.start_worker()
    asyncio.run(after())


@pytest.mark.parametrize("failpoint", ["guard.checkpoint.before", "guard.thaw.before"])
def test_a_guard_that_dies_within_an_attempt_costs_at_most_the_attempt(rig: WorkerRig, failpoint: str) -> None:
    job = failpoint.replace(".", "-")

    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start(job, counter_spec())
            await _counts_on(orders, job)
            rig.arm(failpoint, "kill")
            try:
                await orders.capture(job, 1)
                await orders.conclude(job, 1, "resume")
            except MoorageError:
                await orders.attempts(job).abort(1, 1, "the guard died", "coordinator")
            await orders.until(job, "running")
            await _counts_on(orders, job)
            if any(vote.ok for vote in (await orders.attempts(job).votes(1, "captured")).values()):
                await orders.votes(job, 1, "persisted")
            assert (await orders.checkpoint(job, 2))[0].ok
            await orders.kill(job)

    asyncio.run(main())


@pytest.mark.parametrize("failpoint", ["worker.start.network.after", "worker.start.guard.after"])
def test_a_pod_whose_start_was_cut_short_runs_or_has_failed(rig: WorkerRig, failpoint: str) -> None:
    job = failpoint.replace(".", "-")

    async def before() -> None:
        async with rig.orders() as orders:
            rig.arm(failpoint, "kill")
            with pytest.raises(Unavailable):
                await orders.start(job, counter_spec())

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs[job], orders.incarnations[job] = counter_spec(), 1
            status = await orders.until(job, "running", "failed")
            assert bool(rig.cgroup(job).processes()) is (status.phase == "running")
            await orders.kill(job)

    asyncio.run(before())
    _dies(rig)
    rig.start_worker()
    asyncio.run(after())


@pytest.mark.parametrize(
    "failpoint",
    [
        "worker.restore.fetch.after",
        "worker.restore.rebuild.after",
        "worker.release.unseal.after",
    ],
)
def test_a_restore_that_was_cut_short_can_be_ordered_again(rig: WorkerRig, failpoint: str) -> None:
    job = failpoint.replace(".", "-")
    manifests: dict[int, str] = {}

    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start(job, counter_spec())
            await _counts_on(orders, job)
            manifests[0] = (await orders.checkpoint(job, 1))[0].manifest
            await orders.kill(job)
            rig.arm(failpoint, "kill")
            with pytest.raises(Unavailable):
                await orders.restore(job, manifests)

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs[job], orders.incarnations[job] = counter_spec(), 2
            status = await orders.until(job, "restored", "failed")
            if status.phase == "restored":
                await orders.release(job)
            else:
                assert not rig.cgroup(job, 2).processes()
                await orders.restore(job, manifests)
            await _counts_on(orders, job)
            await orders.kill(job, any_incarnation=True)

    asyncio.run(before())
    _dies(rig)
    rig.start_worker()
    asyncio.run(after())


def test_a_worker_that_stood_still_beyond_its_lease_takes_up_its_pods_again(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("still", counter_spec())
            await _counts_on(orders, "still")
            assert rig.process is not None
            os.kill(rig.process.pid, signal.SIGSTOP)
            await asyncio.to_thread(wait_for, lambda: rig.cgroup("still").state() == "frozen", "the fence")
            os.kill(rig.process.pid, signal.SIGCONT)
            await asyncio.to_thread(wait_for, lambda: rig.cgroup("still").state() == "thawed", "the thaw")
            await _counts_on(orders, "still")
            await orders.kill("still")

    asyncio.run(main())


def test_a_worker_that_wakes_after_its_job_was_moved_kills_the_old_pod_and_starts_nothing(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("moved", counter_spec())
            await _counts_on(orders, "moved")
            assert rig.process is not None
            os.kill(rig.process.pid, signal.SIGSTOP)
            pending = asyncio.create_task(orders.begin("moved", 1))
            await pending
            frozen = asyncio.create_task(orders.all_pods("PreparePod", "moved", 1, "resume"))
            await asyncio.to_thread(wait_for, lambda: rig.cgroup("moved").state() == "frozen", "the fence")
            said = (await asyncio.to_thread((rig.pod_folder("moved") / "journal").read_bytes)).count(b"step")
            await orders.incarnate("moved", 2)
            await asyncio.to_thread(wait_for, lambda: not rig.cgroup("moved").processes(), "the kill by the guard")
            os.kill(rig.process.pid, signal.SIGCONT)
            with pytest.raises((Fenced, Unavailable, MoorageError)):
                await frozen
            await asyncio.to_thread(wait_for, lambda: not rig.pod_folder("moved").exists(), "the old pod's removal")
            assert said > 0
            assert not rig.cgroup("moved").processes()
            await orders.kill("moved", any_incarnation=True)

    others = set(rig.guards())
    asyncio.run(main())
    assert set(rig.guards()) <= others


def test_a_worker_that_is_stopped_leaves_its_pods_running(rig: WorkerRig) -> None:
    async def before() -> None:
        async with rig.orders() as orders:
            await orders.start("left", counter_spec())
            await _counts_on(orders, "left")

    async def after() -> None:
        async with rig.orders() as orders:
            orders.specs["left"], orders.incarnations["left"] = counter_spec(), 1
            await _counts_on(orders, "left")
            await orders.finish("left")

    asyncio.run(before())
    rig.stop_worker()
    assert rig.cgroup("left").processes()
    rig.start_worker()
    asyncio.run(after())


def test_a_pod_that_lost_its_worker_and_its_guard_stands_from_the_next_workers_first_step_on(rig: WorkerRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("alone", counter_spec())
            await orders.until_output("alone", lambda text: len(steps(text)) > 5)
            rig.kill_worker()
            for pid in rig.guards():
                os.kill(pid, signal.SIGKILL)
            assert rig.cgroup("alone").state() != "frozen", "nobody is there to freeze it"
            rig.etcd.kill_member()  # no guard can be told a deadline
            starting = asyncio.create_task(asyncio.to_thread(rig.start_worker))
            await asyncio.to_thread(wait_for, lambda: rig.cgroup("alone").state() == "frozen", "the freezing")
            await asyncio.to_thread(rig.etcd.start_member)
            await starting
            seen = len(steps(await orders.output("alone")))
            text = await orders.until_output("alone", lambda text: len(steps(text)) > seen + 5)
            assert in_order(steps(text))
            await orders.kill("alone")

    asyncio.run(main())
