"""The main job, for real: a training job on two of three hosts loses a host for good and ends with the same numbers.

Starts an embedded cluster of three hosts, runs `train.py` through ``moorage torchrun`` with a checkpoint every few
seconds, destroys one host (all its processes killed, its namespace and state folder deleted), and waits. Then it
compares every step's loss and the final weights with an uninterrupted run under plain torchrun, and writes
``build/demo-report.json``. Run it as root: ``make demo``.

With ``--s3`` (``make demo-s3``) the store lies encrypted on an S3 server, and what the other hosts keep of it is
deleted when the host is destroyed: all that is restored comes from the bucket.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import bucket as s3
import report

from moorage import Client
from moorage.config import ClientConfig, load
from moorage.coordinator.client import Job
from moorage.dev import cluster, layout
from moorage.errors import MoorageError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRAIN = HERE / "train.py"
RANKS = 2


class Timeline:
    """What happened when, in sentences; printed as it happens."""

    def __init__(self) -> None:
        self.began = time.time()
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def add(self, sentence: str, moment: float | None = None) -> None:
        moment = time.time() if moment is None else moment
        with self._lock:
            self.rows.append({"seconds": round(moment - self.began, 2), "sentence": sentence})
            print(f"{moment - self.began:7.1f} s  {sentence}", flush=True)


def run_reference(folder: Path, epochs: int) -> None:
    """The same script, uninterrupted, without moorage."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [*command, str(TRAIN), "--epochs", str(epochs)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            check=True,
        )


def start_job(
    config: Path, folder: Path, trail: Path, options: argparse.Namespace, marker: str
) -> subprocess.Popen[bytes]:
    """``moorage torchrun … train.py``, attached: it streams the ranks' output and ends with the job's exit code."""
    return subprocess.Popen(
        [
            *(sys.executable, "-P", "-m", "moorage.cli.main", "--config", str(config)),
            *("torchrun", f"--nnodes={RANKS}", "--nproc-per-node=1", "--name", "digits"),
            *("--checkpoint-every", f"{options.every}s", "--mount", f"{trail}:{trail}", "--env", "OMP_NUM_THREADS=1"),
            *(("--env", f"DEMO_MARKER={marker}") if marker else ()),
            *(str(TRAIN), "--epochs", str(options.epochs), "--trail", str(trail)),
        ],
        cwd=folder,
        stdout=(folder.parent / "output.txt").open("wb"),
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
    )


def find_job(client: Client, process: subprocess.Popen[bytes], output: Path) -> Job:
    """The job, as soon as the coordinator knows it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"moorage torchrun ended with {process.returncode}:\n{output.read_text()}")
        for found in client.jobs():
            if found.name == "digits":
                return client.job(found.id)
        time.sleep(0.1)
    raise SystemExit("the job was not accepted within 60 s")


def follow_events(config: ClientConfig, job: str, timeline: Timeline) -> threading.Thread:
    """Print the job's events as they come, and keep them for the report."""

    def follow() -> None:
        # When the cluster goes away the main thread says so.
        with contextlib.suppress(MoorageError, OSError), Client(config=config, patience=60) as client:
            for event in client.job(job).events(follow=True):
                timeline.add(event.sentence, event.time)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread


def wait_for_checkpoints(client: Client, job: Job, trail: Path, *, commits: int, steps_beyond: int) -> None:
    """Until so many checkpoints are committed and every rank has made some steps since the last."""
    while not all(report.trail_steps(trail, rank) for rank in range(RANKS)):
        time.sleep(0.05)
    training = max(report.trail_steps(trail, rank)[0][1] for rank in range(RANKS))
    for info in job.watch():
        if info.over:
            raise SystemExit(f"the job ended before the host was destroyed: {info.phase}, {info.reason}")
        # Only checkpoints of a job that trains: the first heartbeats may fall into the start of Python.
        if sum(checkpoint.created > training + 1 for checkpoint in client.checkpoints(job.id)) >= commits:
            break
    else:
        raise SystemExit("the job ended before it was checkpointed")
    newest = client.checkpoints(job.id)[-1]
    while min(report.steps_after(trail, rank, newest.created) for rank in range(RANKS)) < steps_beyond:
        time.sleep(0.02)


def demonstrate(
    options: argparse.Namespace, build: Path, timeline: Timeline, bucket: s3.Bucket | None
) -> dict[str, Any]:
    """The story; returns the report."""
    reference, run, trail = (build / "demo" / name for name in ("reference", "run", "trail"))
    shutil.rmtree(build / "demo", ignore_errors=True)
    for folder in (reference, run, trail):
        folder.mkdir(parents=True)
    timeline.add(f"an uninterrupted run of {options.epochs} epochs under plain torchrun, for comparison")
    run_reference(reference, options.epochs)
    timeline.add("done; starting three hosts, etcd and a coordinator")
    remote: dict[str, Any] = {}
    if bucket:
        remote = {"store": s3.LOCATION, "store_settings": bucket.settings, "on_network": bucket.on_network}
    made = cluster.up(
        nodes=3, name=options.name, default=False, lease_seconds=options.lease, use_rto_max=options.rto_max, **remote
    )
    config_file = made.folder / "client.toml"
    config = load(config_file, ClientConfig)
    process = start_job(config_file, run, trail, options, bucket.marker if bucket else "")
    try:
        with Client(config=config, patience=60) as client:
            job = find_job(client, process, run.parent / "output.txt")
            events = follow_events(config, job.id, timeline)
            wait_for_checkpoints(client, job, trail, commits=options.commits, steps_beyond=10)
            victim = job.status().pods[1].node
            destroyed = time.time()
            timeline.add(f"DESTROYING host {victim}: processes killed, namespace and state folder deleted")
            cluster.destroy(options.name, victim)
            deleted = s3.delete_local_copies(layout.find(options.name)) if bucket else []
            if bucket:
                timeline.add(f"DELETED the copies of the store on {', '.join(deleted)}: only the bucket has it now")
            code = process.wait(timeout=options.timeout)
            ended = time.time()
            job.wait(timeout=60)
            events.join(timeout=10)
            timeline.add(f"moorage torchrun ended with exit code {code}", ended)
            found = {"bucket": bucket.look() | {"local_copies_deleted": deleted}} if bucket else {}
            return found | report.build(
                reference,
                run,
                trail,
                exit_code=code,
                destroyed=destroyed,
                job=job.status(),
                checkpoints=client.checkpoints(job.id),
                events=list(job.events()),
                timeline=timeline.rows,
                ranks=RANKS,
            )
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:  # its cluster is gone: nobody answers it
                process.kill()
                process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=45)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between checkpoints")
    parser.add_argument("--commits", type=int, default=2, help="committed checkpoints before the host is destroyed")
    parser.add_argument("--lease", type=int, default=3, help="seconds of silence after which a host counts as lost")
    parser.add_argument("--no-rto-max", dest="rto_max", action="store_false", help="do without tcp_rto_max_ms")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--name", default="", help="the cluster's name (default: one for this build folder)")
    parser.add_argument("--s3", action="store_true", help="store on an S3 server, encrypted; local copies deleted")
    parser.add_argument("--build", type=Path, default=ROOT / "build")
    options = parser.parse_args()
    options.build = options.build.resolve()
    # Of this build folder alone: one that was interrupted is cleared away, another's is not touched.
    mark = hashlib.blake2b(str(options.build).encode(), digest_size=3).hexdigest()
    options.name = options.name or ("demo-s3-" if options.s3 else "demo-") + mark
    timeline = Timeline()
    try:
        cluster.down(options.name)
        with contextlib.ExitStack() as stack:
            bucket = stack.enter_context(s3.Bucket(options.build / "demo-s3")) if options.s3 else None
            result = demonstrate(options, options.build, timeline, bucket)
    except MoorageError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        if options.name in layout.names():
            cluster.down(options.name)
    (options.build / "demo-report.json").write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + report.table(result))
    if kept := result.get("bucket"):
        size = f"{kept['objects']} objects, {kept['bytes'] / 2**20:.1f} MiB"
        print(f"in the bucket                    {size}; the job's memory can be read in {kept['readable']} of them")
        result["equal"] = result["equal"] and not kept["readable"] and bool(kept["local_copies_deleted"])
    print(f"resumed bit for bit: {'yes' if result['equal'] and result['nonces_survived'] else 'no'}")
    return 0 if result["equal"] and result["nonces_survived"] and result["exit_code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
