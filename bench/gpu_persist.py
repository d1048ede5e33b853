"""What bounds a first checkpoint of device memory: the way from the pinned ring into packs, without a GPU.

``python -m bench.gpu_persist [--mib 2048] [--threads 1,2]``. The device is one that copies nothing, so that all that is
measured is what processors do: names looked up, packs written, files in memory. Beside it the same bytes written with
plain `os.writev`. ``per_cpu`` is bytes for each second of processor time; times the processors it says what a machine
can reach, up to the link and the memory. Needs root: it mounts two tmpfs, one with small and one with huge pages.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from bench.report import Report, Target, versions
from moorage.store import Store
from moorage.worker.gpu import ring, save
from moorage.worker.gpu.blocks import Block
from moorage.worker.gpu.device import CHUNK, Region, Slot
from moorage.worker.gpu.wire import BlockFlag, BlockName, Memory

SLOT = 16 << 20
PACK = 64 << 20


class NoDevice:
    """As if the link took no time: the slots hold noise, and every chunk has a name of its own."""

    index = 0

    def __init__(self, threads: int) -> None:
        noise = bytearray(os.urandom(SLOT))
        self._slots = [Slot(n, memoryview(bytearray(noise)), threading.Lock()) for n in range(2 * threads)]

    def warm(self) -> None: ...

    def open(self, descriptor: int, size: int) -> Region:
        return Region(0, size, 0)

    def create(self, size: int, *, rdma: bool) -> tuple[Region, int]:
        raise NotImplementedError

    def place(self, descriptor: int) -> int:
        return 0

    def close(self, region: Region) -> None: ...

    def free_bytes(self) -> int:
        return 1 << 50

    def digests(self, regions: Sequence[Region], key: bytes) -> list[bytes]:
        return [secrets.token_bytes(region.size // CHUNK * 32) for region in regions]

    def scratch(self, size: int) -> Region:
        return Region(0, size, 0)

    def gather(self, sources: Sequence[int], region: Region) -> None: ...

    def clear(self, address: int, size: int) -> None: ...

    def slots(self) -> Sequence[Slot]:
        return self._slots

    def pin(self, size: int) -> Slot:
        raise NotImplementedError

    def unpin(self, slot: Slot) -> None: ...

    def to_host(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None: ...

    def to_device(self, slot: Slot, pieces: Sequence[tuple[int, int, int]]) -> None: ...

    def wait(self) -> None: ...


def timed(size: int, work: Callable[[], object]) -> dict[str, float]:
    """GB/s by the clock and for each second of processor time."""
    began, before = time.perf_counter(), os.times()
    work()
    took, after = time.perf_counter() - began, os.times()
    spent = after.user - before.user + after.system - before.system
    return {"rate": size / took / 1e9, "per_cpu": size / max(spent, 0.01) / 1e9, "user": after.user - before.user}


def moorage(folder: Path, size: int, threads: int) -> dict[str, float]:
    """The broker's own path: hash (here: random names), stage, write."""
    device = NoDevice(threads)
    with mock.patch.object(ring, "THREADS", threads):
        saving = save.Saving(Store.open(str(folder / "store"), create=True), label="bench", nice=0)
        block = Block(Memory(1, size, 0, 1, 1, 0, BlockFlag.DESCRIPTOR), [-1])
        found: dict[str, float] = {}

        def work() -> None:
            before = time.perf_counter()
            saving.capture({BlockName(1, 1): block}, lambda _: device)
            found["capture_seconds"] = time.perf_counter() - before
            saving.write()

        found |= timed(size, work)
        saving.close()
    return found


def plain(folder: Path, size: int, threads: int) -> dict[str, float]:
    """The same bytes in files of a pack's size, nothing but system calls."""
    noise = memoryview(os.urandom(SLOT))

    def one(number: int) -> None:
        for pack in range(size // PACK // threads):
            fd = os.open(folder / f"{number}-{pack}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            for _ in range(PACK // SLOT):
                os.writev(fd, [noise])
            os.close(fd)

    def work() -> None:
        running = [threading.Thread(target=one, args=(number,)) for number in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    return timed(size // PACK // threads * threads * PACK, work)


def both(size: int, threads: int, options: str) -> dict[str, Any]:
    """Plain writes and moorage's on one fresh tmpfs, whose memory this machine has touched before."""
    found: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="moorage-bench-", dir="/var/tmp"))
    for name, work in {"warm": plain, "plain": plain, "moorage": moorage}.items():
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=95%,mode=700{options}", "tmpfs", str(folder)], check=True)
        try:
            found[name] = work(folder, size, threads)
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--threads", default=",".join(str(n) for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1)))
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    for pages, (mounting, wanted) in {"small pages": ("", 0.85), "huge pages": (",huge=always", 0.5)}.items():
        for threads in (int(number) for number in options.threads.split(",")):
            name = f"{pages}, {threads} threads"
            figures[name] = both(options.mib << 20, threads, mounting)
            share = figures[name]["moorage"]["per_cpu"] / figures[name]["plain"]["per_cpu"]
            targets.append(Target(f"{name}: share of plain writes", share, "", ">=", wanted))
        # What 16 processors write when they do not get into each other's way.
        figures[f"{pages}, predicted for 16"] = 16 * figures[name]["moorage"]["per_cpu"]
    report = Report(bench="gpu_persist", figures=figures, targets=targets, versions=versions())
    report.write()
    report.show()
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
