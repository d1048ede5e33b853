"""The Python client against a coordinator that comes and goes."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from moorage import AsyncClient, Client
from moorage.errors import (
    AttemptAborted,
    Conflict,
    MoorageError,
    NoCapacity,
    NotFound,
    Refused,
    Unavailable,
    UsageError,
)
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import worker_pb2
from tests.support.fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(tmp_path) as made:
        yield made


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[Client]:
    with Client(config=coordinator.config, patience=10) as made:
        yield made


def _restart_soon(coordinator: FakeCoordinator) -> threading.Thread:
    thread = threading.Thread(target=coordinator.start)
    thread.start()
    return thread


def test_a_job_is_run_checkpointed_moved_and_waited_for(coordinator: FakeCoordinator, client: Client) -> None:
    job = client.torchrun("train.py", ["--epochs", "3"], nnodes=2, nproc_per_node=8, name="t")
    (submitted,) = coordinator.asked("Submit")
    assert (submitted.spec.pods, submitted.spec.ranks_per_pod, submitted.spec.rendezvous) == (2, 8, True)
    assert list(submitted.spec.command)[1:] == ["-u", "train.py", "--epochs", "3"]
    seen = []
    checkpoint = job.checkpoint(progress=lambda attempt: seen.append(attempt.phase))
    assert checkpoint.id == "c-1" and seen == ["preparing", "capturing", "committed"]
    assert job.restore(checkpoint, on=["c", "d"]).incarnation == 2
    assert job.move(to=["a", "b"]).phase == "running"
    assert coordinator.asked("Move")[0].nodes == ["a", "b"]
    assert job.park().id == "c-1"
    assert job.stop(checkpoint=True).phase == "stopped"
    assert coordinator.asked("Stop")[0].checkpoint
    assert [found.id for found in client.jobs(all=True)] == [job.id] and client.jobs() == []


def test_a_job_that_was_just_started_is_waited_for_and_one_without_room_is_not_for_ever(
    coordinator: FakeCoordinator,
) -> None:
    with Client(config=coordinator.config, patience=0.2) as client:
        job = client.torchrun("train.py")
        coordinator.state.change(coordinator.state.jobs[job.id], "starting")
        assert job.checkpoint().id == "c-1"
        for phase in ("pending", "parked"):
            coordinator.state.change(coordinator.state.jobs[job.id], phase)
            with pytest.raises(Conflict, match=f"is {phase}"):
                job.park()
        with pytest.raises(UsageError, match="no rank -1"):
            job.exec(["true"], rank=-1)


def test_waiting_ends_with_the_jobs_exit_code_though_the_coordinator_was_away(
    coordinator: FakeCoordinator, client: Client
) -> None:
    message = coordinator.state.add("j")
    job = client.job("j")
    results = []
    waiter = threading.Thread(target=lambda: results.append(job.wait(timeout=30)))
    waiter.start()
    while not coordinator.asked("WatchJob"):
        waiter.join(0.01)
    coordinator.stop()
    coordinator.soon(lambda: coordinator.state.change(message, "finished", exit_code=7))
    coordinator.start()
    waiter.join(30)
    assert [found.exit_code for found in results] == [7]


def test_a_call_that_is_made_again_carries_the_same_request_id(coordinator: FakeCoordinator, client: Client) -> None:
    coordinator.state.fails["Submit"] = [Unavailable("not the leader")]
    client.run(["true"], name="once")
    first, second = coordinator.asked("Submit")
    assert first.request_id == second.request_id != ""
    assert len(coordinator.state.jobs) == 1


def test_a_call_that_goes_to_another_coordinator_ends_no_other_call(
    coordinator: FakeCoordinator, client: Client
) -> None:
    message = coordinator.state.add("j")
    job = client.job("j")
    watch = job.watch()
    assert next(watch).phase == "running"
    coordinator.state.fails["GetJob"] = [Unavailable("it leads no more")]
    assert job.status().phase == "running"
    coordinator.soon(lambda: coordinator.state.change(message, "finished", exit_code=0))
    assert [info.phase for info in watch][-1] == "finished"


def test_a_coordinator_that_stays_away_is_an_error_that_names_it(coordinator: FakeCoordinator) -> None:
    coordinator.stop()
    with (
        Client(config=coordinator.config, patience=0.5) as client,
        pytest.raises(Unavailable, match=f"127.0.0.1:{coordinator.port}"),
    ):
        client.jobs()


def test_who_waits_for_a_coordinator_hears_of_it_once_a_call(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moorage.coordinator.client.connection.TOLD_AFTER", 0.0)
    told: list[str] = []
    with Client(config=coordinator.config, patience=2, on_silence=told.append) as client:
        client.jobs()
        assert told == []
        coordinator.stop()
        with pytest.raises(Unavailable):
            client.jobs()
    assert told == [f"coordinator 127.0.0.1:{coordinator.port} does not answer; trying for 2 s more"]


def test_the_next_coordinator_of_the_list_is_asked_when_one_is_away(coordinator: FakeCoordinator) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    several = msgspec.structs.replace(coordinator.config, coordinator=f"127.0.0.1:{port},127.0.0.1:{coordinator.port}")
    with Client(config=several) as client:
        assert client.status().leader == "here"


def test_errors_of_the_coordinator_arrive_as_they_were_raised(coordinator: FakeCoordinator, client: Client) -> None:
    with pytest.raises(NotFound, match="job nobody") as caught:
        client.job("nobody")
    assert caught.value.hint
    job = client.job(coordinator.state.add("j", phase="finished").id)
    with pytest.raises(Conflict):
        job.checkpoint()


def test_an_aborted_attempt_says_why_by_the_class_that_it_was(coordinator: FakeCoordinator, client: Client) -> None:
    coordinator.state.add("j")
    refusal = worker_pb2.Refusal(what="pid 7, descriptor 5", why="io_uring", cure="set USE_LIBUV=0")
    coordinator.state.attempt = pb.Attempt(
        phase="aborted", reason="pod 0 cannot be saved", error_kind="Refused", refusals=[refusal, refusal]
    )
    with pytest.raises(Refused, match="pod 0 cannot be saved") as caught:
        client.job("j").checkpoint()
    assert "USE_LIBUV=0" in caught.value.hint
    coordinator.state.attempt = pb.Attempt(phase="aborted", reason="too late")
    with pytest.raises(AttemptAborted, match="too late"):
        client.job("j").park()


def test_logs_go_on_where_a_broken_stream_stopped(coordinator: FakeCoordinator, client: Client) -> None:
    coordinator.state.add("j")
    coordinator.state.logs = [worker_pb2.LogChunk(rank=0, data=b"%d\n" % n, offset=n + 1, pod=0) for n in range(5)]
    coordinator.state.break_streams_after = 3
    assert b"".join(piece.data for piece in client.job("j").logs()) == b"0\n1\n2\n3\n4\n"
    assert [position.offset for position in coordinator.asked("ReadLogs")[1].positions] == [3]


def test_no_event_is_told_twice_or_left_out_when_the_stream_breaks(
    coordinator: FakeCoordinator, client: Client
) -> None:
    coordinator.state.add("j")
    # The same moment twice, and a clock that went back: another coordinator took over.
    coordinator.state.events = [
        pb.JobEvent(time=moment, kind="k", sentence=text)
        for moment, text in ((5.0, "b"), (5.0, "a"), (4.0, "c"), (6.0, "d"))
    ]
    coordinator.state.break_streams_after = 3
    assert [event.sentence for event in client.job("j").events()] == ["b", "a", "c", "d"]


def test_a_job_that_ends_before_it_was_brought_back_is_an_error(coordinator: FakeCoordinator, client: Client) -> None:
    message = coordinator.state.add("j", phase="parked")
    coordinator.state.fails["WatchJob"] = []
    job = client.job("j")
    real = coordinator.state.change
    coordinator.state.change = lambda job, phase, exit_code=None: real(job, "failed")  # type: ignore[method-assign]
    message.reason = "no node is left"
    with pytest.raises(Conflict, match="no node is left"):
        job.restore()


def test_a_command_beside_a_rank_gets_its_input_and_gives_its_exit_code(
    coordinator: FakeCoordinator, client: Client
) -> None:
    coordinator.state.add("j")
    heard: list[tuple[bytes, bool]] = []

    async def typed() -> AsyncIterator[bytes]:
        yield b"typed"

    code = client.job("j").exec(["cat", "-"], stdin=typed(), output=lambda data, err: heard.append((data, err)))
    assert code == 3 and heard == [(b"cat -\n", False), (b"typed", True)]


def test_a_full_disk_of_a_daemon_and_a_folder_that_cannot_be_written_are_said_in_a_line(
    coordinator: FakeCoordinator, client: Client
) -> None:
    coordinator.state.add("j")
    coordinator.state.fails["ListNodes"] = [OSError(errno.ENOSPC, "No space left on device", "/var/lib/x")]
    with pytest.raises(NoCapacity, match=r"no space is left .*/var/lib/x"):
        client.nodes()
    coordinator.state.files = [worker_pb2.FilePart(path="out/a", mode=0o100644, data=b"x", last=True)]
    with pytest.raises(MoorageError, match=r"/proc/nothing.* cannot be written"):
        client.job("j").pull(to="/proc/nothing")


def test_pulled_files_stay_below_the_folder(coordinator: FakeCoordinator, client: Client, tmp_path: Path) -> None:
    coordinator.state.add("j")
    coordinator.state.files = [
        worker_pb2.FilePart(path="out/a", mode=0o100644, modified=5.0, data=b"one "),
        worker_pb2.FilePart(path="out/a", data=b"two", last=True),
        worker_pb2.FilePart(path="out/l", mode=0o120777, link_target="a", last=True),
    ]
    assert client.job("j").pull(to=tmp_path / "to") == ["out/a", "out/l"]
    assert (tmp_path / "to/out/l").read_text() == "one two"
    assert (tmp_path / "to/out/a").stat().st_mtime == 5.0
    for path in ("../evil", "/evil", "out/../../evil"):
        coordinator.state.files = [worker_pb2.FilePart(path=path, mode=0o100644, last=True)]
        with pytest.raises(MoorageError, match="leaves the folder"):
            client.job("j").pull(to=tmp_path / "to")
    (tmp_path / "to/link").symlink_to("/tmp")
    coordinator.state.files = [worker_pb2.FilePart(path="link/evil", mode=0o100644, last=True)]
    with pytest.raises(MoorageError, match="symbolic link"):
        client.job("j").pull(to=tmp_path / "to")


def test_a_pull_that_broke_in_the_middle_of_a_file_begins_that_file_anew(
    coordinator: FakeCoordinator, client: Client, tmp_path: Path
) -> None:
    coordinator.state.add("j")
    coordinator.state.files = [
        worker_pb2.FilePart(path="a", mode=0o100644, data=b"all", last=True),
        worker_pb2.FilePart(path="b", mode=0o100600, data=b"one "),
        worker_pb2.FilePart(path="b", data=b"two", last=True),
    ]
    coordinator.state.break_streams_after = 2
    assert client.job("j").pull(to=tmp_path / "to") == ["a", "b"]
    assert (tmp_path / "to/b").read_text() == "one two"


def test_the_asynchronous_client_watches_a_job(coordinator: FakeCoordinator) -> None:
    message = coordinator.state.add("j")

    async def follow() -> list[str]:
        async with AsyncClient(config=coordinator.config) as client:
            phases = []
            async for info in (await client.job("j")).watch():
                phases.append(info.phase)
                if len(phases) == 1:
                    coordinator.soon(lambda: coordinator.state.change(message, "finished", exit_code=0))
            return phases

    assert asyncio.run(follow()) == ["running", "finished"]


def test_waiting_for_too_short_a_time_raises_timeout(coordinator: FakeCoordinator, client: Client) -> None:
    coordinator.state.add("j")
    with pytest.raises(TimeoutError):
        client.job("j").wait(timeout=0.1)
