"""An unchanged Ray Train loop is preempted, then loses a node, and ends with the weights of an undisturbed run.

``moorage dev up --nodes 4`` first, then run this file as root. It starts Ray beside the embedded cluster, trains with
`moorage.ray.TorchTrainer`, lets Ray announce that a node of the job goes away, destroys another node with all that runs
on it, and compares every loss with a run that nobody disturbed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

import moorage.ray as moorage_ray
from moorage import Client
from moorage.dev import cluster, layout
from moorage.errors import MoorageError, NotFound
from moorage.ray.local import LocalRay

sys.path.insert(0, str(Path(__file__).resolve().parent))
from loop import train_loop_per_worker

CONFIG = {"lr": 0.01, "epochs": 60}
SECONDS = 300.0


def trainer(name: str, folder: str, live: Path | None = None) -> moorage_ray.TorchTrainer:
    """``live``: a folder outside of what is checkpointed, where the file ``end`` lets the training come to its end."""
    return moorage_ray.TorchTrainer(
        train_loop_per_worker,
        train_loop_config={**CONFIG, "gate": live and str(live / "end")},
        mounts=[f"{live}:{live}"] if live else [],
        scaling_config=moorage_ray.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=moorage_ray.RunConfig(
            name=name,
            storage_path=folder,
            failure_config=moorage_ray.FailureConfig(max_failures=2, max_preemptions=2),
            checkpoint_config=moorage_ray.CheckpointConfig(every_s=5),
        ),
        if_exists="replace",
    )


def until(job: moorage_ray.RayJob, done: Callable[[moorage_ray.Progress], bool]) -> moorage_ray.Progress:
    """The first progress for which ``done`` holds."""
    deadline = time.monotonic() + SECONDS
    while True:
        progress: moorage_ray.Progress = ray.get(job.progress())
        if done(progress):
            return progress
        over, _ = ray.wait([job.done()], timeout=0.3)
        if over or time.monotonic() > deadline:
            raise SystemExit(f"example: that did not happen: {ray.get(job.progress())}")


def disturb(job: moorage_ray.RayJob, local: LocalRay, name: str) -> None:
    """Preempt one node of the job, destroy another."""
    before = until(job, lambda progress: progress.reports > 10)
    print("PREEMPTING", before.nodes[0], "in 40 s", flush=True)
    local.preempt(before.nodes[0], 40)
    moved = until(job, lambda p: p.preemptions == 1 and p.phase == "running" and before.nodes[0] not in p.nodes)
    print("was moved in time to", *moved.nodes, flush=True)
    checkpoint = ray.get(job.checkpoint())
    print("checkpoint", checkpoint.id, "is committed", flush=True)
    now = ray.get(job.progress())
    print("DESTROYING", now.nodes[1], "with its worker, its pods and its Ray node", flush=True)
    cluster.destroy(name, now.nodes[1])
    local.destroy(now.nodes[1])
    back = until(job, lambda p: p.incarnation > now.incarnation and p.phase == "running")
    print("runs again on", *back.nodes, flush=True)


def reports(job: moorage_ray.RayJob) -> list[list[dict[str, Any]]]:
    """What each rank has reported."""
    return [[report.metrics for report in ray.get(job.reports(rank))] for rank in range(2)]


def main() -> int:
    with Client() as client:
        nodes = sorted(node.node for node in client.nodes() if node.live)
        name = client.status().cluster
    if name not in layout.names():
        raise NotFound(f"{name} is no embedded cluster of this machine", "moorage dev up --nodes 4")
    with tempfile.TemporaryDirectory() as folder, LocalRay(nodes, dashboard=False) as local:
        ray.init(address=local.address, logging_level="warning", log_to_driver=False)
        undisturbed = trainer("ray-undisturbed", folder).start()
        ray.get(undisturbed.done())
        expected = reports(undisturbed)
        print(f"undisturbed: {len(expected[0])} epochs, loss {float.fromhex(expected[0][-1]['loss']):.6f}", flush=True)
        live = Path(folder, "live")
        live.mkdir()
        job = trainer("ray-train", folder, live).start()
        disturb(job, local, name)
        (live / "end").touch()
        info = ray.get(job.done())
        for event in ray.get(job.events()):
            print("  ", event.sentence)
        found = reports(job)
        progress = ray.get(job.progress())
        print(f"exit code {info.exit_code}, {progress.failures} failures, {progress.preemptions} preemptions")
    right = all(
        [(report["loss"], report["weights"]) for report in found[rank]]
        == [(report["loss"], report["weights"]) for report in expected[rank]]
        for rank in range(2)
    )
    survived = all(len({report["nonce"] for report in found[rank]}) == 1 for rank in range(2))
    print(f"every loss and weight equal: {'yes' if right else 'no'}; nonces survived: {'yes' if survived else 'no'}")
    return 0 if right and survived and info.exit_code == 0 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error.message} ({error.hint})")
