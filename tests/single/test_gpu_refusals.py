"""What the GPU broker says when the driver refuses a step, and when a node lacks what a GPU job needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from moorage.errors import DeviceFailed, EnvironmentLacking, NotFound
from moorage.worker import gpu_host
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.broker import Broker, Devices
from moorage.worker.gpu.client import BrokerClient
from moorage.worker.sandbox import native
from tests.support.fake_gpu import FakeDriver, FakeProcess, content, memory
from tests.support.gpu_rig import Rig, numbers, run


class _Failing(FakeDriver):
    """``fails``: the step that the driver refuses. ``done``: all steps, in order."""

    fails: ClassVar[str] = ""
    done: ClassVar[list[str]] = []

    def _do(self, step: str) -> None:
        self.done.append(step)
        if self.fails == step:
            raise DeviceFailed(f"driver checkpoint of process {self.pid}: {step} failed: CUDA_ERROR_UNKNOWN")

    def lock(self, seconds: float) -> None:
        self._do("lock")

    def checkpoint(self) -> None:
        self._do("checkpoint")

    def restore(self, mapping: dict[str, str] | None = None) -> None:
        self._do("restore")

    def unlock(self) -> None:
        self._do("unlock")


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", ""])
def test_a_step_that_the_driver_refuses_is_named_and_processes_go_through_each_step_together(
    tmp_path: Path, step: str
) -> None:
    async def test(rig: Rig) -> None:
        rig.broker = Broker(Devices(lambda _: rig.device, lambda _: 0), _Failing)  # type: ignore[arg-type]
        _Failing.fails, _Failing.done[:] = step, []
        path, data = await rig.attach("pod"), numbers(9, 1)
        processes = [FakeProcess(path, {1: memory(data)}), FakeProcess(path, {1: memory(data)})]
        await rig.known("pod", 2 * len(data))
        await rig.begin("pod", 1)
        said = rf"driver checkpoint of process \d+: {step} failed"
        if step in ("lock", "checkpoint"):
            with pytest.raises(DeviceFailed, match=said):
                await rig.broker.do(m.Quiesce("pod", 1, 5.0))
        else:
            await rig.broker.do(m.Quiesce("pod", 1, 5.0))
            assert _Failing.done == ["lock"] * 2 + ["checkpoint"] * 2
        if step == "restore":
            with pytest.raises(DeviceFailed, match=said):
                await rig.broker.do(m.BringBack("pod", 5.0))
            assert all(process.level == 3 for process in processes), "none runs without the others"
            _Failing.fails = ""
        await rig.broker.do(m.BringBack("pod", 5.0))
        assert _Failing.done[-4:] == ["restore"] * 2 + ["unlock"] * 2
        for process in processes:
            assert process.level == 0 and content(process.blocks[1]) == data
            await process.end()

    run(tmp_path, test)


def test_a_broker_without_a_driver_or_its_packages_says_so_when_a_job_is_looked_at(tmp_path: Path) -> None:
    async def test() -> None:
        client = BrokerClient(tmp_path / "gpu")
        await client.ask(m.Attach("pod", str(tmp_path / "pod.sock"), 1, ["GPU-1"]), start=True)
        with pytest.raises(
            (EnvironmentLacking, NotFound), match=r"cuda-bindings|cannot be initialised|no GPU of this node"
        ):
            await client.ask(m.Look("pod"))
        await client.ask(m.Detach("pod"))
        await client.ask(m.Exit())
        await client.close()

    asyncio.run(test())


def test_a_node_without_a_driver_or_without_the_proxy_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_host, "_libcuda", lambda: None)
    gpu_host.driver.cache_clear()
    with pytest.raises(EnvironmentLacking, match=r"this node has no libcuda.so.1 \(install the NVIDIA driver"):
        gpu_host.driver()
    monkeypatch.setenv("MOORAGE_LIBCUDA_PROXY", "/nonexistent/libcuda.so.1")
    with pytest.raises(EnvironmentLacking, match=r"libcuda.so.1 is not built \(install moorage from a wheel"):
        native.find("libcuda.so.1", "intercept", variable="MOORAGE_LIBCUDA_PROXY")
