"""Freeze, dump, run on, restore: real runc and CRIU."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from moorage.errors import MoorageError, Refused
from moorage.worker.guard.client import GuardClient
from moorage.worker.sandbox.oci import Bind
from tests.support.pod_lab import PodLab, pod_lab, python, run, shell, until, until_event

pytestmark = pytest.mark.root

#: Counts for ever: on stdout, and in a file of the root's overlay. A gap or a repetition would show.
COUNTER = "i=0; while :; do i=$((i+1)); echo $i >/count; echo $i; sleep 0.01; done"


def counted(text: str) -> int:
    """How far the counter came; fails when a number is missing, doubled or cut."""
    numbers = [int(line) for line in text.splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    return len(numbers)


async def save(lab: PodLab, guard: GuardClient, *, leave_running: bool = True) -> Path:
    await guard.freeze("checkpoint")
    done = await guard.checkpoint(lab.folder / "images", work=lab.folder / "criu", leave_running=leave_running)
    assert done.image_bytes > 0
    assert done.timings["checkpoint"] > 0
    return lab.folder / "images"


def test_a_saved_pod_stands_still_until_it_is_thawed_and_then_runs_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell(COUNTER))
            guard = await lab.guard()
            init = (await guard.start()).status.init_pid
            await until(lambda: len(lab.text()) > 30)
            await save(lab, guard)
            status = await guard.status()
            assert (status.phase, status.init_pid) == ("frozen", init)
            before = lab.text()
            await asyncio.sleep(0.2)
            assert (await guard.drain()).status.journal_end == status.journal_end
            assert lab.text() == before
            await guard.thaw("resume")
            await until(lambda: len(lab.text()) > len(before) + 30)
            counted(lab.text())

    run(test)


def test_a_restored_pod_waits_frozen_and_goes_on_in_the_same_journal(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell(COUNTER, 0), shell("while :; do echo one; sleep 0.01; done", 1))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: len(lab.text(0)) > 30 and len(lab.text(1)) > 30)
            images = await save(lab, guard)
            saved = await guard.status()
            again = lab.successor()
            await guard.kill()

            second = await again.guard(incarnation=2)
            before = await second.status()
            assert (before.phase, before.journal_end, before.ranks) == ("empty", saved.journal_end, saved.ranks)
            status = (await second.restore(images, work=again.folder / "criu")).status
            assert (status.phase, status.reason) == ("frozen", "restored, not released yet")
            assert status.cpu_seconds < 0.5
            reached = (again.root / "count").read_text()
            await asyncio.sleep(0.2)
            # Not one instruction of the pod's own before its release.
            assert (again.root / "count").read_text() == reached
            assert (await second.drain()).status.sequence == saved.sequence
            await second.thaw("released")
            await until(lambda: counted(again.text(0)) > counted(lab.text(0)) + 10)
            assert (await second.status()).lost_frames == 0
            assert again.text(1).count("one") > lab.text(1).count("one")

    run(test)


def test_a_pod_moves_five_times_with_its_connections_shared_memory_and_clock(tmp_path: Path) -> None:
    program = """
import mmap, os, socket, threading, time
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
shared = open("/dev/shm/kept", "w+b"); shared.truncate(4096)
memory = mmap.mmap(shared.fileno(), 4096)
gone = open("/tmp/gone", "w+b"); os.unlink("/tmp/gone"); gone.write(b"deleted"); gone.flush()
last = time.monotonic()
number = 0
while True:
    number += 1
    client.sendall(number.to_bytes(4, "big"))
    assert int.from_bytes(peer.recv(4, socket.MSG_WAITALL), "big") == number
    memory[0] = number % 256
    gone.seek(0); assert gone.read() == b"deleted"
    now = time.monotonic(); assert 0 <= now - last < 5, now - last; last = now
    print(number, flush=True)
    time.sleep(0.01)
"""

    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(python(program), uid=1234, gid=1234)
            guard = await lab.guard()
            await guard.start()
            for incarnation in range(2, 7):
                already = len(lab.text())
                await until(lambda at=already, lab=lab: len(lab.text()) > at + 30)  # type: ignore[misc]
                images = await save(lab, guard, leave_running=False)
                assert (await guard.status()).phase == "exited"
                previous, lab = lab, lab.successor()
                guard = await lab.guard(incarnation=incarnation)
                await guard.restore(images, work=lab.folder / "criu")
                await guard.thaw("released")
                await previous.remove()
            already = len(lab.text())
            await until(lambda: len(lab.text()) > already + 30)
            counted(lab.text())
            assert not (await guard.status()).lost_frames

    run(test)


def test_a_restored_pod_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("echo up; while [ ! -e /go ]; do sleep 0.02; done; echo done; exit 5"))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text() == "up\n")
            images = await save(lab, guard, leave_running=False)
            again = lab.successor()
            second = await again.guard()
            await second.restore(images, work=again.folder / "criu")
            await second.thaw("released")
            (again.root / "go").touch()
            ended = await until_event(second, lambda event: event.status.phase == "exited")
            assert ended.status.exit_code == 5
            assert again.text() == "up\ndone\n"

    run(test)


def test_what_cannot_be_saved_is_refused_by_name_and_the_pod_runs_on(tmp_path: Path) -> None:
    program = """
import ctypes, time
held = ctypes.CDLL(None).syscall(323, 0o2000001)  # a userfaultfd
number = 0
while True:
    number += 1; print(number, flush=True); time.sleep(0.01)
"""

    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(python(program))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: len(lab.text()) > 10)
            await guard.freeze("checkpoint")
            with pytest.raises(Refused, match=r"process python.* \(pid \d+\), descriptor 3 holds") as refusal:
                await guard.checkpoint(lab.folder / "images", work=lab.folder / "criu")
            assert refusal.value.hint
            assert (await guard.status()).phase == "frozen"
            before = counted(lab.text())
            await guard.thaw("refused")
            await until(lambda: counted(lab.text()) > before + 10)

    run(test)


def test_a_restore_that_fails_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(
                python("open('/data', 'w').write('x' * 100); f = open('/data'); print(1, flush=True)\nwhile True: pass")
            )
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text() == "1\n")
            images = await save(lab, guard, leave_running=False)
            again = lab.successor()
            (again.root / "data").write_text("short")
            second = await again.guard()
            with pytest.raises(MoorageError, match="the file data has 5 bytes here and had 100"):
                await second.restore(images, work=again.folder / "criu")
            assert (await second.status()).phase == "empty"
            assert not again.cgroup.folder.exists()
            (again.root / "data").write_text("x" * 100)
            await second.restore(images, work=again.folder / "criu")

    run(test)


def test_kill_ends_a_pod_whose_dump_is_under_way(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(python("block = bytearray(b'x') * (400 << 20)\nprint(1, flush=True)\nwhile True: pass"))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text() == "1\n")
            await guard.freeze("checkpoint")
            dump = asyncio.create_task(guard.checkpoint(lab.folder / "images", work=lab.folder / "criu"))
            while (await guard.status()).busy != "checkpoint":  # noqa: ASYNC110
                await asyncio.sleep(0)
            done = await guard.kill()
            assert done.status.phase == "exited"
            with contextlib.suppress(MoorageError):  # on a busy machine the dump may have been faster
                await dump
            assert not lab.procs()

    run(test)


def test_bind_mounts_are_found_again_and_not_part_of_the_images(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            data = tmp_path / "data"
            data.mkdir()
            (data / "in").write_text("host\n")
            lab.lay(shell("exec 3</data/in; echo up; while [ ! -e /data/go ]; do sleep 0.02; done; cat <&3"))
            lab.bundle(binds=[Bind(source=data, destination="/data", read_only=True)])
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text() == "up\n")
            images = await save(lab, guard, leave_running=False)
            again = lab.successor()
            again.bundle(binds=[Bind(source=data, destination="/data", read_only=True)])
            second = await again.guard()
            await second.restore(images, work=again.folder / "criu")
            await second.thaw("released")
            (data / "go").touch()
            await until(lambda: again.text() == "up\nhost\n")

    run(test)


def test_a_signal_sent_while_frozen_arrives_after_the_thaw(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("trap 'echo got; exit 0' TERM; echo up; while :; do sleep 0.02; done"))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text() == "up\n")
            await guard.freeze("test")
            lab.cgroup.signal_all(signal.SIGTERM)
            assert (await guard.drain()).status.phase == "frozen"
            assert lab.text() == "up\n"
            await guard.thaw("test")
            await until_event(guard, lambda event: event.status.phase == "exited")
            assert lab.text() == "up\ngot\n"

    run(test)
