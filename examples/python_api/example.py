"""Every verb of the Python API, most of them on one small job. Start a cluster first: ``moorage dev up --nodes 3``."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from moorage import Client
from moorage.coordinator.client import Job, job_spec
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

        look_around(client, job, checkpoint.id, folder)
        drain(client, job)
        short_jobs(client, folder)

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
        assert client.job("counting").id == job.id and client.pin(checkpoint, unpin=True).id == checkpoint.id
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


def look_around(client: Client, job: Job, checkpoint: str, folder: str) -> None:
    """What there is, what fits where, what has happened; nothing is touched."""
    assert job.id in [known.id for known in client.jobs()]
    known = [found.id for found in client.checkpoints(job.id)]
    print(f"{len(known)} checkpoints; the first one fits", end=" ")
    print(*(node.node for node in client.nodes() if node.live and client.compat(checkpoint, node.node).fits))
    here = job.status().pods[0].node
    print(f"{here}: {len(client.describe_node(here))} things were looked at")
    print("what could not be saved now:", [finding.what for finding in job.examine()] or "nothing")
    newest = job.status().attempt
    print(f"attempt {newest} of the job: {job.attempt(newest).phase}")
    print("who asked for what:", len(list(client.audit(job.id))), "entries")
    print("a prune would remove", client.prune(dry_run=True).packs, "packs")
    print("pulled out of the running job:", job.pull(to=Path(folder, "pulled")) or "it has written nothing yet")


def drain(client: Client, job: Job) -> None:
    """Take the job's node out of service, and back."""
    here = job.status().pods[0].node
    planned = client.drain([here], dry_run=True)
    print("a drain would move it to", *planned.moves[0].target)
    done = client.follow_drain(client.drain([here]).id)
    print(f"drain of {here}: {done.phase}; the job runs on", job.status().pods[0].node)
    client.uncordon([here])
    client.cordon([here], reason="seen in the example")
    late = client.drain([here])
    print("a second one, called off:", client.cancel_drain(late.id).phase)
    client.follow_drain(late.id)
    client.uncordon([here])


def short_jobs(client: Client, folder: str) -> None:
    """One that is stopped and forgotten, and one that is started as torchrun starts it."""
    sleeper = client.submit(job_spec(["/bin/sleep", "600"], name="sleeping", working_directory=folder))
    for info in sleeper.watch():
        if info.phase == "running":
            sleeper.stop(grace=1.0)
    print("sleeping was stopped;", len(sleeper.delete()), "checkpoints were deleted with it")
    Path(folder, "short").mkdir()
    Path(folder, "short", "enough").touch()
    ranks = client.torchrun(str(SCRIPT), nnodes=1, nproc_per_node=2, working_directory=str(Path(folder, "short")))
    print("a job of two ranks ended with", ranks.wait(timeout=120).exit_code)


def show(data: bytes, is_stderr: bool) -> None:
    (sys.stderr if is_stderr else sys.stdout).write(data.decode())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error}")
