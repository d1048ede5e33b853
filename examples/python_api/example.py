"""Every verb of the Python API on one small job. Start a cluster first: ``moorage dev up --nodes 3``."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from moorage import Client
from moorage.errors import MoorageError

SCRIPT = Path(__file__).resolve().with_name("count.py")


def main() -> int:
    with Client() as client, tempfile.TemporaryDirectory() as folder:
        nodes = [node.node for node in client.nodes() if node.live]
        print("nodes:", ", ".join(nodes))

        job = client.run(
            [sys.executable, "-u", str(SCRIPT)],
            name="counting",
            working_directory=folder,
            checkpoint_every=5.0,
            if_exists="replace",
        )
        started = job.until(lambda info: info.phase == "running")
        print("runs on", started.pods[0].node)

        checkpoint = job.checkpoint()
        print(
            f"checkpoint {checkpoint.id}: {checkpoint.bytes_total} bytes, stood still {checkpoint.pause_seconds:.2f} s"
        )
        client.pin(checkpoint)

        job.park()
        print("parked; nothing of it runs, its state is in the store")
        print("restored on", job.restore(on=[nodes[-1]]).pods[0].node)
        print("moved to", job.move(to=[nodes[0]]).pods[0].node)
        print("back to the first checkpoint, on", job.restore(checkpoint).pods[0].node)

        verdict = client.check(checkpoint, read_data=True)
        print(f"checked {verdict.chunks} chunks: {'all good' if not verdict.errors else verdict.errors}")
        for part in client.inspect(checkpoint).parts:
            print(f"  pod {part.pod}: {part.kind}, {part.bytes} bytes")

        code = job.exec(["/bin/sh", "-c", "echo beside the rank, in its pod: $MOORAGE_JOB"], output=show)
        assert code == 0

        lost = job.checkpoint() and job.status().pods[0].node
        print(f"losing {lost} for good, with all that runs on it")
        cluster = client.status().cluster
        moorage = [sys.executable, "-P", "-m", "moorage.cli.main", "dev"]
        subprocess.run([*moorage, "destroy", lost, "--name", cluster], check=True, stderr=subprocess.DEVNULL)

        job.until(lambda info: info.phase == "running" and info.pods[0].node != lost, timeout=120)
        print("restored on", job.status().pods[0].node)
        job.exec(["touch", "enough"])

        result = job.wait(timeout=120)
        subprocess.run([*moorage, "add", "--name", cluster], check=True, stdout=subprocess.DEVNULL)
        output = b"".join(piece.data for piece in job.logs(rank=0)).decode().splitlines()
        numbers = [int(line) for line in output if line.isdigit()]
        print(f"over: {result.phase}, exit code {result.exit_code}, {result.incarnation} incarnations")
        for event in job.events():
            print("  ", event.sentence)

        expected = hashlib.sha256(b"".join(f"{number}\n".encode() for number in numbers)).hexdigest()
        nonce, digest = Path(folder, "counted.txt").read_text().split()
        right = digest == expected and numbers == list(range(len(numbers)))
        survived = output[0].endswith(nonce) and output[-1].endswith(nonce)
        print(f"counted right: {'yes' if right else 'no'}; nonce survived: {'yes' if survived else 'no'}")
        return 0 if right and survived and result.exit_code == 0 else 1


def show(data: bytes, is_stderr: bool) -> None:
    (sys.stderr if is_stderr else sys.stdout).write(data.decode())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error}")
