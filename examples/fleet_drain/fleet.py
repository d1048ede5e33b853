"""A node is drained while another one dies; every job goes on where it was, and counts right to its end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from moorage import Client
from moorage.coordinator.client import Job
from moorage.errors import MoorageError

MOORAGE = [sys.executable, "-P", "-m", "moorage.cli.main"]
#: Counts until there is a file $1/end, with a nonce that is drawn once. What it writes goes with it wherever it goes.
COUNTER = """
nonce=$(cat /proc/sys/kernel/random/uuid); n=0
while [ ! -e "$1/end" ]; do n=$((n+1)); echo "$nonce $n" >> counted; sleep 0.1; done
echo "done $nonce $n"
"""


def start(client: Client, folder: Path, name: str) -> Job:
    (folder / name).mkdir()
    live = folder / "live"
    live.mkdir(exist_ok=True)
    job = client.run(
        ["/bin/sh", "-c", COUNTER, "counter", str(live)],
        name=name,
        working_directory=str(folder / name),
        mounts=[f"{live}:{live}"],
        if_exists="replace",
    )
    job.until(lambda info: info.phase == "running", timeout=60)
    return job


def main() -> int:
    with Client() as client, tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        jobs = {name: start(client, folder, name) for name in ("red", "green", "blue", "white")}
        for name, job in jobs.items():
            job.checkpoint()
            print(f"{name} runs on {job.status().pods[0].node} and has a checkpoint")
        drained = jobs["red"].status().pods[0].node
        lost = next(node for job in jobs.values() if (node := job.status().pods[0].node) != drained)
        line = [*MOORAGE, "drain", drained]

        print(f"$ moorage drain {drained} --dry-run", flush=True)
        subprocess.run([*line, "--dry-run"], check=True)
        print(f"$ moorage drain {drained} -y; meanwhile {lost} dies", flush=True)
        with subprocess.Popen([*line, "-y"]) as draining:
            cluster = client.status().cluster
            destroy = [*MOORAGE, "dev", "destroy", lost, "--name", cluster]
            subprocess.run(destroy, check=True, stderr=subprocess.DEVNULL)
        for name, job in jobs.items():
            info = job.until(
                lambda info: info.phase == "running" and info.pods[0].node not in (drained, lost), timeout=120
            )
            print(f"{name}: {info.reason}")

        (folder / "live" / "end").touch()
        right = survived = draining.returncode == 0
        for name, job in jobs.items():
            result = job.wait(timeout=120)
            lines = [line.split() for line in (folder / name / "counted").read_text().splitlines()]
            right = right and result.exit_code == 0
            _, nonce, count = b"".join(piece.data for piece in job.logs()).decode().split()
            right = right and [number for _, number in lines] == [str(number) for number in range(1, int(count) + 1)]
            survived = survived and {begun for begun, _ in lines} == {nonce}
        subprocess.run([*MOORAGE, "uncordon", drained], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([*MOORAGE, "dev", "add", "--name", cluster], check=True, stdout=subprocess.DEVNULL)
        print(f"all counted right: {_yes(right)}; nonces survived: {_yes(survived)}")
        return 0 if right and survived else 1


def _yes(true: bool) -> str:
    return "yes" if true else "no"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error}")
