"""The Ray job: ``ray job submit -- python driver.py FOLDER``. Ray gives it two bundles, the ranks run there.

Prints what it learns, so that whoever submitted it can follow: first the nodes, at the end what happened.
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray

import moorage.ray as moorage_ray
from moorage.errors import MoorageError

COUNT = Path(__file__).resolve().with_name("count.py")


ROUNDS = 200


def main(folder: str) -> None:
    work, live = f"{folder}/run", f"{folder}/live"
    ray.init(logging_level="warning")
    job = moorage_ray.launch(
        [sys.executable, "-u", str(COUNT), str(ROUNDS), f"{live}/end"],
        name="ray-count",
        working_directory=work,
        mounts=[f"{live}:{live}"],
        scaling_config=moorage_ray.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        checkpoint_config=moorage_ray.CheckpointConfig(every_s=3),
        if_exists="replace",
    )
    started = ray.get(job.started())
    checkpoint = ray.get(job.checkpoint())
    print(f"checkpoint {checkpoint.id} is committed; the job stood still for {checkpoint.pause_seconds:.2f} s")
    ray.get(job.park())
    print("parked: Ray has its bundles back", flush=True)
    print("restored on", *{pod.node for pod in ray.get(job.restore()).pods})
    print("runs on", *[pod.node for pod in started.pods], flush=True)
    info = ray.get(job.done())
    progress = ray.get(job.progress())
    for event in ray.get(job.events()):
        print("  ", event.sentence)
    print(f"exit code {info.exit_code}, {progress.failures} failures, {progress.preemptions} preemptions")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MoorageError as error:
        sys.exit(f"driver: {error.message} ({error.hint})")
