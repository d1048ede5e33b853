"""A Ray job loses a node for good, and ends right: ``moorage dev up --nodes 4`` first, then run this file as root.

It starts Ray beside the embedded cluster, a Ray node for each node, submits ``driver.py`` with ``ray job submit``,
destroys a node with all that runs on it, and compares the sums with an undisturbed run of the same program without Ray
and moorage.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moorage import Client
from moorage.coordinator.client import Job
from moorage.dev import cluster, layout
from moorage.errors import MoorageError, NotFound
from moorage.ray.local import LocalRay

HERE = Path(__file__).resolve().parent
ROUNDS = 200  # as the driver has it
SECONDS = 300.0


def reference(folder: Path) -> dict[int, str]:
    """The digests of an undisturbed run."""
    variables = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "count.py"), str(ROUNDS), "/"],
            cwd=folder,
            env=variables | {"RANK": str(rank)},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [rank.wait(SECONDS) for rank in ranks] == [0, 0]
    return {rank: (folder / f"sum-{rank}.txt").read_text().split()[1] for rank in range(2)}


def find(client: Client, submitted: subprocess.Popen[str]) -> Job:
    """The job, as soon as it has been parked and restored by its driver and runs."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and submitted.poll() is None:
        try:
            job = client.job("ray-count")
            if job.status().incarnation > 1 and job.status().phase == "running":
                return job
        except NotFound:
            pass
        time.sleep(0.2)
    raise SystemExit(f"example: the Ray job did not begin\n{submitted.communicate(timeout=5)[0]}")


def again(job: Job, incarnation: int) -> list[str]:
    """Where the job runs after that incarnation. It fails first, and then its driver brings it back."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        info = job.status()
        if info.incarnation > incarnation and info.phase == "running":
            return places(job)
        time.sleep(0.2)
    raise SystemExit(f"example: the job did not come back: {job.status()}")


def places(job: Job) -> list[str]:
    return [pod.node for pod in job.status().pods]


def main() -> int:
    with Client() as client, tempfile.TemporaryDirectory() as folder:
        undisturbed, run, live = (Path(folder, name) for name in ("undisturbed", "run", "live"))
        undisturbed.mkdir()
        live.mkdir()
        nodes = sorted(node.node for node in client.nodes() if node.live)
        with LocalRay(nodes) as local:
            print("Ray runs beside", ", ".join(nodes), flush=True)
            submitted = subprocess.Popen(
                [
                    *(str(Path(sys.executable).with_name("ray")), "job", "submit", "--"),
                    *(sys.executable, str(HERE / "driver.py"), folder),
                ],
                env=os.environ | local.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            expected = reference(undisturbed)
            job = find(client, submitted)
            job.checkpoint()
            victim = places(job)[1]
            print(f"DESTROYING {victim}: its worker, its pods and its Ray node", flush=True)
            destroyed = job.status().incarnation
            cluster.destroy(embedded(client), victim)
            local.destroy(victim)
            print("runs again on", *again(job, destroyed), flush=True)
            (live / "end").touch()
            output, _ = submitted.communicate(timeout=SECONDS)
            print(output)
        return judge(run, expected, job, submitted.returncode)


def embedded(client: Client) -> str:
    """The name of the embedded cluster."""
    name = client.status().cluster
    if name not in layout.names():
        raise NotFound(f"{name} is no embedded cluster of this machine", "moorage dev up --nodes 3")
    return name


def judge(run: Path, expected: dict[int, str], job: Job, code: int) -> int:
    """Print what is right and what is not; the exit code."""
    right = survived = code == 0
    for rank in range(2):
        nonce, digest = (run / f"sum-{rank}.txt").read_text().split()
        lines = b"".join(piece.data for piece in job.logs(rank=rank)).decode().splitlines()
        right = right and digest == expected[rank]
        told = [line.split()[-1] for line in lines if "nonce" in line]
        survived = survived and told == [nonce, nonce]
    print(f"sums as undisturbed: {'yes' if right else 'no'}; nonces survived: {'yes' if survived else 'no'}")
    return 0 if right and survived else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error}")
