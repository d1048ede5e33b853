"""Which pod has which GPU of a node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moorage.worker import gpu_host


def test_a_new_pod_waits_for_the_gpu_of_one_that_is_about_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_host, "information", lambda: [{"GPU UUID": "GPU-1"}])

    async def main() -> None:
        gpus = gpu_host.NodeGpus(tmp_path, "boot")
        gpus.leave("stranger")
        await gpus.enough(1, 60.0)  # there is one
        gpus.take("old", ["GPU-1"])
        await gpus.enough(1, 60.0)  # there is none, and nobody leaves: who asks is told so at once
        assert gpus.free() == []
        gpus.leave("old")
        waiting = asyncio.create_task(gpus.enough(1, 60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        gpus.release("old")
        await waiting
        assert gpus.free() == ["GPU-1"]
        gpus.take("old", ["GPU-1"])
        gpus.leave("old")
        await gpus.enough(1, 0.01)  # its memory takes longer than anybody waits
        assert gpus.free() == []

    asyncio.run(main())
