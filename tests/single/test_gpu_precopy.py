"""Devices that are too full for a copy: what is copied ahead of the pause, and where copies go then."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import cast

import pytest

from moorage.errors import MoorageError, NoCapacity, NotFound
from moorage.worker.gpu import copies, precopy
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.blocks import SavedMemory
from moorage.worker.gpu.device import CHUNK, Region, Slot
from moorage.worker.gpu.parked import SPARE
from tests.support.fake_gpu import FakeDevice, FakeProcess, content, memory
from tests.support.gpu_rig import NONE, Rig, numbers, run


async def _is(rig: Rig, saved: m.Answer, process: FakeProcess, expected: bytes) -> None:
    """What was saved comes back as ``expected`` in another pod."""
    rig.device.room = 1 << 30
    path = await rig.attach("next")
    assert saved.memory is not None
    await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, saved.contents))
    restored = process.restored(path)
    await rig.broker.do(m.BringBack("next", 10.0))
    assert content(restored.blocks[1]) == expected
    await restored.end()
    await rig.broker.do(m.Detach("next"))


def test_what_has_no_room_on_the_device_goes_to_host_memory_and_then_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_DISK_SPARE", 0)
    monkeypatch.setattr(copies, "_DEVICE_PIECE", 2 * CHUNK)
    monkeypatch.setattr(copies, "_HOST_PIECE", 2 * CHUNK)

    async def test(rig: Rig) -> None:
        data = numbers(1, 11)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        rig.device.room = 4 * CHUNK  # of which one is spared
        rig.broker.host_room = lambda: SPARE + 3 * CHUNK
        seen: list[type] = []
        original = copies.Copier.copy

        def copy(self: copies.Copier, *arguments: object) -> Iterable[copies.Copy]:
            for one in original(self, *arguments):  # type: ignore[arg-type]
                seen.extend([type(one)] * len(one.names))
                yield one

        monkeypatch.setattr(copies.Copier, "copy", copy)
        saved = await rig.save("pod", 1, folder=str(tmp_path), precopy=False)
        assert seen == [copies.OnDevice] * 3 + [copies.InHost] * 3 + [copies.OnDisk] * 5
        assert saved.bytes_new == len(data)
        assert rig.device.pinned == 0 and rig.device.mapped == 0
        assert not [name for name in os.listdir(tmp_path) if name.startswith("device-memory-")]  # noqa: PTH208
        await _is(rig, saved, process, data)
        await process.end()

    run(tmp_path, test)


def test_a_pod_that_stops_is_saved_from_its_own_memory(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(2, 9)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        rig.device.room = 0
        rig.broker.host_room = lambda: 0
        await rig.begin("pod", 1, stops=True)
        await rig.broker.do(m.Quiesce("pod", 1, 5.0))
        await rig.broker.do(m.Capture("pod", 1))
        saved = await rig.broker.do(m.Persist("pod", 1))
        await rig.broker.do(m.Forget("pod", 1))
        assert (saved.bytes_new, rig.device.grain) == (len(data), 0)
        await rig.broker.do(m.Detach("pod"))
        assert rig.device.mapped == 0
        await _is(rig, saved, process, data)
        await process.end()

    run(tmp_path, test)


def test_a_stop_that_is_called_off_writes_nothing_of_the_memory_that_is_in_use_again(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(3, 9)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        begun, go_on, original = threading.Event(), threading.Event(), rig.device.to_host

        def to_host(slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None:
            begun.set()
            go_on.wait(10)
            original(slot, pieces)

        rig.device.to_host = to_host  # type: ignore[method-assign]
        await rig.begin("pod", 1, stops=True, precopy=False)
        await rig.broker.do(m.Quiesce("pod", 1, 5.0))
        await rig.broker.do(m.Capture("pod", 1))
        await asyncio.to_thread(begun.wait, 10)
        back = asyncio.create_task(rig.broker.do(m.BringBack("pod", 5.0)))
        await asyncio.sleep(0.05)
        assert process.evicted, "it has no memory as long as that is read"
        go_on.set()
        await back
        os.pwrite(process.blocks[1], b"it runs on", 0)
        assert process.level == 0
        with pytest.raises(NotFound, match="knows nothing of attempt 1"):
            await rig.broker.do(m.Persist("pod", 1))
        assert not list((tmp_path / "store" / "index").iterdir())
        assert not list((tmp_path / "store" / "packs").iterdir())
        saved = await rig.save("pod", 2)
        await _is(rig, saved, process, content(process.blocks[1]))
        await process.end()

    run(tmp_path, test)


def test_a_full_device_is_copied_ahead_through_a_small_buffer_while_the_job_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precopy, "_SETTLE_SECONDS", 0.0)

    async def test(rig: Rig) -> None:
        data = numbers(4, 12) + bytes(CHUNK)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        rig.device.room = 9 * CHUNK
        looks = iter(range(1 << 30))
        original = cast("Callable[[Sequence[Region], bytes], list[bytes]]", rig.device.digests)

        def digests(regions: Sequence[Region], key: bytes) -> list[bytes]:
            """The first chunk changes all the time, the third one once after it was sent."""
            number = next(looks)
            os.pwrite(process.blocks[1], b"%020d" % number, 100)
            if number == 6:
                os.pwrite(process.blocks[1], b"changed once", 2 * CHUNK)
            return original(regions, key)

        rig.device.digests = digests  # type: ignore[method-assign]
        await rig.begin("pod", 1)
        ahead = rig.broker._pods["pod"].ahead
        assert ahead is not None and ahead.mode == "before"
        assert ahead.rounds[0] == 12 * CHUNK and ahead.rounds[-1] <= 7 * CHUNK
        sent = rig.broker._pods["pod"].saving[1].bytes_ahead  # type: ignore[index]
        assert 5 * CHUNK <= sent <= 13 * CHUNK
        assert rig.device.grain == 2 * CHUNK and rig.device.mapped == 0, "a quarter of what is free, and given back"
        rig.device.digests = original  # type: ignore[method-assign,assignment]
        saved = await rig.save("pod", 1)
        assert saved.memory is not None and saved.memory.bytes_new == 12 * CHUNK
        assert saved.bytes_new >= 12 * CHUNK
        await _is(rig, saved, process, content(process.blocks[1]))
        await process.end()

    run(tmp_path, test)


def test_a_first_checkpoint_is_on_its_way_before_the_pause_and_a_broken_device_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precopy, "_SETTLE_SECONDS", 0.0)

    async def test(rig: Rig) -> None:
        data = numbers(5, 9)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        await rig.begin("pod", 1)
        ahead, saving = rig.broker._pods["pod"].ahead, rig.broker._pods["pod"].saving
        assert ahead is not None and ahead.mode == "beside" and saving is not None
        async with asyncio.timeout(20):
            while saving[1].bytes_ahead < len(data):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        saved = await rig.save("pod", 1)
        assert saved.memory is not None
        assert (saved.memory.bytes_new, saved.memory.bytes_shared, saved.bytes_total) == (len(data), 0, len(data))
        again = await rig.save("pod", 2)
        assert rig.broker._pods["pod"].ahead is None and again.bytes_new == 0
        await _is(rig, again, process, data)
        await process.end()
        other = FakeProcess(await rig.attach("other"), {1: memory(numbers(6, 2))})
        await rig.known("other", 2 * CHUNK)
        rig.device.broken = "gather"
        await rig.begin("other", 3)
        ahead = rig.broker._pods["other"].ahead
        assert ahead is not None
        await ahead.stop()
        rig.device.broken = ""
        assert (await rig.save("other", 3)).bytes_new == 2 * CHUNK
        await other.end()

    run(tmp_path, test)


def test_an_attempt_that_is_forgotten_ends_the_pre_copy(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(7, 9)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        await rig.begin("pod", 1)
        await rig.broker.do(m.Forget("pod", 1))
        assert rig.device.mapped == 0 and not list((tmp_path / "store" / "index").iterdir())
        with pytest.raises(MoorageError, match="knows nothing of attempt 1"):
            await rig.broker.do(m.Capture("pod", 1))
        await process.end()

    run(tmp_path, test)


def test_the_room_for_the_drivers_own_restore_is_held_until_it_takes_it(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(8, 2)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        saved = await rig.save("pod", 1)
        assert saved.memory is not None
        await process.end()
        await rig.broker.do(m.Detach("pod"))
        driven = SavedMemory(processes=saved.memory.processes, blocks=saved.memory.blocks, driver_bytes=200 << 20)
        path = await rig.attach("next")
        fill = m.Fill("next", rig.location, NONE, driven, saved.contents)
        rig.device.room = 250 << 20
        with pytest.raises(
            NoCapacity, match="GPU 0: the driver needs 264 MiB for what it saved itself, and 250 MiB are"
        ):
            await rig.broker.do(fill)
        rig.device.room = 1 << 30
        await rig.broker.do(fill)
        assert rig.device.free_bytes() == (1 << 30) - (264 << 20)
        restored = process.restored(path)
        await rig.broker.do(m.BringBack("next", 10.0))
        assert rig.device.free_bytes() == 1 << 30 and content(restored.blocks[1]) == data
        await restored.end()

    run(tmp_path, test)


def test_a_neighbour_that_takes_the_room_meanwhile_is_no_failure(tmp_path: Path) -> None:
    device = FakeDevice(room=64 * CHUNK)
    data = numbers(9, 4)
    region = device.open(memory(data), len(data))
    chunks = copies.in_region(region, [bytes([number]) * 32 for number in range(4)])
    device.scratch = _refuse  # type: ignore[method-assign]
    (made,) = copies.Copier(None, lambda: SPARE + 9 * CHUNK).copy(device, chunks)
    assert isinstance(made, copies.InHost)
    with pytest.raises(NoCapacity, match="0 MiB in host memory"):
        list(copies.Copier(None, lambda: 0).copy(device, chunks))
    made.close()
    assert device.pinned == 0


def _refuse(size: int) -> Region:
    raise NoCapacity("a neighbour was faster")
