"""A serving worker from launch to its first token: cold against restored. Needs an NVIDIA GPU, root and transformers.

``python -m bench.cold_start [--gib 4.5] [--rounds 2] [--again]``. Cold is the plain program without moorage, with empty
caches of compiled kernels (a new machine); with ``--again`` once more with the caches that it filled. Restored is the
parked job: from a store on a tmpfs whose memory was touched before, on one of two nodes of this machine and then the
other; and on the node where it was, from the device memory that it left in pinned host memory (``park --keep host``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu_checkpoint import Control, cluster, environment
from bench.report import ROOT, Report, Target, commit, gpu, machine, versions
from bench.warm import Warm

SERVE = ROOT / "bench" / "programs" / "serve.py"
_TIMES = 10.0


def command(control: Control, gib: float) -> list[str]:
    return [sys.executable, str(SERVE), str(control.folder), str(gib)]


def caches(folder: Path) -> dict[str, str]:
    """Where torch and Triton keep what they compiled."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def cold(folder: Path, name: str, gib: float, compiled: Path) -> float:
    """Seconds from the launch of the plain program to its first token."""
    control = Control(folder / f"control-{name}")
    (control.folder / "ask").touch()
    began = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command(control, gib), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | caches(compiled)
        )
    try:
        _wait(control, process)
        return time.monotonic() - began
    finally:
        (control.folder / "end").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()
        process.wait()


def _wait(control: Control, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(TimeoutError):
            control.wait("token", 1.0)
            return
    raise RuntimeError("the serving program ended before its first token; see its log")


def restored(folder: Path, gib: float, rounds: int, compiled: Path) -> Iterator[tuple[str, float]]:
    """Device bytes, then for each round seconds from the order to restore to the next token, by where it came from."""
    control = Control(folder / "control")
    with cluster(folder) as (client, _):
        job = client.run(
            command(control, gib), name="serving", gpus_per_pod=1, env=environment() | caches(compiled),
            working_directory="/", mounts=[f"{control.folder}:{control.folder}", f"{compiled}:{compiled}"],
        )  # fmt: skip
        yield "bytes", float(control.wait("ready"))
        number = 0
        for place in ["", "host"] * rounds:
            (control.folder / "ask").touch()
            before = control.wait("token")
            number += 1
            if int(before.split()[0]) != number:
                raise RuntimeError(f"a token was lost or made twice: {before}, not number {number}")
            here = job.status().pods[0].node
            job.park(keep=place)
            (control.folder / "ask").touch()
            there = {"node-1": "node-2", "node-2": "node-1"}[here]
            began = time.monotonic()
            job.restore(on=[here if place else there])
            found = control.wait("token")
            yield place or "tmpfs", time.monotonic() - began
            number += 1
            if int(found.split()[0]) != number:
                raise RuntimeError(f"a token was lost or made twice: {found}, not number {number}")
        (control.folder / "end").touch()
        job.wait(timeout=60)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4.5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="a second cold start, with what the first one compiled")
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="moorage-bench-", dir="/var/tmp"))
    folder.chmod(0o755)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=98%,mode=755,huge=always", "tmpfs", str(folder)], check=True)
    compiled = folder / "compiled"
    compiled.mkdir(mode=0o755)
    figures: dict[str, Any] = {}
    try:
        warm = Warm(folder)
        warm.hold(16, least_gib=3)
        warm.free(options.gib * 5)
        figures["cold"] = cold(folder, "cold", options.gib, compiled)
        if options.again:
            figures["cold_compiled_before"] = cold(folder, "warm", options.gib, compiled)
        found = list(restored(folder, options.gib, options.rounds, compiled))
        figures["device_bytes"] = next(value for name, value in found if name == "bytes")
        for place in ("tmpfs", "host"):
            figures[f"restored_{place}"] = [value for name, value in found if name == place]
    finally:
        for log in folder.glob("*.log"):
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n", flush=True)
        subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)
    faster = {place: figures["cold"] / statistics.median(figures[f"restored_{place}"]) for place in ("tmpfs", "host")}
    report = Report(
        bench="cold_start",
        figures=figures,
        targets=[
            Target("first token, restored from tmpfs, times faster than cold", faster["tmpfs"], "", ">=", _TIMES),
            Target("first token, restored from kept memory, times faster than cold", faster["host"], "", ">=", _TIMES),
            Target("weights and caches on the device", figures["device_bytes"] / 2**30, "GiB", ">=", 4.0),
        ],
        versions=versions("cuda-core", "torch", "transformers"),
        machine=machine() | gpu(),
        commit=options.commit or commit(),
    )
    report.write()
    report.show()
    return 0 if report.met() else 1


if __name__ == "__main__":
    sys.exit(main())
