"""The parts of the sandbox by themselves: freezer of both versions, processes in vfork, the runc driver, exec."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import MoorageError
from moorage.worker.sandbox import oci, process, vfork
from moorage.worker.sandbox.cgroup import PodCgroup, parse_mounts
from moorage.worker.sandbox.podinit import Rank
from moorage.worker.sandbox.runc import Runc
from tests.support.pod_lab import PATH, pod_lab, run, shell, until, until_event

pytestmark = pytest.mark.root

SPIN = "while True: pass"


def cgroups() -> list[PodCgroup]:
    """One that does not exist yet of each version that this machine has."""
    mounts = parse_mounts(Path("/proc/self/mountinfo").read_text())
    path = f"/moorage-test-{secrets.token_hex(4)}"
    found = [PodCgroup(path, mounts=mounts)] if "freezer" in mounts else []
    return [*found, PodCgroup(path, mounts={"": mounts[""]})] if "" in mounts else found


@pytest.fixture(params=range(len(cgroups())), ids=lambda index: "v2" if cgroups()[index].unified else "v1")
def group(request: pytest.FixtureRequest) -> Iterator[tuple[PodCgroup, subprocess.Popen[bytes]]]:
    """A cgroup with one process that never rests."""
    cgroup = cgroups()[request.param]
    cgroup.folder.mkdir()
    spinning = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        (cgroup.folder / "cgroup.procs").write_text(str(spinning.pid))
        yield cgroup, spinning
    finally:
        with contextlib.suppress(OSError):
            cgroup.order(frozen=False)
        spinning.kill()
        spinning.wait()
        for _ in range(200):
            with contextlib.suppress(OSError):
                cgroup.folder.rmdir()
                break
            time.sleep(0.01)


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_frozen_cgroup_stands_and_a_thawed_one_runs(group: tuple[PodCgroup, subprocess.Popen[bytes]]) -> None:
    cgroup, spinning = group

    async def test() -> None:
        assert cgroup.state() == "thawed"
        await cgroup.freeze()
        assert cgroup.state() == "frozen"
        stood = ticks(spinning.pid)
        await asyncio.sleep(0.2)
        assert ticks(spinning.pid) == stood
        await cgroup.thaw()
        assert cgroup.state() == "thawed"
        await until(lambda: ticks(spinning.pid) > stood)

    run(test)


def test_a_frozen_cgroup_is_killed_without_running(group: tuple[PodCgroup, subprocess.Popen[bytes]]) -> None:
    cgroup, spinning = group

    async def test() -> None:
        await cgroup.freeze()
        reap = asyncio.create_task(asyncio.to_thread(spinning.wait))
        await cgroup.kill(10)
        assert cgroup.processes() == []
        assert await reap == -signal.SIGKILL

    run(test)


def test_a_cgroup_that_does_not_exist_is_nothing_to_wait_for() -> None:
    async def test() -> None:
        for cgroup in cgroups():
            assert (cgroup.state(), cgroup.processes(), cgroup.cpu_seconds()) == ("absent", [], 0.0)
            await cgroup.freeze()
            await cgroup.thaw()
            await cgroup.kill(1)

    run(test)


#: What vfork does, with a child that calls ``sleep`` instead of exec. It has a stack of its own and runs no Python.
VFORK = """
import ctypes, signal, sys
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(1 << 20)
top = (ctypes.addressof(stack) + (1 << 20) - 64) & ~15
print("up", flush=True)
call = ctypes.cast(libc.sleep, ctypes.c_void_p)
libc.clone(call, ctypes.c_void_p(top), 0x4100 | signal.SIGCHLD, ctypes.c_void_p(int(sys.argv[1])))
print("done", flush=True)
while True: signal.pause()
"""


def children(pid: int) -> list[int]:
    """Pids of the process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_child_in_its_parents_memory_is_found() -> None:
    parent = subprocess.Popen([sys.executable, "-c", VFORK, "100"], stdout=subprocess.DEVNULL)

    async def test() -> None:
        child = 0
        try:
            await until(lambda: bool(children(parent.pid)))
            child = children(parent.pid)[0]
            found = vfork.pending([os.getpid(), parent.pid, child])
            assert [(each.child, each.parent) for each in found] == [(child, parent.pid)]
            assert found[0].name.startswith("python")
        finally:
            for pid in filter(None, (child, parent.pid)):
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(parent.wait)

    run(test)


def test_a_pod_is_not_left_frozen_in_the_middle_of_a_vfork(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(Rank(rank=0, argv=["python3", "-c", VFORK, "1"]))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: len(lab.procs()) == 3)
            assert (await guard.freeze("checkpoint")).status.phase == "frozen"
            assert vfork.pending(lab.procs()) == []
            await guard.checkpoint(lab.folder / "images", work=lab.folder / "criu")

    run(test)


def test_a_program_runs_to_its_end_and_its_output_is_kept() -> None:
    async def test() -> None:
        seen: list[int] = []
        ended = await process.run(["sh", "-c", "echo out; exit 3"], env={"PATH": PATH}, started=seen.append)
        assert ended == process.Ended(3, "out\n")
        assert len(seen) == 1
        assert (await process.run(["sh", "-c", "kill -9 $$"], env={"PATH": PATH})).code == -9
        with pytest.raises(OSError, match="No such file"):
            await process.run(["/no/such/program"], env={})
        assert not process.running

    run(test)


def test_a_program_whose_caller_is_cancelled_is_killed_with_its_children() -> None:
    async def test() -> None:
        seen: list[int] = []
        script = "sleep 100 & wait"
        running = asyncio.create_task(process.run(["sh", "-c", script], env={"PATH": PATH}, started=seen.append))
        await until(lambda: bool(seen))
        await until(lambda: bool(children(seen[0])))
        (child,) = children(seen[0])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: process.start_time(child) == 0)
        assert process.start_time(seen[0]) == 0

    run(test)


def test_runc_is_asked_about_a_pod_and_runs_commands_in_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("echo up; sleep 100"), uid=0)
            guard = await lab.guard()
            init = (await guard.start()).status.init_pid
            await until(lambda: lab.text() == "up\n")
            runc = Runc.installed(root=tmp_path / "runc", log=tmp_path / "log")
            assert await runc.state(lab.name) == ("running", init)
            assert await runc.state("unknown") is None
            assert set(await runc.processes(lab.name)) == set(lab.procs())
            spec = oci.build_exec(
                ["sh", "-c", "echo $WHO; pwd; exit 6"], env={"WHO": "me", "PATH": PATH}, cwd="/tmp", uid=0, gid=0
            )
            oci.write_exec(tmp_path / "exec.json", spec)
            command = runc.exec_command(lab.name, tmp_path / "exec.json")
            ended = await process.run(command, env=runc.environment())
            assert ended == process.Ended(6, "me\n/tmp\n")
            await runc.pause(lab.name)
            assert await runc.state(lab.name) == ("paused", init)
            await runc.resume(lab.name)
            await runc.kill(lab.name, "KILL")
            await until_event(guard, lambda event: event.status.phase == "exited")
            with pytest.raises(MoorageError, match="container does not exist"):
                await runc.kill(lab.name)
            await runc.delete(lab.name)

    run(test)


def test_a_host_with_cgroup_version_two_alone_works_the_same(tmp_path: Path) -> None:
    """Other tests run on what this machine has; here two of them run in a mount namespace that shows version 2 only."""
    if "freezer" not in parse_mounts(Path("/proc/self/mountinfo").read_text()):
        pytest.skip("this machine has version 2 alone: all other tests have shown it")
    tests = Path(__file__).with_name("test_guard_checkpoint.py")
    wanted = "goes_on_in_the_same_journal or kill_ends"
    inner = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), "-k", wanted]
    inner += ["--basetemp", str(tmp_path)]
    script = 'umount -R -l /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"'
    ended = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *inner],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert "2 passed" in ended.stdout
