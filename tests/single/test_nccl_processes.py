"""The worker's side of a cut, with real processes whose operations really wait for each other (the NCCL stand-in)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moorage.barrier import clock
from moorage.errors import DeviceFailed, Unavailable
from moorage.nccl_quiesce import control, driver, rebuild
from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.model import Abort, Accept, Order, Snapshot
from moorage.nccl_quiesce.rounds import Pace, Rounds
from moorage.worker.nccl import pod as pod_module
from moorage.worker.nccl.pod import PodProcesses
from tests.programs.nccl_ranks import expected_digest, groups

_PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "nccl_ranks.py"
_WORLD = 3
_SECONDS = 30.0


class Cutter(Cut):
    picture = rebuild.Survivors


class Fleet:
    """What the coordinator does, on one pod and without a network."""

    def __init__(self, pod: PodProcesses) -> None:
        self.pod = pod
        self.known: dict[int, control.Process] = {}

    async def look(self) -> None:
        await self.pod.back(_SECONDS, _pids)
        self.known = await self.pod.look()
        self.by_rank = {process.rank: number for number, process in self.known.items()}

    async def exchange(self, rank: int, order: Order) -> Snapshot | None:
        number = self.by_rank[rank]
        answers = await self.pod.round({number: control.encode(order)}, 5.0)
        if number not in answers:
            return None
        return msgspec.structs.replace(control.decode(answers[number], Snapshot), rank=rank)

    async def step(self, name: str, orders: Mapping[int, Any]) -> dict[int, bytes]:
        return await self.pod.step(name, {n: control.encode(order) for n, order in orders.items()}, _SECONDS)

    def rounds(self, seconds: float) -> Rounds:
        newest = max(process.report.attempt for process in self.known.values())
        cut = Cutter(Settings(deadline=seconds), seed=newest)
        return Rounds(self.by_rank, attempt=newest + 1, cut=cut, pace=Pace(again=1.0))

    async def cut(self, seconds: float = _SECONDS) -> Accept | Abort:
        await self.look()
        rounds = self.rounds(seconds)
        result = await driver.run(rounds, self, now=clock.now)
        if isinstance(result, Accept):
            await self.look()
            await self.step("destroy", rebuild.parts(result.plan, rounds.attempt, self.known))
        return result

    async def make(self) -> rebuild.Rebuild:
        """Make all anew, gates stay closed."""
        await self.look()
        plan = rebuild.plan(self.known)
        assert plan is not None
        await self.step("destroy", plan.destroy(self.known))
        made = await self.step("ids", plan.names())
        ids = {name: uid for body in made.values() for name, uid in control.decode(body, control.Ids).ids}
        await self.step("rebuild", plan.make(ids))
        return plan

    async def open(self) -> None:
        await self.look()
        await driver.release(self.rounds(_SECONDS), self, now=clock.now)


async def _pids() -> set[int]:
    return {int(name) for name in await asyncio.to_thread(os.listdir, "/proc") if name.isdigit()}


@contextmanager
def ranks(folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    started = []
    for rank in range(_WORLD):
        extra = {"RANK": str(rank), "WORLD_SIZE": str(_WORLD), "MASTER_ADDR": "127.0.0.1"}
        env = os.environ | extra | {"MOORAGE_NCCL_SOCKET": str(folder / "sock")}
        command = [sys.executable, str(_PROGRAM), "--live", str(folder)]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


async def steps(folder: Path, more: int) -> int:
    """Wait until every rank has made some steps more; how many the foremost has made."""

    def counts() -> list[int]:
        paths = [folder / f"witness-{rank}" for rank in range(_WORLD)]
        return [len(path.read_text().splitlines()) if path.exists() else 0 for path in paths]

    wanted = [count + more for count in counts()]
    async with asyncio.timeout(_SECONDS):
        while any(count < least for count, least in zip(counts(), wanted, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return max(counts())


def test_cut_torn_down_let_go_of_made_anew_and_right_in_the_end(tmp_path: Path) -> None:
    async def main() -> list[str]:
        pod = PodProcesses(tmp_path / "sock", 7, "the pod")
        await pod.listen()
        fleet = Fleet(pod)
        with ranks(tmp_path) as processes:
            await steps(tmp_path, 5)
            # A cut after which all goes on as it was made: torn down, let go of, back, made anew.
            for _ in range(3):
                found = await fleet.cut()
                assert isinstance(found, Accept) and len(found.plan.rebuild) == len(groups(_WORLD))
                assert all(process.closed and not process.report.undrained for process in fleet.known.values())
                # Whoever asks again, it is done already; an order to let go may be repeated as well.
                assert isinstance(await fleet.cut(), Accept)
                await pod.part()
                await pod.part()
                assert not pod.ends()
                await pod.listen()
                plan = await fleet.make()
                assert plan.order == found.plan.rebuild
                # Broken off before the gates opened, and begun again.
                await fleet.look()
                assert rebuild.plan(fleet.known) is None
                await fleet.open()
                await steps(tmp_path, 3)
            # One rank does nothing: it is named with what it owes, and all runs on.
            (tmp_path / "stall-1").touch()
            found = await fleet.cut(1.5)
            for _ in range(20):
                if isinstance(found, Abort) and found.behind:
                    break
                if isinstance(found, Accept):
                    await fleet.make()
                    await fleet.open()
                await asyncio.sleep(0.1)
                found = await fleet.cut(1.5)
            assert isinstance(found, Abort)
            short = next(short for short in found.behind if short.rank == 1)
            assert short.count < short.need
            assert str(short).startswith(f"rank 1 is behind on communicator {short.lane.communicator} as member ")
            assert str(short).endswith(f": {short.count} of {short.need} collectives")
            assert str(found.behind[0]) in found.reason
            (tmp_path / "stall-1").unlink()
            # Who gave an order up does not know whether it was obeyed; the next one asks and goes on.
            await fleet.look()
            newest = max(process.report.attempt for process in fleet.known.values())
            given_up = [asyncio.create_task(fleet.exchange(rank, Order(newest + 1, 1, "cut"))) for rank in (0, 1)]
            await asyncio.sleep(0)
            for task in given_up:
                task.cancel()
            await asyncio.gather(*given_up, return_exceptions=True)
            await fleet.open()
            await steps(tmp_path, 1)
            # A worker that has just come knows nobody until they are back.
            await pod.close()
            pod.expected = dict(pod.known()[0])
            pod.processes.clear()
            await pod.listen()
            assert isinstance(await fleet.cut(), Accept)
            await fleet.make()
            await fleet.open()
            last = await steps(tmp_path, 1) + 30
            (tmp_path / "until.new").write_text(str(last))
            (tmp_path / "until.new").rename(tmp_path / "until")
            outputs = [await asyncio.to_thread(process.communicate) for process in processes]
            await pod.close()
            return [f"{last} {output[0]}" for output in outputs]

    for rank, text in enumerate(asyncio.run(main())):
        last, *rest = text.split()
        fields = dict(field.split("=") for field in rest[1:])
        assert fields["steps"] == last and fields["digest"] == expected_digest(_WORLD, int(last), rank)


def test_gates_are_opened_when_nobody_leads_and_a_rebuild_without_a_partner_is_called_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_module, "SILENCE_SECONDS", 0.5)

    async def main() -> None:
        pod = PodProcesses(tmp_path / "sock", 7, "the pod")
        await pod.listen()
        fleet = Fleet(pod)
        with ranks(tmp_path) as processes:
            await steps(tmp_path, 3)
            # A coordinator that dies in the midst of a cut: the job runs on by itself, and who follows makes a new one.
            await fleet.look()
            newest = max(process.report.attempt for process in fleet.known.values())
            for rank in (0, 1, 2):
                assert await fleet.exchange(rank, Order(newest + 1, 1, "cut")) is not None
            await steps(tmp_path, 3)
            await fleet.look()
            assert not any(process.closed for process in fleet.known.values())
            assert await fleet.exchange(0, Order(newest + 1, 2, "cut")) is None
            # Once the cut is accepted a partner may have lost its communicators: gates stay closed, here and at a
            # worker that follows.
            await fleet.look()
            rounds = fleet.rounds(_SECONDS)
            assert isinstance(await driver.run(rounds, fleet, now=clock.now), Accept)
            await fleet.step("keep", dict.fromkeys(fleet.known, control.Keep(rounds.attempt)))
            await pod.close()
            follower = PodProcesses(tmp_path / "sock", 7, "the pod")
            follower.expected, follower.kept = dict(pod.known()[0]), pod.kept
            await follower.listen()
            fleet = Fleet(follower)
            await fleet.look()
            await asyncio.sleep(1.2)
            assert all(process.closed for process in (await follower.look()).values())
            # A process that ends while all are made anew keeps the others no longer than it takes to know.
            assert isinstance(await fleet.cut(), Accept)
            await fleet.look()
            plan = rebuild.plan(fleet.known)
            assert plan is not None
            await fleet.step("destroy", plan.destroy(fleet.known))
            made = await fleet.step("ids", plan.names())
            ids = {name: uid for body in made.values() for name, uid in control.decode(body, control.Ids).ids}
            orders = plan.make(ids)
            lost = fleet.by_rank[2]
            waiting = asyncio.create_task(fleet.step("rebuild", {n: o for n, o in orders.items() if n != lost}))
            await asyncio.sleep(0.3)
            processes[2].kill()
            await asyncio.to_thread(processes[2].wait)
            async with asyncio.timeout(_SECONDS / 2):
                plan = await fleet.make()
            with pytest.raises(DeviceFailed, match=r"called off|the other end is gone"):
                await waiting
            assert plan.widowed and plan.order and len(fleet.known) == 2
            await follower.close()

    asyncio.run(main())


def test_who_does_not_come_back_is_named_and_who_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        pod = PodProcesses(tmp_path / "sock", 1, "pod 0 of job j1")
        pod.expected = {5: 17, 6: 18}

        async def one_is_there() -> set[int]:
            return {17}

        with pytest.raises(Unavailable, match="processes 17 are not back"):
            await pod.back(0.1, one_is_there)

        async def nobody_is_there() -> set[int]:
            return set()

        await pod.back(1.0, nobody_is_there)
        assert pod.expected == {}

    asyncio.run(main())
