"""A GPU broker that is killed at any step: the next one has the job's device memory, or says that it has not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from moorage.errors import DeviceFailed, MoorageError, NotFound, Unavailable
from moorage.store import Store
from moorage.store_settings import StoreSettings
from moorage.worker.gpu import kept
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.broker import Broker, Devices
from moorage.worker.gpu.device import CHUNK
from moorage.worker.gpu.kept import Kept
from tests.support.fake_gpu import FakeDevice, FakeDriver, FakeProcess, content, memory

NONE = StoreSettings()
DATA = random.Random(1).randbytes(3 * CHUNK)
STEPS = ("begin", "quiesce", "capture", "back", "persist")


class Rig:
    """Brokers one after the other, with one keeper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device = FakeDevice()
        self.location = str(folder / "store")
        Store.open(self.location, create=True)
        self.kept = Kept(folder)
        self.broker = self._new()

    def _new(self) -> Broker:
        return Broker(Devices(lambda _: self.device, lambda _: 0), FakeDriver, self.kept)  # type: ignore[arg-type]

    async def attach(self, pod: str = "pod") -> Path:
        path = self.folder / f"{pod}.sock"
        await self.broker.do(m.Attach(pod, str(path), 1, ["GPU-1"]))
        return path

    async def known(self, size: int) -> None:
        async with asyncio.timeout(20):
            while (await self.broker.do(m.Look("pod"))).bytes_total != size:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """What a killed broker leaves: connections and descriptors are gone, nobody was told; then another one."""
        for pod in self.broker._pods.values():
            lost = pod.memory
            lost._kept = None
            if pod.writing is not None:
                await asyncio.gather(pod.writing, return_exceptions=True)
            tasks = [*lost._serving, *([lost._accepting] if lost._accepting else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for block in lost.blocks.values():
                block.close()
            if pod.saving is not None:
                pod.saving[1].close()
        self.kept.close()
        self.kept = Kept(self.folder)
        self.broker = self._new()

    def orders(self, attempt: int) -> dict[str, m.Request]:
        return {
            "begin": m.Begin("pod", attempt, self.location, NONE, "test", 0),
            "quiesce": m.Quiesce("pod", attempt, 5.0),
            "capture": m.Capture("pod", attempt),
            "back": m.BringBack("pod", 5.0),
            "persist": m.Persist("pod", attempt),
        }

    async def save(self, attempt: int, *, until: str = "persist") -> m.Answer:
        """A checkpoint, or the part of it up to and with the step ``until``."""
        for name, order in self.orders(attempt).items():
            answer = await self.broker.do(order)
            if name == until:
                break
        if until == "persist":
            await self.broker.do(m.Forget("pod", attempt))
        return answer

    def keeper(self) -> int:
        """The keeper's pid; 0: there is none."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                if b"moorage.worker.gpu.keeper" in words and os.fsencode(self.folder) + b"/keeper" in words:
                    return int(entry.name)
        return 0


def run(tmp_path: Path, test: Callable[[Rig], Awaitable[None]]) -> None:
    @contextlib.asynccontextmanager
    async def rig() -> AsyncIterator[Rig]:
        made = Rig(tmp_path)
        try:
            yield made
        finally:
            for pod in list(made.broker._pods):
                await made.broker.do(m.Detach(pod))
            made.kept.close()
            async with asyncio.timeout(20):
                while made.keeper():  # noqa: ASYNC110  # it holds nothing any more, and ends by itself
                    await asyncio.sleep(0.01)

    async def bounded() -> None:
        FakeDriver.states.clear()
        async with asyncio.timeout(60), rig() as made:
            await test(made)

    asyncio.run(bounded())


def test_a_broker_killed_at_any_step_costs_at_most_the_attempt(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach(), {1: memory(DATA)})
        await rig.known(len(DATA))
        await rig.save(1)  # from here on the process has imported memory, which it cannot export again
        for attempt, step in enumerate(STEPS, start=2):
            await rig.save(attempt, until=step)
            await rig.kill()
            if step in ("capture", "back"):  # what the worker asks next
                with pytest.raises(NotFound):
                    await rig.broker.do(m.Persist("pod", attempt))
            # Aborted: the worker starts a broker, has it attached, and wants the memory back.
            await rig.attach()
            await rig.broker.do(m.BringBack("pod", 5.0))
            assert (process.level, process.evicted) == (0, False), step
            assert content(process.blocks[1]) == DATA, step
            assert (await rig.broker.do(m.Look("pod"))).objections == [], step
        saved = await rig.save(100)
        assert saved.memory is not None and [block.size for block in saved.memory.blocks] == [len(DATA)]
        assert saved.bytes_new == 0
        await process.end()

    run(tmp_path, test)


def test_a_broker_killed_during_a_restore_leaves_what_it_had_filled(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach(), {1: memory(DATA)})
        await rig.known(len(DATA))
        saved = await rig.save(1)
        await process.end()
        await rig.broker.do(m.Detach("pod"))
        path = await rig.attach("next")
        assert saved.memory is not None
        await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, saved.contents))
        await rig.kill()
        await rig.attach("next")
        with pytest.raises(Unavailable, match=r"process 77 \(fake\) did not connect"):
            await rig.broker.do(m.BringBack("next", 0.1))
        restored = process.restored(path)
        await rig.broker.do(m.BringBack("next", 5.0))
        assert content(restored.blocks[1]) == DATA
        await restored.end()

    run(tmp_path, test)


def test_a_keeper_that_is_killed_is_followed_by_one_that_knows_all(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach(), {1: memory(DATA)})
        await rig.known(len(DATA))
        await rig.save(1)
        await _killed(rig.keeper())
        await rig.save(2, until="quiesce")  # notices it
        rig.broker._pods["pod"].memory._note()
        await rig.kill()
        await rig.attach()
        await rig.broker.do(m.BringBack("pod", 5.0))
        assert content(process.blocks[1]) == DATA
        await process.end()

    run(tmp_path, test)


def test_memory_that_neither_has_any_more_is_missed_by_name(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach(), {1: memory(DATA)})
        await rig.known(len(DATA))
        await rig.save(1)
        await rig.save(2, until="quiesce")
        keeper = rig.keeper()
        rig.kept.close()
        await _killed(keeper)
        await rig.kill()
        await rig.attach()
        async with asyncio.timeout(10):
            while not rig.broker._pods["pod"].memory.processes:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        with pytest.raises(DeviceFailed, match="the memory of block 1 is not here"):
            await rig.broker.do(m.BringBack("pod", 5.0))
        found = (await rig.broker.do(m.Look("pod"))).objections
        assert [str(one.api) for one in found] == ["memory whose descriptor is not here any more"]
        with pytest.raises(MoorageError):
            await rig.save(3)
        await process.end()

    run(tmp_path, test)


def test_the_memory_of_a_pod_that_ends_without_a_broker_does_not_live_on(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach(), {1: memory(DATA)})
        await rig.known(len(DATA))
        await process.end()
        await rig.kill()
        assert rig.keeper()
        kept.forget(tmp_path, "pod")

    run(tmp_path, test)


async def _killed(pid: int) -> None:
    assert pid
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while _has_files(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _has_files(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{pid}/fd").iterdir())
    return False
