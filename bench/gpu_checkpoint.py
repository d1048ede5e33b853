"""A job with much device memory: driver checkpoint + CRIU against moorage, same program, same tmpfs, one run.

``python -m bench.gpu_checkpoint [--sizes 8,32,64] [--baseline 8,32] [--host 8] [--full 24]``. Needs an NVIDIA GPU,
root, and host memory for two copies of the largest baseline. All device memory is distinct and incompressible.
``--host``: device memory of a row with 16 GiB of host memory and 4 GiB pinned. ``--full``: of one on a device that has
no room for a copy (zeros fill it but for 9 GiB). The tmpfs is for both; its memory is written once before
anything is measured (a virtual machine gets its memory at the first touch) and has huge pages unless ``--huge never``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import ROOT, Report, Target, commit, gpu, machine, versions
from bench.warm import Warm
from moorage import Client
from moorage.config import ClientConfig, load
from moorage.dev import cluster as dev
from moorage.runtime import programs
from moorage.worker.gpu.driver import DriverProcess

BALLAST = ROOT / "bench" / "programs" / "ballast.py"
LINK = ROOT / "bench" / "programs" / "link.py"
#: The most that a heartbeat may stop the job, in seconds, and the shares of the link's rate that are wanted.
PAUSE, CHANGED_SHARE, HOST_SHARE, STORE_SHARE = 1.6, 0.8, 0.8, 0.55
_SECONDS = 600.0
HEARTBEATS = 5
_SHOWN = ("frozen", "captured", "persisted", "restored")


def taken(path: Path, seconds: float) -> str:
    """The file's text once it is there; it is taken away. Raises `TimeoutError`."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"the program did not write {path}")
        time.sleep(0.002)
    text = path.read_text()
    path.unlink()
    return text


class Control:
    """The folder through which the program is told what to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)

    def wait(self, name: str, seconds: float = _SECONDS) -> str:
        """As `taken`, of a file in the folder."""
        return taken(self.folder / name, seconds)

    def tell(self, order: str) -> None:
        """Give an order and wait until it is done."""
        (self.folder / "do.new").write_text(order)
        (self.folder / "do.new").rename(self.folder / "do")
        self.wait("done")

    def gap(self) -> float:
        """Seconds of the longest time between two steps since this was asked last."""
        self.tell("gap")
        return float(self.wait("gap"))

    def sum(self) -> str:
        """A digest of all device memory."""
        self.tell("sum")
        return self.wait("sum")


def command(control: Control, gib: int, host: tuple[int, int] = (0, 0), zeros: int = 0) -> list[str]:
    """``host``: GiB of host memory, and of pinned memory beside it. ``zeros``: GiB of them on the device."""
    more = [str(number) for number in (*host, zeros)] if any(host) or zeros else []
    return [sys.executable, str(BALLAST), str(control.folder), str(gib), *more]


# -- (a) driver checkpoint + CRIU


def baseline(folder: Path, gib: int, warm: Warm) -> dict[str, float]:
    """Seconds of the state of the art on any such machine: pause and completion are one, restore is the way back."""
    control = Control(folder / f"control-a-{gib}")
    images = folder / f"images-{gib}"
    images.mkdir(mode=0o700)
    with (folder / "baseline.log").open("ab") as log:
        process = subprocess.Popen(
            command(control, gib), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    control.wait("ready")
    expected = control.sum()
    control.gap()
    criu = str(programs.find("criu"))
    common = ["-D", str(images), "--tcp-established", "--file-locks", "--ghost-limit", "1073741824", "-v2"]
    driver = DriverProcess(process.pid)
    warm.free(2.2 * gib + 4)
    began = time.monotonic()
    driver.lock(60)
    driver.checkpoint()
    saved = time.monotonic()
    dumping = [criu, "dump", "-t", str(process.pid), "--leave-running", "-o", "dump.log", *common]
    subprocess.run(dumping, check=True)
    dumped = time.monotonic()
    driver.restore()
    driver.unlock()
    resumed = time.monotonic()
    found = {
        "driver_checkpoint": saved - began,
        "dump": dumped - saved,
        "complete": dumped - began,
        "pause": control.gap(),
        "image_bytes": float(sum(path.stat().st_size for path in images.iterdir())),
        "resume": resumed - dumped,
    }
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    began = time.monotonic()
    subprocess.run([criu, "restore", "-d", "-o", "restore.log", *common], check=True)
    driver = DriverProcess(process.pid)
    driver.restore()
    driver.unlock()
    found["restore"] = time.monotonic() - began
    if control.sum() != expected:
        raise RuntimeError("the baseline's memory came back wrong")
    (control.folder / "end").touch()
    shutil.rmtree(images)
    return found


# -- (b) to (d) moorage


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[Client, Path]]:
    """Two nodes on this machine with a store on the tmpfs; both see the GPU."""
    state = folder / "state"
    name = f"bench-{os.getpid()}"
    made = dev.up(nodes=2, name=name, state=state, lease_seconds=10, default=False, ready_seconds=60)
    try:
        with Client(config=load(state / "client.toml", ClientConfig)) as client:
            yield client, state
    finally:
        dev.down(made.name)
        shutil.rmtree(state, ignore_errors=True)


def environment() -> dict[str, str]:
    kept = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
    return {name: os.environ[name] for name in kept if name in os.environ}


def peak_bytes(state: Path) -> int:
    """The most resident memory that workers and GPU brokers have had, added up."""
    total = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, StopIteration):
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if os.fsencode(state) in words and (b"moorage.worker.gpu" in words or b"worker" in words):
                lines = (entry / "status").read_text().splitlines()
                total += int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    return total


def stored(state: Path) -> int:
    """Bytes of all packs."""
    return sum(path.stat().st_size for path in (state / "store" / "packs").iterdir())


def ours(folder: Path, gib: int, warm: Warm, *, all_changed: bool, host: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """First checkpoint, heartbeats with 1 % changed, one with all changed, restore on another node."""
    control = Control(folder / f"control-{gib}-{host[0]}")
    found: dict[str, Any] = {}
    with cluster(folder) as (client, state):
        job = client.run(
            command(control, gib, host), name="ballast", gpus_per_pod=1, env=environment(),
            working_directory="/", mounts=[f"{control.folder}:{control.folder}"],
        )  # fmt: skip
        control.wait("ready")
        control.gap()
        warm.free(1.1 * gib + 4)
        began = time.monotonic()
        first = job.checkpoint()
        found["first"] = {"complete": time.monotonic() - began, "pause": control.gap(), "new": first.bytes_new}
        before = stored(state)
        beats = []
        distinct = 0
        for number in range(HEARTBEATS):
            control.tell(f"touch 0.01 {number}")
            distinct += round(gib * 512 * 0.01) * (2 << 20)
            began = time.monotonic()
            beat = job.checkpoint()
            beats.append({"complete": time.monotonic() - began, "pause": control.gap(), "new": beat.bytes_new})
        found["heartbeat"] = beats
        grown = stored(state) - before
        found["stored_by_distinct"] = (before + grown) / (before + distinct)
        if all_changed:
            control.tell("all")
            warm.free(1.1 * gib)
            began = time.monotonic()
            whole = job.checkpoint()
            found["all_changed"] = {
                "complete": time.monotonic() - began, "pause": control.gap(), "new": whole.bytes_new
            }  # fmt: skip
        expected = control.sum()
        found["peak_bytes"] = peak_bytes(state)
        job.park()
        began = time.monotonic()
        job.restore(on=["node-2"])
        control.gap()
        found["restore"] = time.monotonic() - began  # until it makes steps and answers
        found["arrival"] = arrival(state, gib)
        if control.sum() != expected:
            raise RuntimeError("the device memory came back wrong")
        for place in ("host", "gpu"):  # where there is no room to keep it, this is a restore from the store
            warm.free(1.1 * gib + 4 if place == "host" else 0)
            job.park(keep=place)
            began = time.monotonic()
            job.restore(on=["node-2"])
            control.gap()
            found[f"restore_kept_{place}"] = time.monotonic() - began
            if place == "host":
                found["arrival_kept_host"] = arrival(state, gib)
            if control.sum() != expected:
                raise RuntimeError(f"the device memory kept on the {place} came back wrong")
        (control.folder / "end").touch()
        job.wait(timeout=60)
        found["log"] = [line for line in _log(state) if any(f'"event": "{what}"' in line for what in _SHOWN)]
    return found


def full(folder: Path, gib: int, warm: Warm) -> dict[str, Any]:
    """A job that leaves 9 GiB of its device: ``gib`` of it distinct, which is more than a copy has room for."""
    control = Control(folder / f"control-full-{gib}")
    found: dict[str, Any] = {}
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    total = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]) // 1024
    with cluster(folder) as (client, state):
        job = client.run(
            command(control, gib, (0, 0), total - gib - 9), name="full", gpus_per_pod=1, env=environment(),
            working_directory="/", mounts=[f"{control.folder}:{control.folder}"],
        )  # fmt: skip
        control.wait("ready")
        for name in ("first", "all_changed"):
            control.gap()
            if name == "all_changed":
                control.tell("all")
            warm.free(1.1 * gib + 4)
            began = time.monotonic()
            saved = job.checkpoint()
            seconds = time.monotonic() - began
            found[name] = {"complete": seconds, "pause": control.gap(), "new": saved.bytes_new}
        found["peak_bytes"] = peak_bytes(state)
        expected = control.sum()
        began = time.monotonic()
        job.park()
        found["park"] = time.monotonic() - began
        began = time.monotonic()
        job.restore(on=["node-2"])
        if control.sum() != expected:
            raise RuntimeError("the memory of a full device came back wrong")
        found["restore"] = time.monotonic() - began
        (control.folder / "end").touch()
        job.wait(timeout=60)
        found["log"] = [line for line in _log(state) if any(f'"event": "{what}"' in line for what in _SHOWN)]
        for path in (state / "nodes").glob("*/gpu/broker.log"):
            found["log"] += [line for line in path.read_text().splitlines() if "copied" in line]
    return found


def link() -> dict[str, float]:
    """Bytes a second between pinned memory and the device, each way; empty when that cannot be told."""
    done = subprocess.run([sys.executable, str(LINK)], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr, flush=True)
        return {}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def arrival(state: Path, gib: int) -> float:
    """Bytes a second at which the device memory came at the last restore, by the worker's own word; 0: it said none."""
    lines = [json.loads(line) for line in _log(state) if '"event": "restored"' in line]
    last: dict[str, Any] = max(lines, key=lambda line: str(line["timestamp"]), default={})
    seconds = float(last.get("gpu_fill_bring", 0.0))
    return gib * 2**30 / seconds if seconds else 0.0


def _log(state: Path) -> list[str]:
    return [line for path in (state / "log").glob("node-*.log") for line in path.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="8,32,64")
    parser.add_argument("--baseline", default="8,32")
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    parser.add_argument("--host", type=int, default=8, help="GiB on the device with 16 + 4 GiB on the host")
    parser.add_argument("--full", type=int, default=0, help="GiB that are distinct on a device that is full")
    parser.add_argument("--huge", choices=("always", "never"), default="always", help="pages of the tmpfs")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",") if size]
    compared = [int(size) for size in options.baseline.split(",") if size]
    folder = Path(tempfile.mkdtemp(prefix="moorage-bench-", dir="/var/tmp"))
    folder.chmod(0o755)
    mounting = f"size=98%,mode=755,huge={options.huge}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", mounting, "tmpfs", str(folder)], check=True)
    figures: dict[str, Any] = {}
    try:
        warm = Warm(folder)
        figures["link"] = link()
        if options.full:
            print(f"moorage, {options.full} GiB on a device that is full", flush=True)
            warm.hold(16, least_gib=3)
            figures["full"] = full(folder, options.full, warm)
            print({k: v for k, v in figures["full"].items() if k != "log"}, flush=True)
            print(*figures["full"].pop("log"), sep="\n", flush=True)
        if options.host:
            print(f"moorage, {options.host} GiB and 16 + 4 GiB on the host", flush=True)
            warm.hold(28, least_gib=3)
            figures["host_16+4"] = ours(folder, options.host, warm, all_changed=False, host=(16, 4))
            print(*figures["host_16+4"].pop("log"), sep="\n", flush=True)
        for gib in sizes:
            print(f"moorage, {gib} GiB", flush=True)
            warm.hold(16, least_gib=3)
            figures[f"moorage_{gib}"] = ours(folder, gib, warm, all_changed=gib <= 32)
            print({k: v for k, v in figures[f"moorage_{gib}"].items() if k != "log"}, flush=True)
            print(*figures[f"moorage_{gib}"].pop("log"), sep="\n", flush=True)
            if gib in compared:
                print(f"driver checkpoint + CRIU, {gib} GiB", flush=True)
                warm.hold(16, least_gib=3)
                figures[f"baseline_{gib}"] = baseline(folder, gib, warm)
                print(figures[f"baseline_{gib}"], flush=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
        folder.rmdir()
        report = Report(
            bench="gpu_checkpoint",
            figures=figures,
            targets=targets(figures),
            versions=versions("cuda-core", "torch"),
            machine=machine() | gpu() | {"tmpfs": mounting},
            commit=options.commit or commit(),
        )
        report.write()
        report.show()
    return 0 if report.met() else 1


def targets(figures: dict[str, Any]) -> list[Target]:
    """What the figures at hand can be held against."""
    found: list[Target] = []
    link_rates = figures.get("link") or {}
    to_device, to_host = link_rates.get("to_device", 0.0), link_rates.get("to_host", 0.0)
    for name, value in figures.items():
        kind, _, gib = name.partition("_")
        if kind != "moorage":
            continue
        worst = max(beat["pause"] for beat in value["heartbeat"])
        found += [
            Target(f"heartbeat pause, {gib} GiB, 1 % changed", worst, "s", "<=", PAUSE),
            Target(f"stored by distinct bytes, {gib} GiB", value["stored_by_distinct"], "", "<=", 1.1),
            Target(f"peak host memory, {gib} GiB", value["peak_bytes"] / 2**30, "GiB", "<=", 4.0),
        ]
        if to_device:
            arrived, kept = value["arrival"] / to_device, value["arrival_kept_host"] / to_device
            found += [
                Target(f"restore from tmpfs, share of the link, {gib} GiB", arrived, "", ">=", STORE_SHARE),
                Target(f"restore from kept host memory, share of the link, {gib} GiB", kept, "", ">=", HOST_SHARE),
            ]
        if to_host and (whole := value.get("all_changed")):
            most = PAUSE + whole["new"] / (CHANGED_SHARE * to_host)
            found.append(Target(f"heartbeat pause, {gib} GiB, all changed", whole["pause"], "s", "<=", most))
        if base := figures.get(f"baseline_{gib}"):
            restored = base["restore"] / value["restore"]
            found.append(Target(f"restore, times faster, {gib} GiB", restored, "", ">=", 5.0))
            if int(gib) >= 32:  # below, what does not grow with the memory is most of it
                first = base["complete"] / value["first"]["complete"]
                found.append(Target(f"first checkpoint, times faster, {gib} GiB", first, "", ">=", 10.0))
                typical = statistics.median(beat["pause"] for beat in value["heartbeat"])
                found.append(Target(f"pause, times shorter, {gib} GiB", base["pause"] / typical, "", ">=", 25.0))
    return found


if __name__ == "__main__":
    sys.exit(main())
