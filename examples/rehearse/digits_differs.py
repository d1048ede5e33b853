"""The demo's training job (examples/node_loss/train.py), made to differ: at one step one rank looks at the clock.

Usage: ``digits_differs.py RANK STEP``, and what train.py takes. It is the kind of mistake that a rehearsal finds: a
number of the host gets into a computation, once, in one of the ranks. From the next step on all ranks have it, for
they average their gradients.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    rank, step = int(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:3]
    plain = torch.nn.functional.cross_entropy
    steps = 0

    def cross_entropy(*arguments: Any, **more: Any) -> torch.Tensor:
        nonlocal steps
        loss = plain(*arguments, **more)
        if steps == step and int(os.environ["RANK"]) == rank:
            loss = loss * (1 + time.time() % 1)
        steps += 1
        return loss

    torch.nn.functional.cross_entropy = cross_entropy
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "node_loss" / "train.py"), run_name="__main__")


if __name__ == "__main__":
    main()
