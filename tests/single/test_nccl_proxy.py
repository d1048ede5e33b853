"""The libnccl proxy over a fake NCCL whose operations truly wait for their partners, in several processes."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from moorage.worker.sandbox import native
from tests.support.nccl_host import Host

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests/native/fake_nccl"
PROGRAMS = ROOT / "tests/programs"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The fakes, built here, and the proxy that is installed."""
    folder = tmp_path_factory.mktemp("nccl")
    for source, name in (("streams.cpp", "libcuda.so.1"), ("fake_nccl.cpp", "libnccl-fake.so")):
        options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-pthread"]
        subprocess.run(["g++", *options, "-o", folder / name, FAKES / source, "-ldl"], check=True)
    proxy = native.find("libnccl.so.2", "intercept", variable="MOORAGE_LIBNCCL_PROXY")
    return {
        "FAKE_CUDA": str(folder / "libcuda.so.1"),
        "NCCL_PROXY": str(proxy),
        "MOORAGE_REAL_LIBNCCL": str(folder / "libnccl-fake.so"),
    }


class Job:
    """Ranks of a program, and the host that talks to them."""

    def __init__(self, folder: Path, libraries: dict[str, str]) -> None:
        self.folder = folder
        self.host = Host(folder / "nccl.sock")
        self._environment = {
            **os.environ,
            **libraries,
            "FAKE_NCCL_FILE": str(folder / "place"),
            "MOORAGE_NCCL_SOCKET": str(self.host.path),
        }
        self.processes: list[asyncio.subprocess.Process] = []

    async def start(self, program: str, size: int, *arguments: str) -> None:
        """One process for each rank."""
        await self.host.listen()
        for rank in range(size):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(PROGRAMS / program),
                *(str(rank), str(size), str(self.folder), *arguments),
                env=self._environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            self.processes.append(process)
            self.host.pids.append(process.pid)
        await self.host.present()

    async def end(self) -> list[tuple[int | None, str]]:
        """How each rank ended, and what it said."""
        async with asyncio.timeout(60):
            said = await asyncio.gather(*(process.communicate() for process in self.processes))
        return [(process.returncode, out.decode()) for process, (out, _) in zip(self.processes, said, strict=True)]

    def steps(self) -> list[int]:
        """How far each thread of each rank is."""
        paths = [self.folder / f"progress{rank}.{thread}" for rank in range(len(self.processes)) for thread in (0, 1)]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def beyond(self, steps: list[int]) -> bool:
        """Whether every thread has gone on."""
        return all(now > before for now, before in zip(self.steps(), steps, strict=True))


@asynccontextmanager
async def job(folder: Path, libraries: dict[str, str]) -> AsyncIterator[Job]:
    """A job whose processes do not outlive the test."""
    made = Job(folder, libraries)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        await made.host.close()


def test_a_job_of_four_ranks_is_cut_and_its_communicators_made_anew_again_and_again(
    tmp_path: Path, libraries: dict[str, str]
) -> None:
    async def run() -> None:
        lots = random.Random(4)
        async with job(tmp_path, libraries) as ranks:
            await ranks.start("nccl_job.py", 4, "400")
            assert await ranks.host.refusals() == []
            for _ in range(8):
                await asyncio.sleep(lots.random() * 0.2)
                before = ranks.steps()
                await ranks.host.checkpoint()
                await _until(partial(ranks.beyond, before))
            assert ranks.host.unequal > 0
            assert await ranks.end() == [(0, "all right\n")] * 4

    asyncio.run(run())


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - files, which tell nobody
            await asyncio.sleep(0.01)
