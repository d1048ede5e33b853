"""The GPU broker with a GPU made of host memory: what it saves and brings back, and what happens when it cannot."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from moorage.errors import (
    CorruptData,
    DeadlineExceeded,
    DeviceFailed,
    EnvironmentLacking,
    MoorageError,
    NoCapacity,
    NotFound,
    Unavailable,
)
from moorage.store_settings import KEY_VARIABLE, StoreSettings, inherited_key
from moorage.worker.gpu import messages as m
from moorage.worker.gpu import ring
from moorage.worker.gpu.blocks import SavedMemory
from moorage.worker.gpu.broker import Broker, Devices
from moorage.worker.gpu.client import BrokerClient
from moorage.worker.gpu.device import CHUNK, Region, Slot
from moorage.worker.gpu.main import serve
from moorage.worker.gpu.parked import SPARE, Parked
from tests.support.fake_gpu import FakeDevice, FakeDriver, FakeProcess, content, memory
from tests.support.gpu_rig import NONE, Rig, numbers, run


def test_memory_is_saved_once_and_comes_back_in_another_process(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        one, two = numbers(1, 3), numbers(2, 1) + bytes(2 * CHUNK) + numbers(2, 1)
        process = FakeProcess(await rig.attach("pod"), {1: memory(one), 2: memory(two)})
        await rig.known("pod", len(one) + len(two))
        first = await rig.save("pod", 1)
        assert first.bytes_new == 4 * CHUNK, "zeros and the chunk that is there twice take no room"
        assert first.memory is not None
        parts = (first.memory.bytes_new, first.memory.bytes_shared, first.memory.bytes_same)
        assert parts == (4 * CHUNK, 0, 3 * CHUNK)
        assert (process.level, process.evicted) == (0, False) and FakeDriver.states[os.getpid()] == "running"
        assert content(process.blocks[1]) == one and content(process.blocks[2]) == two
        os.pwrite(process.blocks[2], b"changed", CHUNK)  # within the zeros
        second = await rig.save("pod", 2)
        assert second.bytes_new == CHUNK
        assert second.memory is not None and second.memory.bytes_shared == 4 * CHUNK
        after = content(process.blocks[2])
        restored = process.restored(await rig.attach("next"))
        await process.end()
        assert second.memory is not None
        await rig.broker.do(m.Fill("next", rig.location, NONE, second.memory, second.contents))
        await rig.broker.do(m.BringBack("next", 5.0))
        assert content(restored.blocks[1]) == one and content(restored.blocks[2]) == after
        await rig.broker.do(m.Detach("pod"))
        await rig.broker.do(m.Detach("next"))
        await restored.end()
        assert rig.device.mapped == 0

    run(tmp_path, test)


@pytest.mark.parametrize("step", ["open", "digests", "gather"])
def test_a_device_that_fails_in_the_pause_costs_the_attempt_and_not_the_job(tmp_path: Path, step: str) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(3, 2)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        await rig.broker.do(m.Begin("pod", 1, rig.location, NONE, "test", 0))
        await rig.broker.do(m.Quiesce("pod", 1, 5.0))
        rig.device.broken = step
        with pytest.raises(DeviceFailed, match=step):
            await rig.broker.do(m.Capture("pod", 1))
        rig.device.broken = ""
        await rig.broker.do(m.BringBack("pod", 5.0))
        await rig.broker.do(m.Forget("pod", 1))
        assert content(process.blocks[1]) == data and process.level == 0
        assert rig.device.mapped == 0
        assert (await rig.save("pod", 2)).bytes_new == len(data)
        await process.end()

    run(tmp_path, test)


def test_a_copy_that_fits_nowhere_is_said_and_the_job_runs_on(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach("pod"), {1: memory(numbers(4, 4))})
        await rig.known("pod", 4 * CHUNK)
        rig.device.room = 3 * CHUNK
        rig.broker.host_room = lambda: SPARE + 1
        room = "4 MiB on the device, 0 MiB in host memory, 0 MiB on disk"
        with pytest.raises(NoCapacity, match=f"8 MiB of device memory changed, and there is room for a copy of {room}"):
            await rig.save("pod", 1)
        await rig.broker.do(m.BringBack("pod", 5.0))
        assert process.level == 0 and not process.evicted
        await process.end()

    run(tmp_path, test)


def test_what_was_captured_is_written_before_anybody_asks_and_a_failure_is_told_to_who_asks(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(7, 9)  # more than two slots hold
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        rig.device.broken = "to_host"
        with pytest.raises(DeviceFailed, match="to_host"):
            await rig.save("pod", 1)
        rig.device.broken = ""
        await rig.broker.do(m.Forget("pod", 1))
        assert process.level == 0 and not list((tmp_path / "store" / "packs").iterdir())
        await rig.broker.do(m.Begin("pod", 2, rig.location, NONE, "test", 0))
        await rig.broker.do(m.Quiesce("pod", 2, 5.0))
        await rig.broker.do(m.Capture("pod", 2))
        async with asyncio.timeout(20):
            while not list((tmp_path / "store" / "index").iterdir()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await rig.broker.do(m.BringBack("pod", 5.0))
        assert (await rig.broker.do(m.Persist("pod", 2))).bytes_new == len(data)
        await rig.broker.do(m.Forget("pod", 2))
        assert content(process.blocks[1]) == data
        await process.end()

    run(tmp_path, test)


def test_a_thread_that_fails_stops_the_others_and_slots_have_one_user_at_a_time() -> None:
    slots = [Slot(number, memoryview(bytearray(1)), threading.Lock()) for number in range(8)]
    taken: list[int] = []

    def work(slot: Slot, other: Slot, items: Iterator[int]) -> None:
        for item in items:
            assert slot.busy.locked() and other.number == slot.number + 1
            taken.append(item)
            if item == 3:
                raise NoCapacity("full")

    with pytest.raises(NoCapacity, match="full"):
        ring.share_out(slots, itertools.count(), work)
    assert sorted(set(taken)) == sorted(taken) and 3 in taken
    assert not any(slot.busy.locked() for slot in slots)


def test_a_process_that_does_not_come_to_rest_is_named_and_all_run_on(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        path = await rig.attach("pod")
        one, two = FakeProcess(path, {1: memory(bytes(CHUNK))}), FakeProcess(path, {1: memory(bytes(CHUNK))})
        await rig.known("pod", 2 * CHUNK)
        two.refuses = -1
        await rig.broker.do(m.Begin("pod", 1, rig.location, NONE, "test", 0))
        with pytest.raises(DeadlineExceeded, match=r"process 77 \(fake\).*cuMemcpyDtoH_v2"):
            await rig.broker.do(m.Quiesce("pod", 1, 0.5))
        async with asyncio.timeout(10):
            while one.level or two.level:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not one.evicted and not two.evicted
        await one.end()
        await two.end()

    run(tmp_path, test)


def test_a_key_that_only_the_workers_environment_had_reaches_the_broker(tmp_path: Path) -> None:
    secret = "5a" * 32
    key = inherited_key(NONE, {KEY_VARIABLE: secret})
    assert key is not None and KEY_VARIABLE not in os.environ
    assert inherited_key(StoreSettings(key_file="/x"), {KEY_VARIABLE: secret}) is None

    async def test(rig: Rig) -> None:
        data = numbers(8, 2)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        with pytest.raises(EnvironmentLacking, match="no key is given"):
            await rig.broker.do(m.Begin("pod", 1, rig.location, NONE, "test", 0))
        saved = await rig.save("pod", 1)
        assert all(data[:64] not in pack.read_bytes() for pack in (tmp_path / "store" / "packs").iterdir())
        await rig.broker.do(m.Detach("pod"))
        await process.end()
        # Another broker knows no store yet, and is told over the socket.
        other = Broker(Devices(lambda _: rig.device, lambda _: 0), FakeDriver)  # type: ignore[arg-type]
        ready = asyncio.Event()
        serving = asyncio.create_task(serve(tmp_path, other, ready.set))
        await ready.wait()
        client = BrokerClient(tmp_path)
        await client.ask(m.Attach("next", str(tmp_path / "next.sock"), 1, ["GPU-1"]))
        restored = process.restored(tmp_path / "next.sock")
        assert saved.memory is not None
        fill = m.Fill("next", rig.location, NONE, saved.memory, saved.contents, key)
        assert secret not in repr(fill) and str(bytes.fromhex(secret)) not in repr(fill)
        await client.ask(fill)
        await client.ask(m.BringBack("next", 5.0))
        assert content(restored.blocks[1]) == data
        await client.ask(m.Detach("next"))
        await client.ask(m.Exit())
        await serving
        await client.close()
        await restored.end()

    run(tmp_path, test, key)


def test_damaged_memory_is_found_before_any_process_has_it(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(5, 2)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        saved = await rig.save("pod", 1)
        for pack in (tmp_path / "store" / "packs").iterdir():
            with pack.open("r+b") as file:
                file.seek(CHUNK)
                file.write(b"damage")
        await rig.attach("next")
        assert saved.memory is not None
        with pytest.raises(CorruptData, match="does not match its digest"):
            await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, saved.contents))
        with pytest.raises(CorruptData, match="lacks the device memory"):
            await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, {}))
        assert rig.device.mapped == 0
        await process.end()

    run(tmp_path, test)


def test_a_restored_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        process = FakeProcess(await rig.attach("pod"), {1: memory(numbers(6, 1))})
        await rig.known("pod", CHUNK)
        saved = await rig.save("pod", 1)
        await process.end()
        await rig.attach("next")
        assert saved.memory is not None
        await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, saved.contents))
        with pytest.raises(Unavailable, match=r"process 77 \(fake\) did not connect"):
            await rig.broker.do(m.BringBack("next", 0.2))

    run(tmp_path, test)


def test_a_broker_that_was_replaced_knows_nothing_and_says_so(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.attach("pod")
        with pytest.raises(NotFound, match="attempt 3"):
            await rig.broker.do(m.Persist("pod", 3))
        with pytest.raises(NotFound, match="does not know other"):
            await rig.broker.do(m.Look("other"))

    run(tmp_path, test)


def test_orders_travel_over_the_socket_and_errors_come_back_as_they_were(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        ready = asyncio.Event()
        serving = asyncio.create_task(serve(tmp_path, rig.broker, ready.set))
        await ready.wait()
        client = BrokerClient(tmp_path)
        with pytest.raises(NotFound, match="does not know pod"):
            await client.ask(m.Look("pod"))
        await client.ask(m.Attach("pod", str(tmp_path / "pod.sock"), 1, ["GPU-1"]))
        with pytest.raises(MoorageError, match="serves 1 pods"):
            await client.ask(m.Exit())
        await client.ask(m.Fill("pod", rig.location, NONE, SavedMemory(), {}))
        await client.ask(m.Detach("pod"))
        await client.ask(m.Exit())
        await serving
        await client.close()

    run(tmp_path, test)


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_kept_memory_comes_back_without_the_store(tmp_path: Path, place: Literal["gpu", "host"]) -> None:
    async def test(rig: Rig) -> None:
        one, two = numbers(1, 3), numbers(2, 1) + bytes(2 * CHUNK)
        process = FakeProcess(await rig.attach("pod"), {1: memory(one), 2: memory(two)})
        await rig.known("pod", len(one) + len(two))
        saved = await _parked(rig, place)
        await process.end()
        (kept,) = (await rig.broker.do(m.ListKept())).kept
        assert (kept.key, kept.place, kept.size) == ("job/0", place, len(one) + len(two))
        assert rig.device.mapped == 0 and rig.device.pinned == (kept.size if place == "host" else 0)
        for pack in (tmp_path / "store" / "packs").iterdir():
            pack.unlink()  # it is not read
        restored = process.restored(await rig.attach("next"))
        assert saved.memory is not None
        await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, saved.contents, kept_key="job/0"))
        await rig.broker.do(m.BringBack("next", 5.0))
        assert content(restored.blocks[1]) == one and content(restored.blocks[2]) == two
        assert (await rig.broker.do(m.ListKept())).kept == [] and rig.device.pinned == 0
        await restored.end()

    run(tmp_path, test)


def test_kept_memory_of_another_checkpoint_is_not_used(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        old = numbers(1, 2)
        process = FakeProcess(await rig.attach("pod"), {1: memory(old)})
        await rig.known("pod", len(old))
        saved = await rig.save("pod", 1)
        os.pwrite(process.blocks[1], b"newer", CHUNK)
        await _parked(rig, "gpu", attempt=2)
        await process.end()
        restored = process.restored(await rig.attach("next"))
        assert saved.memory is not None
        await rig.broker.do(m.Fill("next", rig.location, NONE, saved.memory, saved.contents, kept_key="job/0"))
        await rig.broker.do(m.BringBack("next", 5.0))
        assert content(restored.blocks[1]) == old
        await restored.end()

    run(tmp_path, test)


def test_kept_device_memory_makes_room_and_what_has_no_room_is_not_kept(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        data = numbers(1, 3)
        process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
        await rig.known("pod", len(data))
        saved = await _parked(rig, "gpu")
        await process.end()
        make, full = rig.device.create, [True]

        def create(size: int, *, rdma: bool) -> tuple[Region, int]:
            if full and full.pop():
                raise NoCapacity("full")
            return make(size, rdma=rdma)

        rig.device.create = create  # type: ignore[method-assign]
        assert saved.memory is not None
        await rig.attach("other")
        await rig.broker.do(m.Fill("other", rig.location, NONE, saved.memory, saved.contents, kept_key="another/0"))
        assert (await rig.broker.do(m.ListKept())).kept == []
        await rig.broker.do(m.Detach("other"))
        for attempt, room, kept in ((3, 1 << 20, 0), (4, 1 << 40, 1)):
            rig.broker.parked = Parked(lambda room=room: room)  # type: ignore[misc]
            process = FakeProcess(await rig.attach("pod"), {1: memory(data)})
            await rig.known("pod", len(data))
            await _parked(rig, "host", attempt)
            assert len((await rig.broker.do(m.ListKept())).kept) == kept
            await process.end()
        await rig.broker.do(m.DropKept(["job/0", "unknown"]))
        assert rig.device.pinned == 0

    run(tmp_path, test)


async def _parked(rig: Rig, place: Literal["gpu", "host"], attempt: int = 1) -> m.Answer:
    """The last checkpoint of the pod, which does not run on."""
    await rig.broker.do(m.Begin("pod", attempt, rig.location, NONE, "test", 0))
    await rig.broker.do(m.Quiesce("pod", attempt, 5.0))
    await rig.broker.do(m.Capture("pod", attempt))
    saved = await rig.broker.do(m.Persist("pod", attempt))
    await rig.broker.do(m.Forget("pod", attempt))
    await rig.broker.do(m.Detach("pod", place, "job/0"))
    return saved


class _Silent(FakeDriver):
    """For several processes with one pid."""

    def checkpoint(self) -> None:
        return


def test_two_gpus_of_a_pod_are_saved_side_by_side_and_come_back_exchanged(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        devices = [FakeDevice(0), FakeDevice(1)]
        rig.broker = Broker(Devices(lambda index: devices[index], lambda uuid: int(uuid[-1])), _Silent)  # type: ignore[arg-type]
        alike, other = numbers(7, 3), numbers(8, 2)
        path = rig.folder / "pod.sock"
        await rig.broker.do(m.Attach("pod", str(path), 1, ["GPU-0", "GPU-1"]))
        # Each process calls its own GPU 0, as under CUDA_VISIBLE_DEVICES: the descriptors say where memory lies.
        first = FakeProcess(path, {1: memory(alike, 0)})
        second = FakeProcess(path, {1: memory(alike, 1), 2: memory(other, 1)})
        await rig.known("pod", 2 * len(alike) + len(other))
        saved = await rig.save("pod", 1)
        assert saved.memory is not None and saved.memory.devices == ["GPU-0", "GPU-1"]
        assert sorted((block.device, block.size) for block in saved.memory.blocks) == sorted(
            [(0, len(alike)), (1, len(alike)), (1, len(other))]
        )
        assert saved.bytes_new == len(alike) + len(other), "what both GPUs have alike is copied once"
        again = await rig.save("pod", 2)
        assert again.bytes_new == 0 and again.memory is not None
        assert [block.device for block in again.memory.blocks] == [block.device for block in saved.memory.blocks]
        then = rig.folder / "next.sock"
        await rig.broker.do(m.Attach("next", str(then), 2, ["GPU-1", "GPU-0"]))
        await rig.broker.do(m.Fill("next", rig.location, NONE, again.memory, again.contents))
        back = [first.restored(then), second.restored(then)]
        await first.end()
        await second.end()
        await rig.broker.do(m.BringBack("next", 5.0, {"0": "1", "1": "0"}))
        assert content(back[0].blocks[1]) == content(back[1].blocks[1]) == alike
        assert content(back[1].blocks[2]) == other
        assert [devices[0].place(back[0].blocks[1]), devices[0].place(back[1].blocks[2])] == [1, 0]
        await rig.broker.do(m.Begin("next", 3, rig.location, NONE, "test", 0))
        await rig.broker.do(m.Quiesce("next", 3, 5.0))
        await rig.broker.do(m.Capture("next", 3))
        await rig.broker.do(m.BringBack("next", 5.0))
        third = await rig.broker.do(m.Persist("next", 3))
        assert third.bytes_new == 0 and third.memory is not None and third.memory.devices == ["GPU-1", "GPU-0"]
        assert [block.device for block in third.memory.blocks] == [block.device for block in saved.memory.blocks]
        await rig.broker.do(m.Forget("next", 3))
        for pod in ("pod", "next"):
            await rig.broker.do(m.Detach(pod))
        for process in back:
            await process.end()
        assert devices[0].mapped == devices[1].mapped == 0

    run(tmp_path, test)
