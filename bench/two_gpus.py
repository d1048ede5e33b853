"""Two GPUs of one machine: what the proxies cost an all-reduce, what an exchange of GPUs does, how fast both move.

``python -m bench.two_gpus [--parts bandwidth,speed] [--gib 8] [--tests FILE]``. Needs two NVIDIA GPUs with a link, and
root. Each part is written to ``bench/results/two_gpus.json`` when it has been measured; what was there of other parts
stays if it is of the same commit. ``--tests``: what the tests with two GPUs printed, to stand beside it.

Nodes of the dev cluster: node-1 and node-2 give out one GPU each, node-3 both in bus order and node-4 both the other
way round, so what moves from node-3 to node-4 has its GPUs exchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu_checkpoint import BALLAST, Control, baseline, environment, taken
from bench.report import RESULTS, ROOT, Report, Target, commit, gpu, machine, versions
from bench.warm import Warm, free
from moorage import Client
from moorage.config import ClientConfig, load
from moorage.coordinator.client import Job
from moorage.dev import cluster as dev
from moorage.worker import gpu_host

ALLREDUCE = ROOT / "tests" / "gpu" / "programs" / "nccl" / "allreduce.py"
GPUS = [["0"], ["1"], ["0", "1"], ["1", "0"]]
LARGEST = 1 << 30
ROUNDS = 9
#: The same for both: no multicast, no plug-ins. What a pod sets besides is set for the plain ranks too.
NCCL = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1",
}  # fmt: skip


class Sweeps:
    """Two ranks of ``allreduce.py`` that measure when they are told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o755)

    def command(self) -> list[str]:
        return [sys.executable, "-u", str(ALLREDUCE), str(self.folder), str(LARGEST)]

    def wait(self, name: str, seconds: float = 60.0) -> str:
        return taken(self.folder / name, seconds)

    def tell(self, order: str) -> None:
        for rank in range(2):
            (self.folder / "new").write_text(order)
            (self.folder / "new").rename(self.folder / f"do-{rank}")

    def sweep(self, rounds: int = 3) -> dict[str, Any]:
        """Seconds by bytes, and what each GPU copies in bytes a second."""
        self.tell(f"sweep {rounds}")
        return dict(json.loads(self.wait("done")))


@contextlib.contextmanager
def plain(folder: Path) -> Iterator[Sweeps]:
    """The ranks without moorage."""
    ranks = Sweeps(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with (folder / "log").open("ab") as log:
        running = [
            subprocess.Popen(
                ranks.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment() | NCCL | {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                },
            )
            for rank in range(2)
        ]  # fmt: skip
    try:
        ranks.wait("ready")
        yield ranks
    finally:
        ranks.tell("end")
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(10)
            one.kill()
            one.wait()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[Client, Path]]:
    """The four nodes, with a store in ``folder``."""
    state = folder / "state"
    name = f"bench-{os.getpid()}"
    dev.up(nodes=len(GPUS), gpus=GPUS, name=name, state=state, lease_seconds=10, default=False, ready_seconds=60)
    try:
        with Client(config=load(state / "client.toml", ClientConfig)) as client:
            yield client, state
    finally:
        dev.down(name)
        shutil.rmtree(state, ignore_errors=True)


def places(folder: Path) -> dict[str, int]:
    """On which GPU, by bus order, each rank's process has most of its memory, as the driver says."""
    listing = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    print(listing, flush=True)
    order = [one["GPU UUID"] for one in gpu_host.information()]
    found: dict[str, tuple[int, int]] = {}
    for line in listing.splitlines():
        with contextlib.suppress(OSError, ValueError, StopIteration):
            pid, uuid, used = line.split(", ")
            words = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            variables = Path("/proc", pid, "environ").read_bytes().split(b"\0")
            if os.fsencode(folder) in words:
                rank = next(one for one in variables if one.startswith(b"RANK=")).decode()
                found[rank] = max(found.get(rank, (-1, -1)), (int(used), order.index(uuid)))
    return {rank: place for rank, (_, place) in found.items()}


def pairs(one: Sweeps, other: Sweeps, rounds: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Both measured in turn, who begins alternating; the second is the one behind the proxies."""
    found = []
    for number in range(rounds):
        first, second = (one, other) if number % 2 else (other, one)
        results = {id(first): first.sweep(), id(second): second.sweep()}
        found.append((results[id(one)], results[id(other)]))
    return found


def summary(measured: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Medians: how many times slower behind the proxies by bytes, bytes a second of the largest, of copies."""
    sizes = list(measured[0][0]["seconds"])
    largest = sizes[-1]
    ratio = {size: statistics.median(b["seconds"][size] / a["seconds"][size] for a, b in measured) for size in sizes}
    return {
        "slower": ratio,
        "seconds": {size: statistics.median(b["seconds"][size] for _, b in measured) for size in sizes},
        "plain_bytes_per_second": int(largest) / statistics.median(a["seconds"][largest] for a, _ in measured),
        "bytes_per_second": int(largest) / statistics.median(b["seconds"][largest] for _, b in measured),
        **{f"plain_{way}": statistics.median(min(a[way]) for a, _ in measured) for way in ("copy", "kernel")},
        **{way: statistics.median(min(b[way]) for _, b in measured) for way in ("copy", "kernel")},
        "slower_lowest": {size: min(b["seconds"][size] / a["seconds"][size] for a, b in measured) for size in sizes},
        "slower_highest": {size: max(b["seconds"][size] / a["seconds"][size] for a, b in measured) for size in sizes},
    }


@contextlib.contextmanager
def explained(job: Job) -> Iterator[None]:
    """On failure: what is known of the job, on stdout."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            print(*[event.sentence for event in job.events()][-20:], sep="\n")
            for rank in range(job.status().ranks):
                data = b"".join(piece.data for piece in job.logs(rank=rank))
                print(f"--- rank {rank}", *data.decode(errors="replace").splitlines()[-25:], sep="\n", flush=True)
        raise


def bandwidth(folder: Path, rounds: int, found: dict[str, Any], known: Callable[[], object]) -> None:
    """All-reduce with and without the proxies, after a checkpoint, and with the GPUs exchanged and back again."""
    with cluster(folder) as (client, _), plain(folder / "plain") as bare:
        behind = Sweeps(folder / "behind")
        job = client.run(
            behind.command(), name="allreduce", gpus_per_pod=2, ranks_per_pod=2, rendezvous=True,
            nodes=["node-3", "node-4"], env=environment() | NCCL | {"MOORAGE_NCCL": "1"}, working_directory="/",
            mounts=[f"{behind.folder}:{behind.folder}"],
        )  # fmt: skip
        with explained(job):
            behind.wait("ready")
            found["before"] = summary(pairs(bare, behind, rounds)) | {"places": places(behind.folder)}
            known()
            job.checkpoint()
            found["resumed"] = summary(pairs(bare, behind, 3))
            known()
            for name, node in (("exchanged", "node-4"), ("back", "node-3")):
                began = time.monotonic()
                job.move(to=[node])
                moved = time.monotonic() - began
                found[name] = summary(pairs(bare, behind, 3)) | {
                    "places": places(behind.folder),
                    "seconds_moved": moved,
                }
                known()
            behind.tell("end")
            job.wait(timeout=30)


def ours(client: Client, folder: Path, name: str, gib: int, gpus: int, nodes: tuple[str, str], warm: Warm) -> Any:
    """A first checkpoint, one with 1 % changed, and a restore on the other node, which has other GPUs."""
    control = Control(folder / f"control-{name}")
    job = client.run(
        [sys.executable, str(BALLAST), str(control.folder), str(gib)], name=name, gpus_per_pod=gpus, nodes=nodes,
        env=environment() | {"BALLAST_GPUS": str(gpus)}, working_directory="/",
        mounts=[f"{control.folder}:{control.folder}"],
    )  # fmt: skip
    with explained(job):
        control.wait("ready", 60.0)
    control.gap()
    warm.free(1.1 * gib + 4)
    found: dict[str, Any] = {"bytes": gib << 30}
    began = time.monotonic()
    job.checkpoint()
    found["complete"], found["pause"] = time.monotonic() - began, control.gap()
    control.tell("touch 0.01 1")
    began = time.monotonic()
    job.checkpoint()
    found["heartbeat_complete"], found["heartbeat_pause"] = time.monotonic() - began, control.gap()
    expected = control.sum()
    job.park()
    began = time.monotonic()
    job.restore(on=[nodes[1]])
    control.gap()
    found["restore"] = time.monotonic() - began
    if control.sum() != expected:
        raise RuntimeError(f"{name}: the device memory came back wrong")
    (control.folder / "end").touch()
    job.wait(timeout=60)
    return found


def speed(folder: Path, gib: int, found: dict[str, Any], known: Callable[[], object]) -> None:
    """``gib`` on each GPU: both, both by driver checkpoint + CRIU, each alone."""
    warm = Warm(folder)

    def measure(client: Client, state: Path, name: str, gpus: int, nodes: tuple[str, str]) -> None:
        warm.hold(free() - 1.2 * gib * gpus - 6)
        found[name] = ours(client, folder, name, gib * gpus, gpus, nodes, warm)
        known()
        lines = [line for path in (state / "log").glob("node-*.log") for line in path.read_text().splitlines()]
        print(
            *[line for line in lines if '"event": "captured"' in line or '"event": "restored"' in line][-4:], sep="\n"
        )

    with cluster(folder) as (client, state):
        measure(client, state, "both", 2, ("node-3", "node-4"))
        warm.hold(free() - 2.2 * 2 * gib - 4)
        os.environ["BALLAST_GPUS"] = "2"
        found["baseline"] = baseline(folder, 2 * gib, warm)
        known()
        measure(client, state, "gpu0", 1, ("node-1", "node-2"))
        measure(client, state, "gpu1", 1, ("node-2", "node-2"))


def targets(figures: dict[str, Any]) -> list[Target]:
    """What the figures at hand are held against."""
    found: list[Target] = []
    if (measured := figures.get("bandwidth")) and "before" in measured:
        before = measured["before"]
        for size, ratio in before["slower"].items():
            found.append(Target(f"all-reduce of {size} bytes, times slower behind the proxies", ratio, "", "<=", 1.01))
        for name in [name for name in ("resumed", "exchanged", "back") if name in measured]:
            after = measured[name]
            share = after["bytes_per_second"] / before["bytes_per_second"]
            found.append(Target(f"all-reduce of 1 GiB {name}, of before", share, "", ">=", 0.99))
            for way in [way for way in ("copy", "kernel") if way in after]:
                found.append(Target(f"{way} in a GPU {name}, of before", after[way] / before[way], "", ">=", 0.98))
        if "exchanged" in measured:
            exchanged = measured["exchanged"]["places"] == {"RANK=0": 1, "RANK=1": 0}
            found.append(Target("ranks on exchanged GPUs", float(exchanged), "", ">=", 1.0))
    if (measured := figures.get("speed")) and {"baseline", "both"} <= measured.keys():
        both, base = measured["both"], measured["baseline"]
        found.append(Target("checkpoint, times faster", base["complete"] / both["complete"], "", ">=", 10.0))
        found.append(Target("pause, times shorter", base["pause"] / both["heartbeat_pause"], "", ">=", 5.0))
        found.append(Target("restore, times faster", base["restore"] / both["restore"], "", ">=", 5.0))
    for line in figures.get("tests", []):
        equal = float(bool(line.get("equal")))
        found.append(Target(f"{line['program']}: results equal to an undisturbed run", equal, "", ">=", 1.0))
        if "checkpoints" in line and line.get("pods", 1) == 1:
            times = float(line["checkpoints"] + line.get("moves", 0))
            found.append(Target(f"{line['program']}: checkpoints", times, "", ">=", 10.0))
    return found


def link() -> str:
    """How the first two GPUs are linked, as ``nvidia-smi topo`` calls it."""
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False)
    row = next((line.split() for line in done.stdout.splitlines() if line.startswith("GPU0")), [])
    return row[2] if len(row) > 2 else ""


def write(figures: dict[str, Any], of: str) -> Report:
    """What is known by now, into the results."""
    report = Report(
        bench="two_gpus", figures=figures, targets=targets(figures), commit=of,
        versions=versions("cuda-core", "torch", "transformers"),
        machine=machine() | gpu() | {"gpus": len(gpu_host.information()), "link": link()},
    )  # fmt: skip
    if report.targets:
        report.write()
    return report


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default="bandwidth,speed")
    parser.add_argument("--gib", type=int, default=8, help="of each GPU")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--room", type=int, default=160, help="GiB of memory for the store and the images, at most")
    parser.add_argument("--tests", type=Path, nargs="*", default=[], help="two_gpus.jsonl and nccl.jsonl")
    parser.add_argument("--commit", default="", help="of this tree, where there is no git")
    options = parser.parse_args()
    of = options.commit or commit()
    figures: dict[str, Any] = {}
    with contextlib.suppress(OSError, msgspec.DecodeError):
        before = msgspec.json.decode((RESULTS / "two_gpus.json").read_bytes())
        figures = dict(before["figures"]) if before["commit"] == of else {}
    lines = [line for path in options.tests if path.exists() for line in path.read_text().splitlines()]
    if lines:
        figures["tests"] = [json.loads(line) for line in lines]
        write(figures, of)
    failed = False
    for part in [part for part in options.parts.split(",") if part]:
        folder = Path(tempfile.mkdtemp(prefix="moorage-bench-", dir="/var/tmp"))
        folder.chmod(0o755)
        # Not a share of the memory: a virtual machine may have little when it starts, and get more as it needs it.
        options_ = f"size={options.room}g,mode=755,huge=always"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options_, "tmpfs", str(folder)], check=True)
        found: dict[str, Any] = {}
        figures[part] = found

        def known(part: str = part, found: dict[str, Any] = found) -> None:
            print(json.dumps({part: list(found.items())[-1:]}), flush=True)
            write(figures, of)

        try:
            if part == "bandwidth":
                bandwidth(folder, options.rounds, found, known)
            else:
                speed(folder, options.gib, found, known)
        except Exception:  # the other part may still work
            traceback.print_exc()
            failed = True
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=False)
            folder.rmdir()
    report = write(figures, of)
    report.show()
    return 0 if report.met() and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
