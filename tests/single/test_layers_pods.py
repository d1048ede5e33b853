"""The self-checking programs in real pods: their files and all that the kernel keeps for them come along."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.v1 import types_pb2
from moorage.worker.layers import mapped_shared_writable
from tests.programs import family, pingpong, writes
from tests.support.judge import incarnations_overlap, judge, read
from tests.support.layers import disk_folder
from tests.support.worker_rig import Orders, WorkerRig, counter_spec, steps

pytestmark = pytest.mark.root

_PROGRAMS = Path(pingpong.__file__).parent


@pytest.fixture(scope="module")
def rig() -> Iterator[WorkerRig]:
    with WorkerRig() as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    with disk_folder() as made:
        made.chmod(0o755)
        yield made


def _spec(folder: Path, program: str, *arguments: str, **values: Any) -> types_pb2.JobSpec:
    command = [sys.executable, "-S", str(_PROGRAMS / program), *arguments]
    return counter_spec(command=command, working_directory=str(folder), name=program.partition(".")[0], **values)


async def _move(orders: Orders, job: str, attempt: int) -> None:
    """Checkpoint, let it run on for a while, then go back to the checkpoint."""
    votes = await orders.checkpoint(job, attempt)
    assert all(vote.ok for vote in votes.values()), votes
    said = len(steps(await orders.output(job)))
    await orders.until_output(job, lambda text: len(steps(text)) > said)
    await orders.kill(job)
    await orders.restore(job, {pod: vote.manifest for pod, vote in votes.items()})


async def _stepped(orders: Orders, job: str, number: int) -> None:
    await orders.until_output(job, lambda text: f"step {number}\n" in text)


def _done(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in re.findall(r"^done (.*)$", text, re.MULTILINE)[-1].split())


def _mapping_is_seen(rig: WorkerRig, folder: Path) -> None:
    """From outside of the pod's mount namespace, under the numbers that the merged folder shows."""
    merged = rig.pod_folder("writes") / "merged" / str(folder)[1:] / "out/rank0/mapped.bin"
    status = merged.stat()
    assert (status.st_dev, status.st_ino) in mapped_shared_writable(rig.cgroup("writes").processes())


def test_results_are_right_after_two_moves(rig: WorkerRig, folder: Path) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("writes", _spec(folder, "writes.py", "--steps", "40", "--delay", "0.03"))
            await _stepped(orders, "writes", 10)
            await asyncio.to_thread(_mapping_is_seen, rig, folder)
            await _move(orders, "writes", 1)
            await _stepped(orders, "writes", 20)
            await _move(orders, "writes", 2)
            await orders.until("writes", "exited")
            assert "done" in await orders.output("writes")
            kept = await asyncio.to_thread(lambda: {path.name for path in folder.iterdir()})
            assert kept >= {"obsolete.txt", "before"}  # until the job's end
            await orders.finish("writes")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        writes.prepare()
    asyncio.run(main())
    expected = writes.expected_files(40)
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_symlink() or path.is_file()}
    assert set(found) == set(expected)
    for name, content in expected.items():
        path = found[name]
        assert (str(path.readlink()) if isinstance(content, str) else path.read_bytes()) == content, name


def test_everything_that_the_kernel_keeps_for_a_family_moves(rig: WorkerRig, folder: Path) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("family", _spec(folder, "family.py", "--steps", "40"))
            start = await orders.until_output("family", lambda text: "step 5\n" in text)
            await _move(orders, "family", 1)
            await _stepped(orders, "family", 15)
            await _move(orders, "family", 2)
            status = await orders.until("family", "exited")
            text = await orders.output("family")
            assert status.ranks[0].exit_code == 0, text
            assert _done(text)["digest"] == family.expected_digest(40)
            assert f"start nonce={_done(text)['nonce']}" in start
            await orders.kill("family")

    asyncio.run(main())


def test_ranks_in_two_pods_are_never_two(rig: WorkerRig, folder: Path) -> None:
    (folder / "live").mkdir()
    (folder / "job").mkdir()

    async def main() -> None:
        async with rig.orders() as orders:
            arguments = ("--steps", "100", "--delay", "0.02", "--witness", "/live/witness", "--payload", "50000")
            mounts = [types_pb2.Mount(source=str(folder / "live"), destination="/live")]
            spec = _spec(folder / "job", "pingpong.py", *arguments, pods=2, rendezvous=True, mounts=mounts)
            await orders.start("ping", spec)
            for attempt, step in ((1, 20), (2, 50)):
                await _stepped(orders, "ping", step)
                await _move(orders, "ping", attempt)
            for pod in (0, 1):
                await orders.until("ping", "exited", pod=pod)
                done = _done(await orders.output("ping", pod))
                assert done["digest"] == pingpong.expected_digest(2, 100, pod)
                assert done["started"] != done["body"]  # another process than the one that began
            await orders.finish("ping")

    asyncio.run(main())
    lines = read(folder / "live/witness")
    verdict = judge(lines)
    assert verdict.faults == []
    assert incarnations_overlap(lines) == []
    assert verdict.reached == {0: 100, 1: 100}
    assert [len(nonces) for nonces in verdict.nonces.values()] == [1, 1]
    assert len(verdict.restores) == 4
    for rank in (0, 1):  # written back: each step once, in order, whatever was repeated
        written = (folder / f"job/rank{rank}.txt").read_text().splitlines()
        assert [int(line.split()[0]) for line in written] == list(range(1, 101))
