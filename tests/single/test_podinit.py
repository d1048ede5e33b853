"""pid 1 of a pod by itself: the real program in a pid namespace, no container around it."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from moorage.worker.journal_frames import HEADER_SIZE, PAYLOAD_MAX, Frame, Kind, encode, scan
from moorage.worker.sandbox import podinit
from tests.support.pod_lab import PATH, python, shell

pytestmark = pytest.mark.root


class Init:
    """The program, with the read end of its stdout."""

    def __init__(self, folder: Path, ranks: Sequence[podinit.Rank], **settings: object) -> None:
        config = folder / "config"
        config.write_bytes(
            podinit.encode(podinit.InitConfig(ranks=ranks, env={"PATH": PATH}, **settings))  # type: ignore[arg-type]
        )
        self.read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", str(podinit.binary()), str(config)],
            stdout=write_end,
        )
        os.close(write_end)

    def frames(self) -> list[Frame]:
        """All frames up to the end."""
        with os.fdopen(self.read_end, "rb") as file:
            data = file.read()
        self.process.wait(20)
        found = list(scan(data))
        assert sum(each.end - each.start for each in found) == len(data)
        frames = [each.frame for each in found]
        assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
        return frames

    @property
    def pid(self) -> int:
        """Of the program, on the host."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        deadline = time.monotonic() + 10
        while not (found := children.read_text().split()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(found[0])


def text(frames: Sequence[Frame], rank: int = 0, kind: Kind = Kind.STDOUT) -> bytes:
    return b"".join(frame.payload for frame in frames if frame.rank == rank and frame.kind == kind)


def test_frames_are_what_the_python_side_reads(tmp_path: Path) -> None:
    frames = Init(tmp_path, [shell("printf out; printf err >&2; exit 4", 3)]).frames()
    assert [(frame.kind, frame.rank) for frame in frames[:1] + frames[-2:]] == [
        (Kind.STARTED, 3),
        (Kind.EXITED, 3),
        (Kind.ENDED, 0),
    ]
    assert (text(frames, 3), text(frames, 3, Kind.STDERR)) == (b"out", b"err")
    assert (frames[-2].number, frames[-1].number) == (4, 4)
    assert abs(frames[0].time_ns / 1e9 - time.time()) < 60
    assert encode(frames[0])[HEADER_SIZE:] == frames[0].payload


def test_a_rank_has_a_session_of_its_own_and_no_descriptor_but_three(tmp_path: Path) -> None:
    script = "cut -d ' ' -f 1,5,6 /proc/$$/stat; ls -l /proc/$$/fd"  # pid, group, session
    out = text(Init(tmp_path, [shell(script)]).frames()).decode().splitlines()
    assert len(set(out[0].split())) == 1
    descriptors = {line.split()[-3]: line.split()[-1] for line in out[2:]}
    assert sorted(descriptors) == ["0", "1", "2"]
    assert descriptors["0"] == "/dev/null"
    assert descriptors["1"].startswith("pipe:")


def test_signals_mean_to_a_rank_what_they_mean_to_any_program(tmp_path: Path) -> None:
    frames = Init(tmp_path, [shell("grep -E 'SigBlk|SigIgn' /proc/self/status; kill -9 $$")]).frames()
    masks = [int(mask, 16) for mask in text(frames).decode().split()[1::2]]
    # 32 and 33 are the C library's own: nobody can set them, and they may come ignored from whoever runs the tests.
    assert [mask & ~(3 << 31) for mask in masks] == [0, 0]
    assert frames[-1].number == 128 + 9


def test_a_rank_gets_its_own_variables_over_the_common_ones(tmp_path: Path) -> None:
    ranks = [
        podinit.Rank(rank=rank, argv=["sh", "-c", "echo $RANK $COMMON"], env={"RANK": str(rank), "COMMON": str(rank)})
        for rank in range(3)
    ]
    frames = Init(tmp_path, ranks).frames()
    assert [text(frames, rank) for rank in range(3)] == [b"0 0\n", b"1 1\n", b"2 2\n"]


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    ranks = [shell("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done", rank) for rank in range(2)]
    init = Init(tmp_path, ranks)
    seen = b""
    while seen.count(b"up\n") < 2:
        seen += os.read(init.read_end, 65536)
    os.kill(init.pid, signal.SIGTERM)
    with os.fdopen(init.read_end, "rb") as file:
        rest = file.read()
    init.process.wait(20)
    assert rest.count(b"bye\n") == 2
    assert list(scan(rest))[-1].frame.number == 0


def test_a_missing_interpreter_is_told_apart_from_a_missing_command(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    frames = Init(tmp_path, [podinit.Rank(rank=0, argv=[str(script)])]).frames()
    assert frames[-1].number == 127
    assert b"interpreter that its first line names is missing" in text(frames, kind=Kind.STDERR)


def test_a_working_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    frames = Init(tmp_path, [shell("true")], cwd="/no/such/place").frames()
    assert frames[-1].number == 126
    assert text(frames, kind=Kind.STDERR) == b"moorage: working directory /no/such/place: No such file or directory\n"


def test_output_is_cut_into_frames_that_the_kernel_takes_whole(tmp_path: Path) -> None:
    frames = Init(tmp_path, [python("import sys; sys.stdout.write('z' * 1000000)")]).frames()
    assert len(text(frames)) == 1_000_000
    assert max(len(frame.payload) for frame in frames) == PAYLOAD_MAX


def test_nobody_reading_costs_no_output_and_no_processor_time(tmp_path: Path) -> None:
    init = Init(tmp_path, [shell("seq 1 100000")])
    time.sleep(0.1)
    kept = os.open(f"/proc/{init.pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK)
    os.close(init.read_end)
    os.close(kept)
    before = cpu_ticks(init.pid)
    time.sleep(0.5)
    assert cpu_ticks(init.pid) - before <= 3  # of 50
    # What is in the pipe has waited for us: read on from there.
    init.read_end = os.open(f"/proc/{init.pid}/fd/1", os.O_RDONLY)
    assert text(init.frames()) == b"".join(b"%d\n" % number for number in range(1, 100001))


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_rank_that_failed_is_told_before_those_that_ended_for_it(tmp_path: Path) -> None:
    init = Init(tmp_path, [shell("sleep 100", 0), shell("sleep 0.3; seq 1 10000; exit 3", 1)])
    # Little is passed on before somebody reads here, and the rank's own pipe takes all that it writes.
    fcntl.fcntl(init.read_end, fcntl.F_SETPIPE_SZ, 4096)
    deadline = time.monotonic() + 20
    ranks = Path(f"/proc/{init.pid}/task/{init.pid}/children")
    while not ranks.read_text():
        assert time.monotonic() < deadline
    while ranks.read_text():  # all have ended, and much of what rank 1 wrote still has to be passed on before its exit
        assert time.monotonic() < deadline
        time.sleep(0.01)
    exits = [frame.rank for frame in init.frames() if frame.kind == Kind.EXITED]
    assert exits == [1, 0]


def test_many_ranks_share_the_pipe_fairly_and_none_is_cut(tmp_path: Path) -> None:
    frames = Init(tmp_path, [shell("seq 1 5000", rank) for rank in range(16)]).frames()
    expected = b"".join(b"%d\n" % number for number in range(1, 5001))
    assert all(text(frames, rank) == expected for rank in range(16))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cut short"),
        (b"something else\0end\0", "not a configuration of this version"),
        (b"moorage-init 1\0cwd /\0", "cut short"),
        (b"moorage-init 1\0end\0", "no ranks"),
        (b"moorage-init 1\0rank 0\0end\0", "has no command"),
        (b"moorage-init 1\0rank x\0argv a\0end\0", "bad field rank"),
        (b"moorage-init 1\0uid -1\0rank 0\0argv a\0end\0", "bad field uid"),
        (b"moorage-init 1\0env SECRET\0rank 0\0argv a\0end\0", "bad field env"),
        (b"moorage-init 1\0unknown 1\0rank 0\0argv a\0end\0", "bad field unknown"),
    ],
)
def test_a_configuration_that_is_wrong_is_named_without_its_content(tmp_path: Path, content: bytes, why: str) -> None:
    config = tmp_path / "config"
    config.write_bytes(content)
    ended = subprocess.run([str(podinit.binary()), str(config)], stdout=subprocess.PIPE, check=False, timeout=20)
    frames = [each.frame for each in scan(ended.stdout)]
    assert ended.returncode == 125
    assert why in frames[0].payload.decode()
    assert b"SECRET" not in frames[0].payload
    assert frames[-1].number == 125


def test_each_line_of_the_file_of_events_is_one_signal_for_ranks_that_listen(tmp_path: Path) -> None:
    events = tmp_path / "events"
    listens = python(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'before\\n'))\n"
        "signal.signal(signal.SIGUSR2, lambda *_: os.write(1, b'after\\n'))\n"
        "os.write(1, b'up\\n')\n"
        "while True: time.sleep(60)\n"
    )
    deaf = podinit.Rank(rank=1, argv=["sh", "-c", "echo up; exec sleep 1000"])
    hooks = {"before-checkpoint": signal.SIGUSR1, "after-restore": signal.SIGUSR2}
    init = Init(tmp_path, [listens, deaf], events=str(events), hooks=hooks)
    pid = init.pid
    seen = b""

    def until(text: bytes, count: int) -> None:
        nonlocal seen
        while seen.count(text) < count:
            got = os.read(init.read_end, 65536)
            assert got, seen
            seen += got

    def told(*lines: str) -> None:
        (tmp_path / "new").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "new").rename(events)
        for _ in range(3):  # once too often does no harm
            os.kill(pid, signal.SIGURG)

    until(b"up\n", 2)  # both ranks stand, and the first has its handlers
    told("1 before-checkpoint 7 {}")
    until(b"before\n", 1)
    told("1 before-checkpoint 7 {}", "2 after-checkpoint 7 {}", "no line", "3 before-checkpoint 8 {}", "4 cut-sh")
    until(b"before\n", 2)
    told("3 before-checkpoint 8 {}", "5 after-restore 2 {}")
    until(b"after\n", 1)
    os.kill(pid, signal.SIGTERM)
    with os.fdopen(init.read_end, "rb") as file:
        seen += file.read()
    init.process.wait(20)
    assert (seen.count(b"before\n"), seen.count(b"after\n")) == (2, 1)
    # The rank without handlers lived until it was told to end.
    codes = {found.frame.rank: found.frame.number for found in scan(seen) if found.frame.kind == Kind.EXITED}
    assert codes == {0: 128 + signal.SIGTERM, 1: 128 + signal.SIGTERM}
