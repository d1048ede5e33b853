"""A guard is killed; another takes its pod over: at rest, and at every failpoint of every operation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from moorage.errors import MoorageError, Unavailable
from moorage.worker.guard.client import GuardClient
from moorage.worker.guard.files import guard_alive
from tests.support.pod_lab import PodLab, kill_guard, pod_lab, run, shell, until, until_event

pytestmark = pytest.mark.root

#: Numbered lines, as fast as they go: far more than the pipe holds while nobody reads.
FLOOD = "seq 1 300000; touch /written; exec sleep 1000"


def test_a_new_guard_reads_on_and_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell(FLOOD))
            guard = await lab.guard()
            init = (await guard.start()).status.init_pid
            for size in (10_000, 200_000, 600_000):
                # Killed while it reads, again and again.
                await until(lambda size=size: (lab.folder / "journal").stat().st_size > size)  # type: ignore[misc]
                kill_guard(lab.folder)
                guard = await lab.guard()
                assert (await guard.status()).init_pid == init
            await until((lab.root / "written").exists)
            await until(lambda: lab.text().endswith("\n300000\n"))
            assert lab.text() == "".join(f"{number}\n" for number in range(1, 300001))
            assert (await guard.status()).lost_frames == 0

    run(test)


def test_output_waits_without_a_guard_and_so_does_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("while [ ! -e /go ]; do sleep 0.02; done; seq 1 200000; exit 9"))
            guard = await lab.guard()
            await guard.start()
            kill_guard(lab.folder)
            (lab.root / "go").touch()
            await asyncio.sleep(0.5)
            assert lab.text() == ""
            guard = await lab.guard()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert (ended.status.exit_code, ended.status.lost_frames) == (9, 0)
            assert lab.text() == "".join(f"{number}\n" for number in range(1, 200001))
            assert not lab.cgroup.folder.exists()

    run(test)


def test_an_adopted_pod_that_is_killed_has_the_code_of_a_kill(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("sleep 1000"))
            guard = await lab.guard()
            init = (await guard.start()).status.init_pid
            kill_guard(lab.folder)
            guard = await lab.guard()
            os.kill(init, signal.SIGKILL)
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert (ended.status.exit_code, ended.status.killed) == (137, False)

    run(test)


def test_a_pod_that_ended_while_no_guard_lived_is_told_of_by_the_next(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("sleep 1000"))
            guard = await lab.guard()
            init = (await guard.start()).status.init_pid
            kill_guard(lab.folder)
            os.kill(init, signal.SIGKILL)
            await until(lambda: not lab.procs())
            guard = await lab.guard()
            status = await guard.status()
            assert (status.phase, status.exit_code) == ("exited", 137)
            kill_guard(lab.folder)
            assert (await (await lab.guard()).status()).exit_code == 137

    run(test)


def test_two_guards_never_serve_one_pod(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("sleep 1000"))
            guards = await asyncio.gather(*(lab.guard() for _ in range(4)), return_exceptions=True)
            served = [guard for guard in guards if isinstance(guard, GuardClient)]
            assert len({(await guard.status()).guard_pid for guard in served}) == 1
            assert all("another guard serves" in str(each) for each in guards if isinstance(each, Exception))

    run(test)


def test_a_caller_hears_that_the_guard_died(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("sleep 1000"))
            guard = await lab.guard()
            await guard.start()
            events = guard.events()
            assert (await anext(events)).kind == "status"
            kill_guard(lab.folder)
            with pytest.raises(Unavailable):
                await guard.freeze("test")
            with pytest.raises(StopAsyncIteration):
                await anext(events)
            with pytest.raises(Unavailable):
                await GuardClient.connect(lab.folder)

    run(test)


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_guard_killed_as_its_pod_ends_is_followed_by_one_that_knows_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "failpoints").mkdir()
    monkeypatch.setenv("MOORAGE_FAILPOINTS_DIR", str(tmp_path / "failpoints"))

    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("echo last; exit 7"))
            guard = await lab.guard()
            (tmp_path / "failpoints" / f"guard.ended.{step}").write_text("kill")
            with contextlib.suppress(Unavailable):
                await guard.start()
            await until(lambda: not guard_alive(lab.folder))
            status = await (await lab.guard()).status()
            assert (status.phase, status.exit_code, lab.text()) == ("exited", 7, "last\n")
            assert not lab.cgroup.folder.exists()

    run(test)


async def killed_at(lab: PodLab, point: str, operation: str) -> None:
    """Carry out an operation whose guard dies at the failpoint, then give the pod a new guard."""
    guard = await lab.guard()
    (lab.base / "failpoints" / point).write_text("kill")
    try:
        match operation:
            case "start":
                await guard.start()
            case "freeze":
                await guard.freeze("test")
            case "thaw":
                await guard.thaw("test")
            case "checkpoint":
                await guard.checkpoint(lab.folder / "images", work=lab.folder / "criu")
            case "restore":
                await guard.restore(lab.base / "images", work=lab.folder / "criu")
            case "kill":
                await guard.kill()
    except Unavailable:
        pass
    await until(lambda: not guard_alive(lab.folder))
    assert not (lab.base / "failpoints" / point).exists(), f"{point} was not reached"
    await lab.guard()


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_guard_killed_in_an_operation_leaves_a_pod_that_the_next_can_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    (tmp_path / "failpoints").mkdir()
    monkeypatch.setenv("MOORAGE_FAILPOINTS_DIR", str(tmp_path / "failpoints"))

    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"))
            for name in ("start", "freeze", "checkpoint", "thaw", "kill"):
                await killed_at(lab, f"guard.{name}.{step}", name)
                guard = await lab.guard()
                status = await guard.status()
                assert not status.lost_frames
                match name:  # the same order again, as a worker repeats what it has no answer to
                    case "start":
                        await guard.start()
                        await until(lambda: len(lab.text()) > 20)
                    case "freeze":
                        assert (await guard.freeze("test")).status.phase == "frozen"
                    case "checkpoint":
                        assert status.phase == "frozen"
                        done = await guard.checkpoint(lab.folder / "images", work=lab.folder / "criu")
                        assert done.status.phase == "frozen"
                    case "thaw":
                        assert (await guard.thaw("test")).status.phase == "running"
                        before = len(lab.text())
                        await until(lambda before=before: len(lab.text()) > before)  # type: ignore[misc]
                    case "kill":
                        assert (await guard.kill()).status.phase == "exited"
            numbers = [int(line) for line in lab.text().splitlines()]
            assert numbers == list(range(1, len(numbers) + 1))

    run(test)


def test_a_guard_killed_while_runc_restores_leaves_a_frozen_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failpoints").mkdir()
    monkeypatch.setenv("MOORAGE_FAILPOINTS_DIR", str(tmp_path / "failpoints"))

    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: len(lab.text()) > 20)
            await guard.freeze("test")
            await guard.checkpoint(tmp_path / "images", work=lab.folder / "criu")
            again = lab.successor()
            await guard.kill()
            second = await again.guard()
            restoring = asyncio.create_task(second.restore(tmp_path / "images", work=again.folder / "criu"))
            await until(lambda: bool(again.procs()))  # CRIU is at work in the pod's cgroup
            kill_guard(again.folder)
            with pytest.raises(MoorageError):
                await restoring
            second = await again.guard()
            status = await second.status()
            assert (status.phase, status.sequence) == ("frozen", (await second.drain()).status.sequence)
            before = again.text()
            await second.thaw("released")
            await until(lambda: len(again.text()) > len(before) + 20)
            numbers = [int(line) for line in again.text().splitlines()]
            assert numbers == list(range(1, len(numbers) + 1))

    run(test)
