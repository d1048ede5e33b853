"""A worker looks at the files of its node before it restores anything, whoever chose it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import msgspec
import pytest

from moorage.compat import JobFingerprint, job_from
from moorage.errors import Incompatible
from moorage.store import Store
from moorage.v1 import worker_pb2
from tests.support.worker_rig import WorkerRig, counter_spec, steps

pytestmark = pytest.mark.root

PROGRAM = """\
import mmap, os, sys, time
held = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
for number in range(1, 100000):
    os.write(1, b"step %d\\n" % number)
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def rig() -> Iterator[WorkerRig]:
    with WorkerRig() as made:
        yield made


def test_a_file_that_changed_by_one_byte_stops_a_restore_before_it_begins(rig: WorkerRig) -> None:
    library = rig.folder / "library.bin"
    library.write_bytes(b"a" * 70_000)
    spec = counter_spec(command=[sys.executable, "-S", "-c", PROGRAM, str(library)])

    async def main() -> None:
        async with rig.orders() as orders:
            await orders.start("held", spec)
            await orders.until_output("held", lambda text: len(steps(text)) > 2)

            # What the pod needs can be asked of the running pod, and of the node.
            examined = await orders.call(
                "ExaminePod", worker_pb2.ExamineRequest(fence=orders.fence("held"), fingerprint=True)
            )
            job = job_from(msgspec.json.decode(examined.fingerprint))
            assert not examined.refusals
            assert str(library) in {mark.path for mark in job.files}
            assert any("libc" in mark.path for mark in job.files) and job.node.kernel
            assert await lines(orders, job) == set()

            await orders.capture("held", 1, kind="stop")
            votes = await orders.votes("held", 1, "persisted")
            manifest = Store.open(str(rig.folder / "store")).read_pod_manifest(votes[0].manifest)
            kept = job_from(manifest.fingerprint)
            assert {mark.path: mark.digest for mark in kept.files} == {mark.path: mark.digest for mark in job.files}
            await orders.conclude("held", 1, "stop")
            await orders.until("held", "killed")

            library.write_bytes(b"a" * 69_999 + b"b")
            assert await lines(orders, kept) == {f"{library} has other content there"}
            with pytest.raises(Incompatible) as refused:
                await orders.restore("held", {0: votes[0].manifest}, release=False)
            assert f"{library} has other content there" in refused.value.message
            assert "moorage compat held-0001 node-1" in refused.value.hint
            # It was not begun: no files, no images, no network.
            folder = rig.pod_folder("held", 2)
            assert not any((folder / name).exists() for name in ("upper", "merged", "layers.json", "staging"))

            library.write_bytes(b"a" * 70_000)
            await orders.kill("held", any_incarnation=True)
            await orders.restore("held", {0: votes[0].manifest})
            said = len(steps(await orders.output("held")))
            await orders.until_output("held", lambda text: len(steps(text)) > said)
            await orders.kill("held")

    async def lines(orders: object, job: JobFingerprint) -> set[str]:
        request = worker_pb2.FitRequest(fingerprint=msgspec.json.encode(job))
        reply = await orders.call("CheckFit", request)  # type: ignore[attr-defined]
        return {line.message.split(" (")[0] for line in reply.lines if line.state == "differs"}

    asyncio.run(main())
