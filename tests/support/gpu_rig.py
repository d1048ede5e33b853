"""A GPU broker in this process with a GPU of host memory, a store, and sockets for processes that are not real."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from moorage.store import Store
from moorage.store_settings import StoreSettings, WrappingKey
from moorage.worker.gpu import messages as m
from moorage.worker.gpu.broker import Broker, Devices
from moorage.worker.gpu.device import CHUNK
from tests.support.fake_gpu import FakeDevice, FakeDriver

NONE = StoreSettings()


class Rig:
    """A broker, its device, a store and a folder for sockets."""

    def __init__(self, folder: Path, key: WrappingKey | None = None) -> None:
        self.key = key
        self.folder = folder
        self.device = FakeDevice()
        self.location = str(folder / "store")
        self.store = Store.open(self.location, create=True, key=key)
        self.broker = Broker(Devices(lambda _: self.device, lambda _: 0), FakeDriver)  # type: ignore[arg-type]

    async def attach(self, pod: str) -> Path:
        path = self.folder / f"{pod}.sock"
        await self.broker.do(m.Attach(pod, str(path), 1, ["GPU-1"]))
        return path

    async def known(self, pod: str, size: int) -> None:
        """Wait until the broker has been told of so many bytes."""
        async with asyncio.timeout(20):
            while (await self.broker.do(m.Look(pod))).bytes_total != size:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def begin(self, pod: str, attempt: int, **more: Any) -> None:
        """Prepare, and wait for the pre-copy if there is one."""
        await self.broker.do(m.Begin(pod, attempt, self.location, NONE, "test", 0, self.key, **more))
        await self.broker.do(m.Precopy(pod, attempt, 30.0))

    async def save(self, pod: str, attempt: int, **more: Any) -> m.Answer:
        """A whole checkpoint of a pod that runs on."""
        await self.begin(pod, attempt, **more)
        await self.broker.do(m.Quiesce(pod, attempt, 5.0))
        await self.broker.do(m.Capture(pod, attempt))
        await self.broker.do(m.BringBack(pod, 5.0))
        saved = await self.broker.do(m.Persist(pod, attempt))
        await self.broker.do(m.Forget(pod, attempt))
        return saved


def run(tmp_path: Path, test: Callable[[Rig], Awaitable[None]], key: WrappingKey | None = None) -> None:
    async def bounded() -> None:
        FakeDriver.states.clear()
        async with asyncio.timeout(60):
            await test(Rig(tmp_path, key))

    asyncio.run(bounded())


def numbers(seed: int, chunks: int) -> bytes:
    return random.Random(seed).randbytes(chunks * CHUNK)
