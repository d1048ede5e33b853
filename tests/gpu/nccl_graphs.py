"""CUDA graphs that captured NCCL calls, carried over a teardown and rebuild of their communicators, with NVIDIA's NCCL.

Two ranks share one GPU (a different ``NCCL_HOSTID`` each), both proxies are preloaded, this script is the worker: it
finds a cut while the ranks replay their graphs, tears down, rebuilds and opens, several times, as long as there is
time; the ranks look at every result. With --driver NVIDIA's driver saves and restores both processes in between. No
moorage cluster is needed.

Usage, as root, in the project's root: python -m tests.gpu.nccl_graphs [--rounds N] [--seconds N] [--driver] [KIND ...];
MOORAGE_LIBCUDA_PROXY and MOORAGE_LIBNCCL_PROXY name the proxies.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moorage.nccl_quiesce.model import Accept
from tests.support.nccl_host import Host

RANKS = 2
REAL = Path("/.moorage-gpu/libcuda.so.1")  # where the libcuda proxy expects the driver when it is built
PROGRAM = Path(__file__).parent / "programs" / "nccl_graphs_rank.py"


def lay_driver() -> None:
    """The driver's own file where the proxy looks for it, seen by this process and its children only."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(0x20000) or library.mount(b"none", b"/", None, 0x44000, None):  # NEWNS, then private
        raise SystemExit(f"no mount namespace of one's own: {os.strerror(ctypes.get_errno())}")
    listed = subprocess.run(["ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    driver = next(line.split()[-1] for line in listed.splitlines() if line.split()[:1] == ["libcuda.so.1"])
    REAL.parent.mkdir(exist_ok=True)
    library.mount(b"none", bytes(REAL.parent), b"tmpfs", 0, None)
    REAL.symlink_to(os.path.realpath(driver))


def environment(folder: Path, port: int, rank: int) -> dict[str, str]:
    """Of one rank."""
    found = importlib.util.find_spec("nvidia.nccl")
    assert found is not None and found.submodule_search_locations, "NVIDIA's NCCL is not installed"
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_HOST_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
        "MOORAGE_NCCL_SOCKET": str(folder / "nccl.sock"),
        "MOORAGE_REAL_LIBNCCL": str(Path(found.submodule_search_locations[0]) / "lib" / "libnccl.so.2"),
        "LD_PRELOAD": f"{os.environ['MOORAGE_LIBCUDA_PROXY']}:{os.environ['MOORAGE_LIBNCCL_PROXY']}",
    }


def driver_checkpoint(pids: list[int]) -> str:
    """NVIDIA's driver saves and restores the processes, as it does at every checkpoint."""
    try:
        from cuda.core import checkpoint
    except ImportError:
        return "no cuda.core.checkpoint"
    processes = [checkpoint.Process(pid) for pid in pids]
    began = time.monotonic()
    for one in processes:
        one.lock(20_000)
    for one in processes:
        one.checkpoint()
    for one in processes:
        one.restore()
    for one in processes:
        one.unlock()
    return f"{time.monotonic() - began:.2f} s"


class Job:
    """The ranks and what they have said."""

    def __init__(self, folder: Path, kinds: list[str], seconds: float) -> None:
        self.folder, self.kinds, self.seconds = folder, kinds, seconds
        self.host = Host(folder / "nccl.sock")
        self.processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        await self.host.listen()
        for rank in range(RANKS):
            with (self.folder / f"out-{rank}").open("wb") as out:
                command = [sys.executable, str(PROGRAM), str(self.folder), *self.kinds]
                env = environment(self.folder, port, rank) | {"PATIENCE": str(int(self.seconds) - 3)}
                process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)  # noqa: ASYNC220
                self.processes.append(process)
            self.host.pids.append(self.processes[-1].pid)

    def alive(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}")

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not in {seconds} s")
            await asyncio.sleep(0.02)

    def steps(self) -> list[int]:
        paths = [self.folder / f"step-{rank}" for rank in range(RANKS)]
        return [int(path.read_text() or 0) if path.exists() else 0 for path in paths]

    async def beyond(self, more: int) -> None:
        before = self.steps()
        await self.until(lambda: all(now >= b + more for now, b in zip(self.steps(), before, strict=True)), 30, "steps")

    async def round(self, with_driver: bool) -> dict[str, Any]:
        """Cut, teardown, rebuild: seconds of each."""
        marks = [time.monotonic()]

        def mark() -> float:
            marks.append(time.monotonic())
            return round(marks[-1] - marks[-2], 3)

        refused = [f"{one.communicator} {one.api}: {one.why}" for one in await self.host.refusals()]
        if refused:
            raise RuntimeError("refused: " + "; ".join(refused))
        result = await self.host.cut(20.0)
        if not isinstance(result, Accept):
            raise RuntimeError(f"no cut: {result}")
        found: dict[str, Any] = {"cut": mark()}
        await self.host.tear_down(result.plan)
        found["teardown"] = mark()
        if with_driver:
            found["driver"] = await asyncio.to_thread(driver_checkpoint, self.host.pids)
            mark()
        await self.host.part()
        await self.host.rebuild(result.plan, 30.0)
        found["rebuild"] = mark()
        await self.host.open()
        return found

    async def end(self) -> list[int]:
        (self.folder / "stop.new").write_text(str(max(self.steps()) + 3))
        (self.folder / "stop.new").rename(self.folder / "stop")
        while any(process.poll() is None for process in self.processes):  # noqa: ASYNC110 - processes, no event
            await asyncio.sleep(0.02)
        return [process.returncode for process in self.processes]


async def work(options: argparse.Namespace, job: Job, rounds: list[dict[str, Any]]) -> list[int]:
    """All of it; the exit codes of the ranks."""
    lots = random.Random(options.seed)
    began = time.monotonic()
    await job.start()
    ready = [job.folder / f"ready-{rank}" for rank in range(RANKS)]
    await job.until(lambda: all(path.exists() for path in ready), options.seconds, "graphs")
    print("graphs:", ready[0].read_text(), f"after {time.monotonic() - began:.1f} s", flush=True)
    await job.host.present()
    await job.beyond(2)
    took = 0.0
    while len(rounds) < options.rounds and time.monotonic() - began + 2 * took + 6 < options.seconds:
        started = time.monotonic()
        await asyncio.sleep(lots.random() * 0.3)
        rounds.append(await job.round(with_driver=options.driver))
        print("round", len(rounds), json.dumps(rounds[-1]), flush=True)
        await job.beyond(2)
        took = time.monotonic() - started
    return await job.end()


async def run(options: argparse.Namespace, folder: Path) -> bool:
    rounds: list[dict[str, Any]] = []
    job, error, codes = Job(folder, options.kinds, options.seconds), "", [-1]
    try:
        async with asyncio.timeout(options.seconds):
            codes = await work(options, job, rounds)
    except Exception as failure:  # whatever it is, the ranks' words come with it
        error = f"{type(failure).__name__}: {failure}"
    finally:
        for process in job.processes:
            process.kill()
            process.wait()
        await job.host.close()
    for rank in range(RANKS):
        lines = (folder / f"out-{rank}").read_text(errors="replace").splitlines()
        print(f"-- rank {rank}:", *lines[-60:], sep="\n")
    well = not error and codes == [0] * RANKS
    print(
        json.dumps({"well": well, "rounds": len(rounds), "unequal": job.host.unequal, "codes": codes, "error": error})
    )
    return well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which it ends, whatever it has done")
    parser.add_argument("--driver", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    lay_driver()
    with tempfile.TemporaryDirectory(prefix="nccl-graphs-") as folder:
        return 0 if asyncio.run(run(options, Path(folder))) else 1


if __name__ == "__main__":
    sys.exit(main())
