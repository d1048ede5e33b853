"""The deadline passes: the pod stands still and is cut off, and what becomes of it is what etcd says."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.barrier.client import EtcdClient
from moorage.errors import Fenced, MoorageError
from moorage.records import IncarnationRecord, Keys
from moorage.runtime import programs
from moorage.worker.guard.kernel import now
from moorage.worker.guard.messages import EtcdAccess
from tests.support.etcd import Etcd
from tests.support.pod_lab import PodLab, kill_guard, pod_lab, run, shell, until, until_event

pytestmark = pytest.mark.root

COUNTER = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"
KEY = Keys("test").incarnation("job")


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as server:
        yield server


async def record(etcd: Etcd, incarnation: int, *, placed: bool = True) -> None:
    """Make etcd name this incarnation as the job's; 0: no such job."""
    async with EtcdClient(etcd.endpoints) as client:
        if incarnation == 0:
            await client.delete(KEY)
        else:
            value = IncarnationRecord(incarnation=incarnation, placement=["n1"] if placed else [])
            await client.put(KEY, msgspec.json.encode(value))


@contextlib.asynccontextmanager
async def running(tmp_path: Path, etcd: Etcd | None) -> AsyncIterator[PodLab]:
    """A pod that runs, with a host interface that carries its traffic."""
    access = EtcdAccess(endpoints=etcd.endpoints if etcd else ["127.0.0.1:1"])
    async with pod_lab(tmp_path, etcd=access) as lab:
        lab.links = [lab.name]
        _ip("link", "add", lab.name, "type", "veth", "peer", "name", "eth0", "netns", lab.name)
        try:
            _ip("link", "set", lab.name, "up")
            lab.lay(shell(COUNTER))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: len(lab.text()) > 20)
            yield lab
        finally:
            _ip("link", "del", lab.name)


def _ip(*arguments: str) -> str:
    command = [str(programs.find("ip")), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def is_up(lab: PodLab) -> bool:
    return ",UP" in _ip("link", "show", "dev", lab.name)


async def let_pass(lab: PodLab) -> None:
    """Replace the guard by one whose deadline passes at once, and wait until it has fenced the pod."""
    kill_guard(lab.folder)
    guard = await lab.guard(deadline=now() + 0.2)
    event = await until_event(guard, lambda event: event.status.fenced and event.status.phase == "frozen")
    assert event.status.cut


def test_a_pod_whose_deadline_passes_stands_still_without_network(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, None) as lab:
            assert is_up(lab)
            await let_pass(lab)
            assert not is_up(lab)
            guard = await lab.guard()
            written = (await guard.status()).sequence
            # A new promise alone frees nothing: etcd does not answer.
            await guard.deadline(now() + 600)
            await asyncio.sleep(0.3)
            await guard.thaw("the worker may say so, the fence holds")
            status = await guard.status()
            assert (status.phase, status.fenced, status.sequence) == ("frozen", True, written)

    run(test)


def test_a_promise_and_the_confirmed_incarnation_free_it_again(tmp_path: Path, etcd: Etcd) -> None:
    async def test() -> None:
        await record(etcd, 1)
        async with running(tmp_path, etcd) as lab:
            await let_pass(lab)
            guard = await lab.guard()
            await asyncio.sleep(0.5)  # etcd has answered by now: that alone frees nothing either
            assert (await guard.status()).fenced
            await guard.deadline(now() + 600)
            await until_event(guard, lambda event: event.status.phase == "running")
            assert not (await guard.status()).fenced
            assert is_up(lab)
            before = len(lab.text())
            await until(lambda: len(lab.text()) > before + 20)

    run(test)


def test_a_pod_ordered_to_stand_stays_frozen_when_the_fence_is_lifted(tmp_path: Path, etcd: Etcd) -> None:
    async def test() -> None:
        await record(etcd, 1)
        async with running(tmp_path, etcd) as lab:
            await (await lab.guard()).freeze("attempt 3")
            await let_pass(lab)
            guard = await lab.guard()
            await guard.deadline(now() + 600)
            event = await until_event(guard, lambda event: not event.status.fenced)
            assert event.status.phase == "frozen"
            await guard.thaw("resume")
            await until_event(guard, lambda event: event.status.phase == "running")

    run(test)


@pytest.mark.parametrize(("incarnation", "placed"), [(2, True), (0, True), (1, False)])
def test_a_pod_that_was_given_up_is_killed_with_no_worker_there(
    tmp_path: Path, etcd: Etcd, incarnation: int, placed: bool
) -> None:
    async def test() -> None:
        await record(etcd, 1)
        async with running(tmp_path, etcd) as lab:
            await record(etcd, incarnation, placed=placed)
            kill_guard(lab.folder)
            guard = await lab.guard(deadline=now() + 0.2)
            event = await until_event(guard, lambda event: event.status.phase == "exited")
            assert event.status.killed
            assert "this is incarnation 1" in event.status.reason
            assert not lab.procs()

    run(test)


def test_a_fenced_pod_stays_fenced_when_its_guard_is_replaced(tmp_path: Path, etcd: Etcd) -> None:
    async def test() -> None:
        await record(etcd, 0)
        async with running(tmp_path, None) as lab:
            await let_pass(lab)
            kill_guard(lab.folder)
            guard = await lab.guard()  # with a deadline far ahead, and still no etcd
            status = await guard.status()
            assert (status.phase, status.fenced) == ("frozen", True)
            await asyncio.sleep(0.3)
            assert (await guard.status()).cut

    run(test)


def test_a_pod_cannot_start_after_its_deadline(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell(COUNTER))
            guard = await lab.guard(deadline=0.0)
            await until_event(guard, lambda event: event.status.fenced)
            with pytest.raises(Fenced):
                await guard.start()
            assert not lab.procs()

    run(test)


def test_an_old_promise_that_comes_late_takes_nothing_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path, None) as lab:
            guard = await lab.guard()
            promised = (await guard.status()).deadline
            await guard.deadline(now() - 5)
            assert (await guard.status()).deadline == promised
            await guard.deadline(promised + 5)
            status = await guard.status()
            assert (status.deadline, status.fenced) == (promised + 5, False)

    run(test)


@pytest.mark.parametrize("point", ["guard.fence.before", "guard.fence.after", "guard.lift.before", "guard.lift.after"])
def test_a_guard_killed_while_it_fences_is_followed_by_one_that_goes_on(
    tmp_path: Path, etcd: Etcd, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    (tmp_path / "failpoints").mkdir()
    monkeypatch.setenv("MOORAGE_FAILPOINTS_DIR", str(tmp_path / "failpoints"))
    armed = tmp_path / "failpoints" / point

    async def test() -> None:
        await record(etcd, 1)
        async with running(tmp_path, etcd) as lab:
            kill_guard(lab.folder)
            armed.write_text("kill")
            with contextlib.suppress(MoorageError):  # it may die before it is ready
                guard = await lab.guard(deadline=now() + 0.2)
                await until_event(guard, lambda event: event.status.fenced)
                await guard.deadline(now() + 600)
            await until(lambda: not armed.exists())
            kill_guard(lab.folder)
            guard = await lab.guard(deadline=now() + 0.2)
            await until_event(guard, lambda event: event.status.fenced and event.status.phase == "frozen")
            assert not is_up(lab)
            await guard.deadline(now() + 600)
            await until_event(guard, lambda event: event.status.phase == "running")
            assert is_up(lab)

    run(test)
