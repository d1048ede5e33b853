from __future__ import annotations

from types import SimpleNamespace

import pytest

from moorage.worker.nccl.sharing import Member, objections, users

RANKS = [Member(100, "rank 0"), Member(101, "rank 1"), Member(102, "rank 2")]


def test_ranks_that_share_a_gpu_are_named_with_the_gpu_and_the_driver() -> None:
    found = objections("580.159.04", {"GPU-a": {100, 101, 7}, "GPU-b": {102, 7}}, RANKS)
    assert [objection.what for objection in found] == ["rank 0 and rank 1 share GPU-a"]
    assert "driver 580.159.04" in found[0].why
    assert "Xid 109" in found[0].why
    assert found[0].cure == "give each rank a GPU of its own"


@pytest.mark.parametrize("driver", ["", "570.10", "590.1", "unknown"])
def test_other_drivers_are_not_objected_to(driver: str) -> None:
    assert objections(driver, {"GPU-a": {100, 101}}, RANKS) == []


def test_a_gpu_for_each_rank_is_well() -> None:
    assert objections("580.1", {"GPU-a": {100}, "GPU-b": {101}, "GPU-c": {102}}, RANKS) == []
    assert objections("580.1", {}, RANKS) == []


class NvmlError(Exception):
    pass


class FakeNvml:
    """GPU-a has two processes; GPU-b does not tell."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        if handle != "GPU-a":
            raise NvmlError
        return [SimpleNamespace(pid=5), SimpleNamespace(pid=6)]


def test_what_nvml_does_not_tell_is_left_out() -> None:
    nvml = FakeNvml()
    assert users(nvml, ["GPU-a", "GPU-b"]) == {"GPU-a": {5, 6}}
    assert nvml.open == 0
    assert users(None, ["GPU-a"]) == {}


def test_a_process_works_where_it_has_most_of_its_memory() -> None:
    class Two(FakeNvml):
        def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
            own, other = (5, 6) if handle == "GPU-a" else (6, 5)
            return [SimpleNamespace(pid=own, usedGpuMemory=900), SimpleNamespace(pid=other, usedGpuMemory=2)]

    assert users(Two(), ["GPU-a", "GPU-b"]) == {"GPU-a": {5}, "GPU-b": {6}}
