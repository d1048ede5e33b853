"""Worker, guard, broker, keeper and the libcuda proxy together, without a GPU: the driver is the fake one.

Real pods of runc, real dumps of CRIU. Whoever dies, the job runs on with all of its device memory, or it is restored
from its last checkpoint; no checkpoint lacks device memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moorage.errors import MoorageError, Unavailable
from moorage.store import Store
from moorage.v1.types_pb2 import JobSpec
from moorage.worker.gpu.blocks import SavedMemory
from tests.support.end_thread import end_thread
from tests.support.worker_rig import Orders, WorkerRig, counter_spec, in_order, steps, wait_for

pytestmark = pytest.mark.root

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "proxy"
PROGRAM = ROOT / "tests" / "programs" / "gpu_counter.py"


class GpuRig(WorkerRig):
    """A worker on a machine with the fake driver."""

    program = "tests.support.gpu_node"

    def __init__(self) -> None:
        super().__init__()
        self.library = self.folder / "libcuda.so.1"

    def start_worker(self, **environment: str) -> None:
        proxy, driver = _built()
        if not self.library.exists():
            self.library.write_bytes(driver.read_bytes())
        super().start_worker(
            PYTHONPATH=str(ROOT), FAKE_LIBCUDA=str(self.library), MOORAGE_LIBCUDA_PROXY=str(proxy), **environment
        )

    def close(self) -> None:
        for name in ("gpu_node", "keeper"):
            for pid in self.pids(name):
                _kill(pid)
        super().close()

    def pids(self, name: str) -> list[int]:
        """Of this rig's brokers ("gpu_node") or keepers ("keeper")."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode(errors="replace").split("\0")
                if any(word.endswith(f".{name}") for word in words) and any(
                    word.startswith(str(self.state)) for word in words
                ):
                    found.append(int(path.parent.name))
        return found

    def kill(self, *names: str) -> None:
        for name in names:
            (pid,) = self.pids(name)
            _kill(pid)


def _built() -> tuple[Path, Path]:
    """The proxy and the fake driver, built once for each state of their sources."""
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-DMOORAGE_INTERCEPT=ON"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), *options],
        ["cmake", "--build", str(BUILD), "--target", "moorage-cuda", "fake-cuda-plain"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return (
        BUILD / "native/intercept/moorage-cuda-dir/libcuda.so.1",
        BUILD / "tests/native/plain/real/libcuda.so.1",
    )


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not _has_files(pid), f"the end of process {pid}")


def _has_files(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.fixture(scope="module")
def rig() -> Iterator[GpuRig]:
    with GpuRig() as made:
        yield made


async def _start(orders: Orders, job: str, *arguments: str) -> None:
    rig = orders.rig
    assert isinstance(rig, GpuRig)
    command = [sys.executable, "-S", str(PROGRAM), str(rig.library), *arguments]
    await orders.start(job, counter_spec(command=command, gpus_per_pod=1))
    await _counts_on(orders, job)


async def _counts_on(orders: Orders, job: str) -> None:
    """It says five more numbers, in order, by one and the same process: each number came from the device."""
    said = len(steps(await orders.output(job)))
    text = await orders.until_output(job, lambda text: len(steps(text)) >= said + 5)
    assert in_order(steps(text)) and text.count("nonce") == 1, text[-300:]


def _programs(rig: GpuRig, job: str) -> list[int]:
    """The job's own processes, without pid 1."""
    pids = rig.cgroup(job).processes()
    return [pid for pid in pids if PROGRAM.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"--")[0]]


def _control_threads(rig: GpuRig, job: str) -> list[int]:
    """Of the proxies in the job's processes."""
    tasks = [task for pid in rig.cgroup(job).processes() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(task.name) for task in tasks if (task / "comm").read_text().strip() == "moorage-gpu"]


def _device_bytes(rig: GpuRig, manifest: str) -> int:
    """What the checkpoint has of device memory, each chunk of it in the store."""
    store = Store.open(str(rig.folder / "store"))
    found = store.read_pod_manifest(manifest)
    memory = msgspec.convert(found.extra["gpu"], SavedMemory)
    for block in memory.blocks:
        content = found.memory[block.content_name]
        assert content.size == block.size
        assert all(store.index.locate(chunk.name) is not None for chunk in content.chunks if chunk.name)
    return sum(block.size for block in memory.blocks)


def test_a_job_is_checkpointed_parked_and_restored(rig: GpuRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await _start(orders, "whole")
            new = []
            for attempt in (1, 2):
                (vote,) = (await orders.checkpoint("whole", attempt)).values()
                assert vote.ok, vote.reason
                new.append(vote.bytes_new)
                assert _device_bytes(rig, vote.manifest) == 8 << 20
                await _counts_on(orders, "whole")
            assert new[1] < new[0]
            await orders.capture("whole", 3, kind="stop")
            (vote,) = (await orders.votes("whole", 3, "persisted")).values()
            assert vote.ok, vote.reason
            await orders.conclude("whole", 3, "stop")
            await orders.until("whole", "killed")
            await orders.restore("whole", {0: vote.manifest})
            await _counts_on(orders, "whole")
            # A stop that is called off: its memory was the source, and is the job's again.
            await orders.capture("whole", 4, kind="stop")
            await orders.conclude("whole", 4, "abort", "called off")
            await orders.until("whole", "running")
            await _counts_on(orders, "whole")
            (vote,) = (await orders.checkpoint("whole", 5)).values()
            assert vote.ok, vote.reason
            await orders.kill("whole", any_incarnation=True)

    asyncio.run(main())


def test_whoever_of_broker_and_keeper_dies_the_job_runs_on(rig: GpuRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await _start(orders, "deaths")
            (vote,) = (await orders.checkpoint("deaths", 1)).values()
            assert vote.ok, vote.reason
            rig.kill("gpu_node")
            await _counts_on(orders, "deaths")
            (vote,) = (await orders.checkpoint("deaths", 2)).values()
            assert vote.ok, vote.reason
            assert _device_bytes(rig, vote.manifest) == 8 << 20
            rig.kill("keeper")
            (vote,) = (await orders.checkpoint("deaths", 3)).values()
            assert vote.ok, vote.reason
            # In the pause, when nobody but broker and keeper has the memory.
            await orders.begin("deaths", 4)
            for method in ("PreparePod", "FreezePod", "SealPod"):
                await orders.all_pods(method, "deaths", 4, "resume")
            rig.kill("gpu_node")
            with pytest.raises(MoorageError, match="GPU broker"):
                await orders.all_pods("CapturePod", "deaths", 4, "resume")
            await orders.conclude("deaths", 4, "abort", "the broker died")
            await orders.until("deaths", "running")
            await _counts_on(orders, "deaths")
            (vote,) = (await orders.checkpoint("deaths", 5)).values()
            assert vote.ok, vote.reason
            assert _device_bytes(rig, vote.manifest) == 8 << 20
            await orders.kill("deaths")

    asyncio.run(main())


def test_memory_that_is_lost_with_broker_and_keeper_ends_the_pod_and_the_last_checkpoint_has_it(rig: GpuRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await _start(orders, "lost")
            (vote,) = (await orders.checkpoint("lost", 1)).values()
            assert vote.ok, vote.reason
            await orders.begin("lost", 2)
            for method in ("PreparePod", "FreezePod", "SealPod"):
                await orders.all_pods(method, "lost", 2, "resume")
            rig.kill("gpu_node", "keeper")
            with pytest.raises(MoorageError, match="GPU broker"):
                await orders.all_pods("CapturePod", "lost", 2, "resume")
            await orders.conclude("lost", 2, "abort", "broker and keeper died")
            status = await orders.until("lost", "failed")
            assert "its GPU did not come back: process" in status.reason and "is not here" in status.reason
            await orders.kill("lost")
            await orders.restore("lost", {0: vote.manifest})
            await _counts_on(orders, "lost")
            await orders.kill("lost", any_incarnation=True)

    asyncio.run(main())


def test_a_proxy_whose_control_thread_is_gone_is_named_and_the_job_runs_on(rig: GpuRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await _start(orders, "deaf")
            (vote,) = (await orders.checkpoint("deaf", 1)).values()
            assert vote.ok, vote.reason
            for thread in _control_threads(rig, "deaf"):
                end_thread(thread)
            await _counts_on(orders, "deaf")
            await orders.begin("deaf", 2)
            (reply,) = await orders.all_pods("PreparePod", "deaf", 2, "resume")
            (refusal,) = reply.refusals
            assert refusal.what == "the GPU broker" and "did not answer STATUS in 1.5 s" in refusal.why
            await orders.conclude("deaf", 2, "abort", "refused")
            await _counts_on(orders, "deaf")
            await orders.kill("deaf")
            await orders.restore("deaf", {0: vote.manifest})
            await _counts_on(orders, "deaf")
            await orders.kill("deaf", any_incarnation=True)

    asyncio.run(main())


def test_what_a_process_has_that_cannot_be_saved_is_named_and_a_gpu_is_one_pods(rig: GpuRig) -> None:
    async def main() -> None:
        async with rig.orders() as orders:
            await _start(orders, "unsaved", "0.02", "unsaved")
            await orders.begin("unsaved", 1)
            (reply,) = await orders.all_pods("PreparePod", "unsaved", 1, "resume")
            (refusal,) = reply.refusals
            assert re.fullmatch(r"process \d+ \(python.*\), cuMemAllocManaged", refusal.what), refusal.what
            assert refusal.why == "6 MiB of managed memory, which the driver does not save"
            await orders.conclude("unsaved", 1, "abort", "refused")
            with pytest.raises(MoorageError, match="needs 1 GPUs, node node-1 has 0 free"):
                await _start(orders, "second")
            pids = _programs(rig, "unsaved")
            assert pids
            for pid in pids:
                os.kill(pid, signal.SIGUSR1)
            await _counts_on(orders, "unsaved")
            (vote,) = (await orders.checkpoint("unsaved", 2)).values()
            assert vote.ok, vote.reason
            await orders.kill("unsaved")
            await orders.kill("second")

    asyncio.run(main())


def test_a_worker_that_dies_at_any_step_with_the_gpu_leaves_a_job_that_runs(rig: GpuRig) -> None:
    steps_of_it = ("precopy.after", "quiesce.after", "capture.after", "back.before")

    async def before(attempt: int, name: str) -> None:
        async with rig.orders() as orders:
            if attempt == 1:
                await _start(orders, "hurt")
                spec.append(orders.specs["hurt"])
            orders.specs["hurt"], orders.incarnations["hurt"] = spec[0], 1
            rig.arm(f"worker.gpu.{name}", "kill")
            if name.startswith("back"):
                await orders.capture("hurt", attempt)
                await orders.conclude("hurt", attempt, "abort", "so that it comes back")
            else:
                with pytest.raises(Unavailable):
                    await orders.capture("hurt", attempt, deadline=10.0)
        assert rig.process is not None
        await asyncio.to_thread(rig.process.wait, 30)

    async def after(attempt: int) -> None:
        async with rig.orders() as orders:
            orders.specs["hurt"], orders.incarnations["hurt"] = spec[0], 1
            await orders.attempts("hurt").abort(attempt, 1, "the worker died", "coordinator")
            await orders.until("hurt", "running")
            await _counts_on(orders, "hurt")
            if attempt == len(steps_of_it):
                (vote,) = (await orders.checkpoint("hurt", attempt + 1)).values()
                assert vote.ok, vote.reason
                assert _device_bytes(rig, vote.manifest) == 8 << 20
                await orders.kill("hurt")

    spec: list[JobSpec] = []
    for attempt, name in enumerate(steps_of_it, start=1):
        asyncio.run(before(attempt, name))
        rig.kill_worker()
        rig.start_worker()
        asyncio.run(after(attempt))
