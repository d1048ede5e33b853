"""``python -m moorage.ray.rank PAYLOAD``: one rank of a `TorchTrainer`, in its pod. No Ray runs here.

The payload is what `moorage.ray.trainer` has pickled: the training loop, its configuration, data sets. It is read once,
before the loop begins; a restored rank never comes here again.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from moorage.ray import session


def main(path: str) -> None:
    """Run the loop to its end. What it raises ends the rank, and with it the job."""
    content = Path(path).read_bytes()
    place = session.Place(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        node_rank=int(os.environ["GROUP_RANK"]),
    )
    session.install(place)
    payload = pickle.loads(content)
    session.begin(payload["name"], Path(payload["folder"]), payload["datasets"], payload["metadata"])
    loop, config = payload["loop"], payload["config"]
    with session.process_group(payload["backend"]):
        if payload["takes_config"]:
            loop(config)
        else:
            loop()


if __name__ == "__main__":
    main(sys.argv[1])
