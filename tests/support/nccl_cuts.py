"""Cuts of a program of several ranks without a pod: the proxy is preloaded, communicators are destroyed and made anew
while the processes run on. No memory is saved, so that any number of ranks may share a GPU, and a cut costs little.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moorage.nccl_quiesce.model import Accept
from moorage.worker.nccl import libraries
from moorage.worker.sandbox import native
from tests.support.gpu_jobs import last_json
from tests.support.nccl_host import Host
from tests.support.nccl_jobs import PROGRAMS, Program, free_port, rank_environment

#: Ranks show how far they are every few steps.
_MARGIN = 12
_STEP_SECONDS = 60.0


def proxied() -> dict[str, str]:
    """The environment that puts the proxy in the place of NVIDIA's NCCL."""
    known = libraries.find([sys.executable], dict(os.environ))
    # The one of this interpreter's packages, which torch uses, before one of the system's.
    found = sorted(known, key=lambda path: not path.startswith(sys.prefix))
    proxy = native.find(libraries.NAME, "intercept/nccl/moorage-nccl-dir", variable="MOORAGE_LIBNCCL_PROXY")
    return {"LD_PRELOAD": str(proxy), "MOORAGE_REAL_LIBNCCL": found[0]} if found else {}


class CutJob:
    """``async with CutJob(program, folder, environment) as job``: its ranks, and the host that stops them.

    ``beside``: with them runs the same program undisturbed, never ahead of them, for its results (`end`).
    """

    def __init__(self, program: Program, folder: Path, extra: dict[str, str], *, beside: bool = True) -> None:
        self.program, self.folder, self.extra, self.beside = program, folder, extra, beside
        self.host = Host(folder / "nccl.sock")
        self.processes: list[asyncio.subprocess.Process] = []
        self._others: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> CutJob:
        await self.host.listen()
        until = ("--until", str(self.folder / "until"))
        own = {**self.extra, "MOORAGE_NCCL_SOCKET": str(self.host.path)}
        more = ("--folder", str(self.folder), *until, *self.program.slow)
        self.processes = await self._start("rank", more, own)
        self.host.pids += [process.pid for process in self.processes]
        if not self.beside:
            return self
        other = {
            name: value for name, value in self.extra.items() if name not in ("LD_PRELOAD", "MOORAGE_REAL_LIBNCCL")
        }
        self._others = await self._start("undisturbed", (*until, "--follow", str(self.folder)), other)
        return self

    async def _start(self, name: str, more: Sequence[str], extra: dict[str, str]) -> list[asyncio.subprocess.Process]:
        port, started = free_port(), []
        for rank in range(self.program.world):
            env = rank_environment(self.program, rank, port, f"{self.folder.name}-{name}") | extra
            with (self.folder / f"{name}-{rank}.txt").open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *self.program.command(*more), env=env, cwd=PROGRAMS, stdout=output, stderr=output
                )
            started.append(process)
        return started

    async def __aexit__(self, *_: object) -> None:
        for process in (*self.processes, *self._others):
            if process.returncode is None:
                process.kill()
            await process.wait()
        await self.host.close()

    def steps(self) -> list[int]:
        """How far each rank is."""
        paths = [self.folder / f"progress-{rank}" for rank in range(self.program.world)]
        return [int(path.read_text()) if path.exists() else 0 for path in paths]

    def text(self, rank: int, name: str = "rank") -> str:
        """What a rank has printed."""
        return (self.folder / f"{name}-{rank}.txt").read_text(errors="replace")

    async def moves(self, least: int = 1, seconds: float = _STEP_SECONDS) -> None:
        """Until every rank has made some steps more."""
        wanted = [step + least for step in self.steps()]
        until = time.monotonic() + seconds
        while any(now < then for now, then in zip(self.steps(), wanted, strict=True)):
            ended = [process.returncode for process in self.processes]
            assert not any(ended), (ended, *(self.text(rank)[-1500:] for rank in range(self.program.world)))
            assert time.monotonic() < until, (
                f"no step in {seconds:g} s: {self.steps()}, {wanted} wanted",
                *(self.text(rank)[-1500:] for rank in range(self.program.world)),
            )
            await asyncio.sleep(0.005)

    async def cut(self) -> dict[str, Any]:
        """Stop, destroy, make anew, go on; seconds of each, and who was behind when the gates had closed."""
        unequal = self.host.unequal
        times = [time.monotonic()]
        result = await self.host.cut(30.0)
        assert isinstance(result, Accept), (result, *(self.text(rank)[-800:] for rank in range(self.program.world)))
        times.append(time.monotonic())
        await self.host.tear_down(result.plan)
        times.append(time.monotonic())
        await self.host.rebuild(result.plan)
        await self.host.open()
        times.append(time.monotonic())
        names = ("drained", "destroyed", "running")
        spans = {name: round(times[i + 1] - times[i], 4) for i, name in enumerate(names)}
        rounds = self.host.rounds
        assert rounds is not None
        return {
            **spans,
            "unequal": self.host.unequal > unequal,
            "rounds": rounds.round,
            "slides": rounds.slides,
            "communicators": len(result.plan.rebuild),
            "again": len(result.plan.again),
        }

    async def end(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Stop all ranks at one step; what each printed at its end, and what those did that nobody has disturbed."""
        path = self.folder / "until"
        path.with_suffix(".new").write_text(str(max(self.steps()) + _MARGIN))
        path.with_suffix(".new").rename(path)
        results = []
        for name, processes in (("rank", self.processes), ("undisturbed", self._others)):
            if not processes:
                continue
            async with asyncio.timeout(_STEP_SECONDS):
                codes = [await process.wait() for process in processes]
            texts = [self.text(rank, name) for rank in range(self.program.world)]
            assert not any(codes), (name, codes, *(text[-1500:] for text in texts))
            results.append([last_json(text.splitlines()) for text in texts])
            for text, result in zip(texts, results[-1], strict=True):
                first = next(line for line in text.splitlines() if line.startswith("{"))
                assert json.loads(first)["nonce"] == result["nonce"]
        return results[0], results[-1]


class Seen(NamedTuple):
    """Results by rank, those of an undisturbed run, and what is known of each cut."""

    found: list[dict[str, Any]]
    expected: list[dict[str, Any]]
    cuts: list[dict[str, Any]]


async def cut_again_and_again(
    program: Program, folder: Path, extra: dict[str, str], times: int, *, patience: float = 0.1, beside: bool = True
) -> Seen:
    """Cut a program ``times`` times at random instants."""
    chance = random.Random(f"{program.script} {program.world}")
    cuts = []
    async with CutJob(program, folder, extra, beside=beside) as job:
        await job.moves(4, 120.0)
        await job.host.present()
        for _ in range(times):
            await asyncio.sleep(chance.random() * patience)
            cuts.append(await job.cut())
            await job.moves()
        return Seen(*await job.end(), cuts)
