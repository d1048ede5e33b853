from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moorage.errors import Unavailable
from moorage.worker import agent_faults, gpu_health, pod_end
from moorage.worker.gpu_health import Faults, split, watch, xid_reason


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """Two GPUs; ``events`` happen one after the other, then the watch is told to stop."""

    NVMLError = NvmlError
    NVML_ERROR_TIMEOUT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST = 10, 3, 15
    nvmlEventTypeDoubleBitEccError, nvmlEventTypeXidCriticalError = 2, 8

    def __init__(self, *events: SimpleNamespace | int, deaf: bool = False) -> None:
        self.events = list(events)
        self.deaf = deaf
        self.lost: set[int] = set()
        self.stop = threading.Event()
        self.ended = 0

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle == 0:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> None:
        if handle in self.lost:
            raise NvmlError(self.NVML_ERROR_GPU_IS_LOST)

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlEventSetFree(self, events: str) -> None: ...

    def nvmlDeviceGetSupportedEventTypes(self, handle: int) -> int:
        return 0xFF

    def nvmlDeviceRegisterEvents(self, handle: int, types: int, events: str) -> None:
        if self.deaf:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        assert types == 10

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> SimpleNamespace:
        if not self.events:
            self.stop.set()
            raise NvmlError(self.NVML_ERROR_TIMEOUT)
        event = self.events.pop(0)
        if isinstance(event, int):
            raise NvmlError(event)
        self.lost |= {event.device} if event.eventData == 79 else set()
        return event


def event(device: int, xid: int, kind: int = 8) -> SimpleNamespace:
    return SimpleNamespace(device=device, eventType=kind, eventData=xid)


def watched(nvml: FakeNvml) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    watch(nvml, lambda uuid, reason: found.append((uuid, reason)), nvml.stop)
    assert nvml.ended == 1
    return found


def test_only_a_gpus_own_xids_count() -> None:
    assert xid_reason(79) == "Xid 79: it fell off the bus"
    assert [xid_reason(xid) for xid in (13, 31, 43, 45, 63, 94, 109)] == [""] * 7


def test_xids_ecc_errors_and_lost_gpus_are_told() -> None:
    nvml = FakeNvml(event(0, 31), event(1, 48), FakeNvml.NVML_ERROR_TIMEOUT, event(0, 0, kind=2))
    assert watched(nvml) == [
        ("GPU-1", "Xid 48: an ECC error that was not corrected"),
        ("GPU-0", "an ECC error that was not corrected"),
    ]
    assert watched(FakeNvml(event(1, 79))) == [
        ("GPU-1", "Xid 79: it fell off the bus"),
        ("GPU-1", "it fell off the bus"),
    ]
    lost = FakeNvml(FakeNvml.NVML_ERROR_GPU_IS_LOST)
    lost.lost.add(0)
    assert watched(lost) == [("GPU-0", "it fell off the bus")]


def test_nvml_that_breaks_ends_the_watch_and_nothing_else() -> None:
    assert watched(FakeNvml(999)) == []


def test_split_gpus_are_named() -> None:
    nvml = FakeNvml()
    assert split(nvml, ["GPU-0", "GPU-1"]) == ("GPU-1",)
    assert nvml.ended == 1


def test_without_a_driver_there_is_no_nvml(tmp_path: Path) -> None:
    assert gpu_health.library(tmp_path / "version") is None


def test_faults_are_known_to_the_next_worker_until_the_machine_is_started_again(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    faults = Faults(path, "boot-1")
    assert faults.add("GPU-1", "it fell off the bus")
    assert not faults.add("GPU-1", "again")
    again = Faults(path, "boot-1")
    assert "GPU-1" in again and "GPU-2" not in again and again.reason("GPU-1") == "it fell off the bus"
    assert "GPU-1" not in Faults(path, "boot-2")
    path.write_text("{")
    assert "GPU-1" not in Faults(path, "boot-1")


def test_a_fault_takes_the_gpu_from_the_node_and_ends_its_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pod(name: str, *gpus: str, gone: bool = False) -> Any:
        return SimpleNamespace(label=name, record=SimpleNamespace(gpus=list(gpus)), gone=gone)

    story: list[str] = []

    async def break_off(pod: Any, reason: str) -> None:
        story.append(f"{pod.label}: {reason}")
        pod.gone = True

    async def changed() -> None:
        story.append("told")
        raise Unavailable("etcd is away")

    monkeypatch.setattr(pod_end, "break_off", break_off)
    pods = [pod("one", "GPU-0"), pod("two", "GPU-1", "GPU-2"), pod("over", "GPU-1", gone=True), pod("none")]
    faults = Faults(tmp_path / "faults.json", "boot")

    async def follow(nvml: FakeNvml) -> None:
        async with asyncio.timeout(10):
            task = asyncio.create_task(agent_faults.follow(nvml, faults, lambda: pods, changed))
            while len(story) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(follow(FakeNvml(event(1, 95))))
    assert story == ["told", "two: GPU GPU-1: Xid 95: an ECC error that was not contained"]
    assert "GPU-1" in Faults(tmp_path / "faults.json", "boot")
    # A worker that was killed between the two.
    pods[1].gone = False
    story.clear()
    asyncio.run(follow(FakeNvml()))
    assert story == ["told", "two: GPU GPU-1: Xid 95: an ECC error that was not contained"]
