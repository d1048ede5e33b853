"""The same launch line under torchrun and under moorage; the second run loses its node, the numbers are the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from moorage import Client
from moorage.errors import MoorageError

TRAIN = Path(__file__).resolve().with_name("train.py")
LINE = ["--standalone", "--nproc-per-node", "2", str(TRAIN)]
MOORAGE = [sys.executable, "-P", "-m", "moorage.cli.main"]
STEPS = "200"


def main() -> int:
    with Client() as client, tempfile.TemporaryDirectory() as folder:
        plain, moored = Path(folder, "plain"), Path(folder, "moored")
        for path in (plain, moored):
            path.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        print("torchrun", *LINE, STEPS)
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        subprocess.run([*torchrun, *LINE, STEPS, "0"], cwd=plain, env=environment, check=True, capture_output=True)

        print("moorage torchrun", *LINE, STEPS)
        line = ["torchrun", "-d", "--name", "launched", "--if-exists", "replace", "--env", "OMP_NUM_THREADS=1", *LINE]
        subprocess.run([*MOORAGE, *line, STEPS, "0.04"], cwd=moored, check=True, stdout=subprocess.DEVNULL)
        job = client.job("launched")
        for piece in job.logs(rank=0, follow=True):
            if b"step 40 " in piece.data:
                break
        checkpoint = job.checkpoint()
        print(f"checkpoint {checkpoint.id}: the job stood still for {checkpoint.pause_seconds:.2f} s")
        node = job.status().pods[0].node
        print(f"losing {node} for good, with all that runs on it")
        cluster = client.status().cluster
        subprocess.run([*MOORAGE, "dev", "destroy", node, "--name", cluster], check=True, stderr=subprocess.DEVNULL)
        result = job.wait(timeout=180)
        for event in job.events():
            print("  ", event.sentence)
        subprocess.run([*MOORAGE, "dev", "add", "--name", cluster], check=True, stdout=subprocess.DEVNULL)

        ranks = [(plain / f"rank{rank}.txt", moored / f"rank{rank}.txt") for rank in range(2)]
        equal = all(one.read_text() == other.read_text() for one, other in ranks)
        output = b"".join(piece.data for piece in job.logs()).decode()
        begun = set(re.findall(r"rank (\d) of 2 begins with nonce (\w+)", output))
        ended = set(re.findall(r"rank (\d) ends with nonce (\w+)", output))
        survived = begun == ended and len(ended) == 2
        restored = result.incarnation > 1 and result.exit_code == 0
        print(f"every loss and weight equal: {_yes(equal and restored)}; nonces survived: {_yes(survived)}")
        return 0 if equal and survived and restored else 1


def _yes(true: bool) -> str:
    return "yes" if true else "no"


if __name__ == "__main__":
    if shutil.which("nsenter") is None:
        sys.exit("example: run it where `moorage dev up` was run")
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error}")
