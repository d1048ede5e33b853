"""How fast the store is, stage by stage, beside what this machine can do at all: ``python -m bench.store``.

Every turn measures the limits and the store one after the other, so that a busy machine slows both. A round is the best
of three turns, since others can only make a figure worse; targets are medians of the rounds' ratios. One thread
throughout, since that is what runs beside a job.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zstandard
from blake3 import blake3

from bench.report import Report, Target, spread, versions
from moorage.store import Content, Store, chunker
from moorage.store.codec import Compressor, Rate
from moorage.store.index import Location
from moorage.store.lane import Lane
from moorage.store.packs import PackSet

MIB = 1 << 20
PIECE = 256 << 10  # about a chunk
BLOCK = MIB
KEY = bytes(32)
TURNS = 3


class Data:
    """What is stored: pages of noise (``fresh``), the same with 5 % of it new and moved, and some program text."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        make = random.Random(seed)
        self.fresh = b"".join(make.randbytes(MIB) for _ in range(size // MIB))
        self.path = folder / "pages-1.img"
        self.path.write_bytes(self.fresh)
        changed = bytearray(make.randbytes(3 * chunker.PAGE) + self.fresh[: -3 * chunker.PAGE])
        for start in range(0, size - MIB, 20 * MIB):
            changed[start : start + MIB] = make.randbytes(MIB)
        self.changed = folder / "pages-2.img"
        self.changed.write_bytes(changed)
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(path.read_bytes() for path in sources)
        self.text = (text * (32 * MIB // len(text) + 1))[: 32 * MIB]


def rate(size: int, work: Callable[[], object]) -> float:
    """MB/s of ``work`` over ``size`` bytes."""
    before = time.perf_counter()
    work()
    return size / (time.perf_counter() - before) / 1e6


def read(path: Path, use: Callable[[memoryview], object] = len) -> None:
    buffer = memoryview(bytearray(BLOCK))
    fd = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while got := os.preadv(fd, [buffer], at):
            use(buffer[:got])
            at += got
    finally:
        os.close(fd)


def name(data: memoryview) -> None:
    for start in range(0, len(data), PIECE):
        blake3(data[start : start + PIECE], key=KEY).digest()


def write(path: Path, data: bytes, *, sync: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        view = memoryview(data)
        for start in range(0, len(view), BLOCK):
            os.write(fd, view[start : start + BLOCK])
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)
    path.unlink()


def copy_named(source: Path, target: Path) -> None:
    """The least that a verified restore has to do: read, hash, write."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def use(data: memoryview) -> None:
        name(data)
        os.write(fd, data)

    try:
        read(source, use)
    finally:
        os.close(fd)
    target.unlink()


def limits(data: Data, folder: Path) -> dict[str, float]:
    size = len(data.fresh)
    view = memoryview(data.fresh)
    codec = zstandard.ZstdCompressor(level=1)
    return {
        "read": rate(size, lambda: read(data.path)),
        "hash": rate(size, lambda: name(view)),
        "read_and_hash": rate(size, lambda: read(data.path, name)),
        "zstd_text": rate(len(data.text), lambda: codec.compress(data.text)),
        "write_and_fsync": rate(size, lambda: write(folder / "raw", data.fresh, sync=True)),
        "read_hash_write": rate(size, lambda: copy_named(data.path, folder / "raw")),
    }


def add(store: Store, path: Path) -> tuple[Content, int]:
    with store.writer(label="bench", threads=1, nice=0) as writer:
        content = writer.add_file(path)
        return content, writer.finish().bytes_new


def stages(store: Store, data: Data) -> dict[str, float]:
    size = len(data.fresh)
    marker = chunker.Marker(store.key.boundaries)
    block = bytearray(data.fresh[:BLOCK])
    compressor = Compressor(Rate(1e6), Rate(500e6), 1)

    def cut() -> None:
        for _ in range(0, size, BLOCK):  # one block, since in the write path it has just been read into the cache
            marker.split(block, BLOCK, last=True)

    def named() -> None:
        for start in range(0, size, PIECE):
            store.key.chunk_name(memoryview(data.fresh)[start : start + PIECE])

    def compress() -> None:
        for start in range(0, len(data.text), PIECE):
            compressor.compress(memoryview(data.text)[start : start + PIECE])

    def pack() -> None:
        packs = PackSet(store.backend, store.key, bytes(16), f"{random.getrandbits(96):024x}", Rate(1e12))
        lane = Lane(packs, Compressor(Rate(1e12), Rate(500e6), 1))
        places: list[Location] = []
        for start in range(0, size, PIECE):
            places.append(lane.store(bytes(32), memoryview(data.fresh)[start : start + PIECE])[0])
            if start % BLOCK == 0:
                lane.flush()
        lane.finish()
        packs.finish()
        for place in {place.pack for place in places}:
            store.backend.delete(f"packs/{place}")

    return {
        "chunk": rate(size, cut),
        "name": rate(size, named),
        "compress_text": rate(len(data.text), compress),
        "write_packs": rate(size, pack),
    }


def whole(store: Store, data: Data, folder: Path) -> tuple[dict[str, float], float]:
    """The write path and the read path from end to end; and the share of the second file that was new."""
    size = len(data.fresh)
    found: list[tuple[Content, int]] = []
    figures = {
        "write_new": rate(size, lambda: found.append(add(store, data.path))),
        "write_95_percent_known": rate(size, lambda: found.append(add(store, data.changed))),
        "write_known": rate(size, lambda: found.append(add(store, data.path))),
        "fetch_and_verify": rate(size, lambda: store.read_file(found[0][0], folder / "back", threads=1)),
    }
    assert (folder / "back").read_bytes() == data.fresh
    (folder / "back").unlink()
    return figures, found[1][1] / size


def touched_pages(folder: Path, pages: int = 16_384, every: int = 100) -> float:
    """Bytes stored for a forked child's copy, over the bytes of the pages that it touched."""
    store = Store.open(str(folder / "fork"), create=True)
    parent = random.Random(7).randbytes(pages * chunker.PAGE)
    child = bytearray(parent)
    for page in range(0, pages, every):
        child[page * chunker.PAGE] ^= 255
    (folder / "parent").write_bytes(parent)
    (folder / "child").write_bytes(child)
    add(store, folder / "parent")
    return add(store, folder / "child")[1] / (pages // every * chunker.PAGE)


def turn(folder: Path, data: Data) -> tuple[dict[str, float], dict[str, float], float]:
    """Limits, the store's figures, and the share of new data in the file that is mostly known."""
    store = Store.open(str(folder / "store"), create=True)
    ours = stages(store, data)
    limit = limits(data, folder)
    ends, new = whole(store, data, folder)
    shutil.rmtree(store.location)
    return limit, ours | ends, new


def best(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: max(found[key] for found in figures) for key in figures[0]}


def measure(folder: Path, size: int, rounds: int) -> Report:
    runs: list[tuple[dict[str, float], dict[str, float]]] = []
    new = 0.0
    mostly = "read_and_hash_and_write_new"
    for number in range(rounds):
        data = Data(folder, size, number)
        limit, ours, shares = zip(*(turn(folder, data) for _ in range(TURNS)), strict=True)
        runs.append((best(limit), best(ours)))
        new = max(shares)
        runs[-1][0][mostly] = 1 / (1 / runs[-1][0]["read_and_hash"] + new / runs[-1][0]["write_and_fsync"])

    def share(mine: str, limit: str) -> float:
        return statistics.median(ours[mine] / limits_[limit] for limits_, ours in runs)

    targets = [
        Target("cutting over raw hashing", share("chunk", "hash"), "x", ">=", 3.0),
        Target("known data over raw hashing", share("write_known", "hash"), "x", ">=", 0.6),
        Target("known data over reading and hashing", share("write_known", "read_and_hash"), "x", ">=", 0.7),
        Target("95 % known over its limit", share("write_95_percent_known", mostly), "x", ">=", 0.5),
        Target("new data over raw write and fsync", share("write_new", "write_and_fsync"), "x", ">=", 0.6),
        Target("packs over raw write and fsync", share("write_packs", "write_and_fsync"), "x", ">=", 0.8),
        Target("fetch over read, hash, write", share("fetch_and_verify", "read_hash_write"), "x", ">=", 0.6),
        Target("stored for a fork over its touched pages", touched_pages(folder), "x", "<=", 1.5),
    ]
    return Report(
        bench="store",
        figures={
            "bytes": size,
            "rounds": rounds,
            "limits_mb_per_s": {key: spread(limit[key] for limit, _ in runs) for key in runs[0][0]},
            "store_mb_per_s": {key: spread(ours[key] for _, ours in runs) for key in runs[0][1]},
            "new_share_of_95_percent_known": new,
        },
        targets=targets,
        versions=versions("blake3", "zstandard", "msgspec"),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=128, help="size of the data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to store (default: the temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moorage-bench-", dir=arguments.folder) as folder:
        report = measure(Path(folder), arguments.mib * MIB, arguments.rounds)
    report.show()
    print(f"written: {report.write()}")
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
