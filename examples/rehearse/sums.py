"""A small job for a rehearsal: each rank adds up numbers of its own random sequence, a step at a time.

With ``--impure`` it adds the number of its incarnation as well, as a program does that looks at the clock or at its
host to compute: after a restore the sums are others, and the rehearsal says from which step on.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

from moorage import hooks


def main() -> None:
    steps, impure = int(sys.argv[1]), "--impure" in sys.argv
    rank = int(os.environ.get("MOORAGE_RANK", "0"))
    numbers = random.Random(rank)
    total = 0.0
    with Path(f"sums-rank{rank}.txt").open("w", buffering=1) as log:
        for step in range(steps):
            total += numbers.random() + (hooks.incarnation() - 1 if impure else 0)
            log.write(f"{step} {total.hex()} {total:.9f}\n")
            time.sleep(0.02)
    Path(f"result-rank{rank}.json").write_text(json.dumps({"rank": rank, "steps": steps, "pid": os.getpid()}) + "\n")


main()
