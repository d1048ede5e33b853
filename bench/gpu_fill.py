"""From a store on tmpfs to the device by the code that restores: which threads, slots and ways of reading are best.

``python -m bench.gpu_fill [--gib 8]``. Needs an NVIDIA GPU and root; takes about 20 seconds. Nothing else runs beside
it: what it finds is what a restore could reach, not what one reaches beside CRIU. ``pread`` is how the store reads;
``mmap`` is a copy from the mapped pack, which is only tried here.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bench.gpu_checkpoint import STORE_SHARE, link
from bench.report import Report, Target, commit, gpu, machine, versions
from moorage.store import Content, Store, posix
from moorage.worker.gpu import cuda_device, ring
from moorage.worker.gpu.blocks import Block, SavedBlock, saved
from moorage.worker.gpu.cuda_device import CudaDevice
from moorage.worker.gpu.device import CHUNK
from moorage.worker.gpu.fill import fill
from moorage.worker.gpu.save import Saving
from moorage.worker.gpu.wire import BlockFlag, BlockName, Memory

_PATTERN = 256 << 20
_SECONDS = 40.0  # no new measurement begins after that


def stored(store: Store, device: CudaDevice, size: int) -> tuple[SavedBlock, dict[str, Content]]:
    """``size`` bytes of the device in the store, every chunk another."""
    pattern, numbers = device.pin(_PATTERN), device.pin(size // CHUNK * 8)
    pattern.view[:] = os.urandom(_PATTERN)
    numbers.view.cast("Q")[:] = memoryview(b"".join(n.to_bytes(8, "little") for n in range(size // CHUNK))).cast("Q")
    region, descriptor = device.create(size, rdma=False)
    for at in range(0, size, _PATTERN):
        device.to_device(pattern, [(0, region.address + at, min(_PATTERN, size - at))])
    device.to_device(numbers, [(8 * n, region.address + n * CHUNK, 8) for n in range(size // CHUNK)])
    device.wait()
    device.close(region)
    block = Block(Memory(1, size, 0, 1, 1, 0, BlockFlag.DESCRIPTOR), [descriptor])
    saving = Saving(store, label="bench", nice=0, in_place=True)
    saving.capture({BlockName(1, 1): block}, lambda _: device)
    contents, _ = saving.write()
    saving.close()
    found = saved(1, block)
    block.close()
    for slot in (pattern, numbers):
        device.unpin(slot)
    return found, contents


class Mapped:
    """Packs that were mapped, by their descriptors' files; the copy gives the interpreter free."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], tuple[mmap.mmap, int]] = {}
        self._lock = threading.Lock()

    def copy(self, descriptor: int, offset: int, buffer: memoryview) -> int:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        with self._lock:
            if key not in self._maps:
                mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
                self._maps[key] = mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        size = min(len(buffer), status.st_size - offset)
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), self._maps[key][1] + offset, size)
        return size


@contextlib.contextmanager
def reading(way: str) -> Iterator[None]:
    """Have the store read so."""
    if way == "pread":
        yield
        return
    maps = Mapped()
    ordinary = posix.PosixSource.read_into

    def read_into(source: posix.PosixSource, offset: int, buffer: memoryview) -> int:
        if len(buffer) < CHUNK:
            return ordinary(source, offset, buffer)
        return maps.copy(source._fd, offset, buffer)

    with mock.patch.object(posix.PosixSource, "read_into", read_into):
        yield


def rate(store: Store, block: SavedBlock, contents: dict[str, Content], threads: int, slot: int, way: str) -> float:
    """Bytes a second at which the block's chunks came: the best of two fills."""
    patches = (
        mock.patch.object(cuda_device, "_SLOTS", 2 * threads),
        mock.patch.object(cuda_device, "_SLOT_BYTES", slot << 20),
        mock.patch.object(ring, "THREADS", threads),
        mock.patch.object(ring, "threads_for", lambda devices: threads),
        mock.patch("moorage.worker.gpu.fill.threads_for", lambda devices: threads),
    )
    best = 0.0
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(reading(way))
        device = CudaDevice(0)
        device.slots()
        for _ in range(2):
            timings: dict[str, float] = {}
            for made in fill(store, [block], contents, lambda _: device, timings=timings).values():
                made.close()
            best = max(best, block.size / timings["gpu_fill_bring"])
        for one in device.slots():
            device.unpin(one)
    return best


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="moorage-bench-", dir="/var/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60%,mode=700,huge=always", "tmpfs", str(folder)], check=True)
    began = time.monotonic()
    figures: dict[str, Any] = {"link": link(), "rates": {}}
    try:
        store = Store.open(str(folder / "store"), create=True)
        block, contents = stored(store, CudaDevice(0), options.gib << 30)
        for threads, slot, way in [
            (16, 16, "pread"), (16, 8, "pread"), (16, 32, "pread"), (8, 16, "pread"), (24, 16, "pread"),
            (32, 16, "pread"), (16, 16, "mmap"), (16, 8, "mmap"), (16, 32, "mmap"), (8, 32, "mmap"), (24, 16, "mmap"),
            (16, 4, "pread"), (24, 8, "pread"), (32, 8, "mmap"),
        ]:  # fmt: skip
            if time.monotonic() - began > _SECONDS:
                break
            name = f"{threads} threads, slots of {slot} MiB, {way}"
            figures["rates"][name] = rate(store, block, contents, threads, slot, way)
            print(f"{name}: {figures['rates'][name] / 1e9:.1f} GB/s", flush=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        folder.rmdir()
    best = max(figures["rates"].values(), default=0.0)
    to_device = figures["link"].get("to_device", 0.0)
    targets = [Target("the best, share of the link", best / to_device, "", ">=", STORE_SHARE)] if to_device else []
    report = Report(
        bench="gpu_fill", figures=figures, targets=targets, versions=versions("cuda-core"),
        machine=machine() | gpu(), commit=options.commit or commit(),
    )  # fmt: skip
    report.write()
    report.show()
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
