from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moorage.errors import NoCapacity
from moorage.worker import pod_staging
from moorage.worker.agent_failpoints import NAMES
from moorage.worker.pod_steps import all_ended, timed

GIB = 1 << 30


def test_an_error_is_raised_only_when_all_steps_have_ended() -> None:
    ended: list[str] = []

    async def step(name: str, seconds: float, *, fails: bool = False) -> str:
        await asyncio.sleep(seconds)
        ended.append(name)
        if fails:
            raise NoCapacity(name)
        return name

    async def main() -> None:
        assert await all_ended(step("a", 0.01), step("b", 0)) == ["a", "b"]
        ended.clear()
        with pytest.raises(NoCapacity, match="quick"):
            await all_ended(step("slow", 0.02), step("quick", 0, fails=True))
        assert ended == ["quick", "slow"]

    asyncio.run(main())


def test_the_time_of_a_step_that_fails_is_written_down_too() -> None:
    async def main() -> None:
        timings: dict[str, float] = {}
        with pytest.raises(ZeroDivisionError):
            await timed(timings, "x", asyncio.to_thread(lambda: 1 // 0))
        assert timings["x"] >= 0

    asyncio.run(main())


def test_memory_is_used_only_while_a_quarter_of_it_stays_free() -> None:
    plenty = {"total": 16 * GIB, "available": 12 * GIB, "shm_free": 16 * GIB}
    assert pod_staging.in_memory(8 * GIB, **plenty)
    assert not pod_staging.in_memory(8 * GIB + 1, **plenty)
    assert not pod_staging.in_memory(8 * GIB, **{**plenty, "shm_free": 8 * GIB - 1})


def test_what_fits_nowhere_is_told_in_numbers(tmp_path: Path) -> None:
    with pytest.raises(NoCapacity, match=f"{tmp_path / 'disk'} has [0-9]+ MiB"):
        pod_staging.choose(1 << 60, on_disk=tmp_path / "disk", in_shm=tmp_path / "shm")


def test_a_staging_folder_is_fresh_and_private(tmp_path: Path) -> None:
    folder = pod_staging.make(tmp_path / "a" / "b")
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    (folder / "old").touch()
    pod_staging.make(folder)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    pod_staging.drop(folder)
    pod_staging.drop(folder)
    assert not folder.exists()


def test_failpoints_stand_before_and_after_each_step() -> None:
    assert {name.rpartition(".")[0] for name in NAMES if name.endswith(".before")} == {
        name.rpartition(".")[0] for name in NAMES if name.endswith(".after")
    }
    assert len(set(NAMES)) == len(NAMES)


def test_captures_of_pods_that_nobody_knows_any_more_are_swept(tmp_path: Path) -> None:
    root = tmp_path / "moorage-c-n"
    for name in ("j1-1-0", "j2-1-0"):
        (pod_staging.make(root / name) / "pages-1.img").write_bytes(b"x")
    pod_staging.sweep(root, {"j2-1-0"})
    assert [path.name for path in root.iterdir()] == ["j2-1-0"]
    pod_staging.sweep(root, ())
    assert not root.exists()
    pod_staging.sweep(root, ())
