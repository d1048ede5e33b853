"""A pod from its start to its end in the hands of its guard: real runc, no CRIU."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.errors import Conflict, MoorageError
from moorage.worker.journal_frames import Kind
from moorage.worker.sandbox.oci import Bind
from tests.support.pod_lab import pod_lab, python, run, shell, until, until_event

pytestmark = pytest.mark.root


def test_output_and_exit_code_reach_the_journal(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("echo out; echo err >&2; exit 7"))
            guard = await lab.guard()
            await guard.start()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert ended.status.exit_code == 7
            assert [(rank.exited, rank.exit_code) for rank in ended.status.ranks] == [(True, 7)]
            assert lab.text() == "out\n"
            assert lab.text(kind=Kind.STDERR) == "err\n"
            assert not lab.cgroup.folder.exists()

    run(test)


def test_two_ranks_run_side_by_side_and_their_output_stays_apart(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("echo zero", 0), shell("sleep 0.2; echo one", 1))
            guard = await lab.guard()
            await guard.start()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert ended.status.exit_code == 0
            assert (lab.text(0), lab.text(1)) == ("zero\n", "one\n")

    run(test)


def test_the_first_failure_ends_the_other_ranks_and_is_the_pods_code(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            stubborn = shell("trap '' TERM; while :; do sleep 0.05; done", 1)
            lab.lay(shell("sleep 0.3; exit 3", 0), stubborn, grace_seconds=0.5)
            guard = await lab.guard()
            await guard.start()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert ended.status.exit_code == 3
            assert [rank.exit_code for rank in ended.status.ranks] == [3, 128 + 9]

    run(test)


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("no-such-command", 127, "no-such-command: command not found"),
        ("/etc/passwd", 126, "/etc/passwd: cannot be executed: Permission denied"),
    ],
)
def test_a_command_that_cannot_start_says_so(tmp_path: Path, command: str, code: int, words: str) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            rank = shell("")
            lab.lay(type(rank)(rank=0, argv=[command]))
            guard = await lab.guard()
            await guard.start()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert ended.status.exit_code == code
            assert words in lab.text(kind=Kind.STDERR)

    run(test)


def test_ranks_run_as_the_owner_with_no_capability_and_may_not_regain_any(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(
                shell("id -u; id -G; umask; grep -E 'CapEff|NoNewPrivs' /proc/self/status; echo again >/dev/stdout"),
                uid=1234, gid=1235, groups=[1235, 1300], umask=0o027,
            )  # fmt: skip
            guard = await lab.guard()
            await guard.start()
            await until_event(guard, lambda event: event.status.phase == "exited")
            lines = [line.split()[-1] for line in lab.text().splitlines()]
            assert lines[:1] + lines[2:] == ["1234", "0027", "0000000000000000", "1", "again"]
            assert lab.text().splitlines()[1] == "1235 1300"

    run(test)


def test_what_a_rank_leaves_behind_ends_with_the_pod(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            zombies = "cat /proc/[0-9]*/stat | grep -c ') Z'"
            lab.lay(shell(f"setsid sh -c 'sleep 1000' & setsid sh -c 'exit 0' & sleep 0.3; {zombies}"))
            guard = await lab.guard()
            await guard.start()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert lab.text() == "0\n"  # no zombie: the orphan that ended was reaped
            assert ended.status.exit_code == 1  # grep found none
            assert not lab.procs()

    run(test)


def test_io_uring_is_answered_as_if_the_kernel_had_none(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            setup = "l = ctypes.CDLL(None, use_errno=True); l.syscall(425, 1, 0)"
            lab.lay(python(f"import ctypes; {setup}; print(ctypes.get_errno())"))
            guard = await lab.guard()
            await guard.start()
            await until_event(guard, lambda event: event.status.phase == "exited")
            assert lab.text() == "38\n"

    run(test)


def test_kill_with_grace_lets_a_rank_end_by_itself(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text() == "up\n")
            done = await guard.kill(10, reason="stopped")
            assert (done.status.phase, done.status.killed, done.status.exit_code) == ("exited", True, 0)
            assert lab.text() == "up\nbye\n"

    run(test)


def test_kill_of_a_frozen_pod_lets_nothing_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("i=0; while :; do i=$((i+1)); echo $i; done"))
            guard = await lab.guard()
            await guard.start()
            await until(lambda: len(lab.text()) > 1000)
            frozen = (await guard.freeze("test")).status
            assert frozen.phase == "frozen"
            drained = (await guard.drain()).status.sequence
            done = await guard.kill(reason="test")
            assert (done.status.exit_code, done.status.sequence) == (137, drained)
            assert not lab.procs()

    run(test)


def test_output_waits_in_the_pod_while_it_is_not_read_and_none_is_lost(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("seq 1 400000"))
            guard = await lab.guard()
            await guard.start()
            ended = await until_event(guard, lambda event: event.status.phase == "exited")
            assert lab.text() == "".join(f"{number}\n" for number in range(1, 400001))
            assert ended.status.lost_frames == 0

    run(test)


def test_the_journal_keeps_the_newest_output_within_its_cap(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("seq 1 400000"))
            guard = await lab.guard(journal_bytes=1 << 20)
            await guard.start()
            ended = (await until_event(guard, lambda event: event.status.phase == "exited")).status
            assert 0 < ended.journal_end - ended.journal_start < 1.5 * (1 << 20)
            assert lab.text().endswith("\n399999\n400000\n")
            assert (lab.folder / "journal").stat().st_blocks * 512 < 2 << 20

    run(test)


def test_a_bundle_that_cannot_run_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("true"))
            lab.bundle(binds=[Bind(source=tmp_path / "missing", destination="/data")])
            guard = await lab.guard()
            with pytest.raises(MoorageError, match=r"runc run failed: .*missing"):
                await guard.start()
            assert (await guard.status()).phase == "empty"
            assert not lab.cgroup.folder.exists()
            lab.bundle()
            await guard.start()
            await until_event(guard, lambda event: event.status.exit_code == 0)

    run(test)


def test_orders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("sleep 1000"))
            guard = await lab.guard()
            with pytest.raises(Conflict, match="not begun"):
                await guard.freeze("test")
            await guard.start()
            first = (await guard.start()).status.init_pid
            assert first == (await guard.status()).init_pid  # the same order again starts nothing
            with pytest.raises(Conflict, match="freeze it first"):
                await guard.drain()
            with pytest.raises(Conflict, match="freeze it first"):
                await guard.checkpoint(lab.folder / "images", work=lab.folder / "work-criu")
            with pytest.raises(Conflict, match="has processes"):
                await guard.exit()
            await guard.kill()
            with pytest.raises(Conflict, match="ended with code 137"):
                await guard.start()
            await guard.exit()

    run(test)


def test_a_pod_killed_before_it_began_cannot_be_started(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell("true"))
            guard = await lab.guard()
            assert (await guard.kill()).status.phase == "exited"
            with pytest.raises(Conflict):
                await guard.start()

    run(test)
