"""The command line against a coordinator that only remembers: what it prints, asks, changes, and ends with."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from moorage.cli import main as command
from moorage.cli.options import config_file, global_flags
from moorage.errors import MoorageError, Unavailable, UsageError
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2, worker_pb2
from tests.support.fake_coordinator import FakeCoordinator


class Done(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> object:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(tmp_path) as made:
        monkeypatch.setenv("MOORAGE_CONFIG", str(made.config_file))
        yield made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*arguments: str) -> Done:
        global_flags.clear()
        config_file[0] = None
        with pytest.raises(SystemExit) as end:
            command.main(list(arguments))
        captured = capsys.readouterr()
        code = end.value.code
        assert "Traceback" not in captured.err
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err)

    yield call
    global_flags.clear()
    config_file[0] = None


def _chunk(rank: int, text: str, *, stderr: bool = False, offset: int = 1) -> worker_pb2.LogChunk:
    return worker_pb2.LogChunk(rank=rank, data=text.encode(), is_stderr=stderr, offset=offset, pod=rank)


def _finishing(coordinator: FakeCoordinator, code: int, *chunks: worker_pb2.LogChunk) -> None:
    """The next job writes these and ends with that code."""
    for number, chunk in enumerate(chunks):
        chunk.offset = number + 1
    coordinator.state.logs = list(chunks)
    if not chunks:
        coordinator.state.logs = [_chunk(0, "")]

    def ended(number: int) -> None:
        if number == len(coordinator.state.logs) - 1:
            for job in coordinator.state.jobs.values():
                coordinator.state.change(job, "failed" if code else "finished", code)

    coordinator.state.on_log = ended


def test_run_streams_the_output_and_ends_with_the_jobs_code(coordinator: FakeCoordinator, run: Run) -> None:
    _finishing(coordinator, 3, _chunk(0, "one\ntw"), _chunk(0, "o\n"), _chunk(0, "bad\n", stderr=True))
    done = run("run", "--name", "j", "--", "sh", "-c", "exit 3")
    assert (done.code, done.out) == (3, "one\ntwo\n")
    assert "bad\n" in done.err and "job j started" in done.err
    assert list(coordinator.asked("Submit")[0].spec.command) == ["sh", "-c", "exit 3"]


def test_lines_of_several_ranks_are_whole_and_say_whose_they_are(coordinator: FakeCoordinator, run: Run) -> None:
    _finishing(coordinator, 0, _chunk(0, "a"), _chunk(1, "b\nc\n"), _chunk(0, "A\n"), _chunk(1, "end"))
    done = run("run", "--pods", "2", "--", "true")
    assert done.code == 0
    assert done.out == "[rank 1] b\n[rank 1] c\n[rank 0] aA\n[rank 1] end\n"


def test_a_detached_job_gives_its_name_and_runs_on(coordinator: FakeCoordinator, run: Run) -> None:
    done = run("run", "-d", "--name", "j", "--", "sleep", "9")
    assert (done.code, done.out) == (0, "j\n")
    detached = run("torchrun", "-d", "--name", "k", "--output", "json", "t.py").json()
    assert isinstance(detached, dict) and detached["phase"] == "running" and detached["name"] == "k"


def test_run_says_what_it_would_start_and_starts_nothing(coordinator: FakeCoordinator, run: Run) -> None:
    done = run("run", "--dry-run", "--pods", "2", "--checkpoint-every", "10m", "-o", "json", "--", "true")
    spec = done.json()
    assert isinstance(spec, dict)
    assert done.code == 0 and spec["pods"] == 2 and spec["command"] == ["true"]
    assert spec["policy"]["checkpoint_every_seconds"] == 600
    assert run("torchrun", "--dry-run", "--nnodes", "2", "t.py").code == 0
    assert coordinator.state.requests == []


def test_a_name_that_is_taken_ends_with_conflict_and_the_way_out(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j")
    done = run("run", "--name", "j", "--", "true")
    assert done.code == 203 and done.out == ""
    assert done.err.splitlines()[-2:] == ["moorage: the name j is taken", "  use --if-exists resume"]
    assert coordinator.asked("Submit") == []


def test_if_exists_is_handed_on(coordinator: FakeCoordinator, run: Run) -> None:
    assert run("run", "-d", "--if-exists", "replace", "--", "true").code == 0
    assert coordinator.asked("Submit")[0].if_exists == types_pb2.IF_EXISTS_REPLACE


def test_a_job_file_is_read_and_overruled_by_flags(coordinator: FakeCoordinator, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: from-file\npods: 3\ncommand: [python, train.py, 7]\nshm_size: 1GiB\ncheckpoint_every: 30\n"
        "env: {SEED: 4}\nmounts: ['/data:/data:ro']\n"
    )
    assert run("run", "-d", "-f", str(file), "--pods", "2", "--env", "LR=1").code == 0
    spec = coordinator.asked("Submit")[0].spec
    assert (spec.name, spec.pods, list(spec.command)) == ("from-file", 2, ["python", "train.py", "7"])
    assert (spec.shm_bytes, spec.policy.checkpoint_every_seconds) == (1 << 30, 30)
    assert spec.env["SEED"] == "4" and spec.env["LR"] == "1" and spec.mounts[0].read_only


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("command: [a\n", "not valid YAML"),
        ("- a\n", "not a mapping"),
        ("comand: [a]\n", "no field 'comand'"),
        ("command: true\n", "command must be a list"),
        ("command: [a]\npods: two\n", "pods must be a int"),
        ("command: [a]\npods: 0\n", "--pods 0 is too small"),
        ("pods: 2\n", "no command is given"),
        ("command: [a]\ncheckpoint_every: often\n", "'often' is not a duration"),
    ],
)
def test_a_wrong_job_file_is_one_line(
    coordinator: FakeCoordinator, run: Run, tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    done = run("run", "-d", "-f", str(file))
    assert done.code == 201 and complaint in done.err
    assert coordinator.state.requests == []


def test_a_job_file_that_is_missing_is_named(coordinator: FakeCoordinator, run: Run) -> None:
    done = run("run", "-f", "/no/such.yaml")
    assert done.code == 202 and "/no/such.yaml" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["jump"],
        ["run", "--pods", "many", "--", "true"],
        ["run"],
        ["checkpoint"],
        ["run", "--no-such-flag", "--", "true"],
        ["torchrun", "--no-such-flag", "t.py"],
        ["torchrun"],
        ["jobs", "-o", "xml"],
        ["run", "--checkpoint-every", "soon", "--", "true"],
        ["run", "--mount", "relative:/x", "--", "true"],
        ["run", "--publish", "80:x", "--", "true"],
        ["run", "--on-failure", "panic", "--", "true"],
        ["stop", "j", "--grace", "x"],
    ],
)
def test_a_mistake_in_the_line_is_said_in_one_line_with_moorages_code(
    coordinator: FakeCoordinator, run: Run, arguments: list[str]
) -> None:
    coordinator.state.add("j")
    done = run(*arguments)
    assert done.code == 201 and done.out == "" and done.err.startswith("moorage")
    assert not any(method in ("Submit", "Stop", "Checkpoint") for method, _ in coordinator.state.requests)


@pytest.mark.parametrize("verb", ["checkpoint", "park", "move", "restore", "stop"])
def test_every_verb_on_a_job_has_a_dry_run_that_changes_nothing(
    coordinator: FakeCoordinator, run: Run, verb: str
) -> None:
    coordinator.state.add("j")
    done = run(verb, "j", *(["--to", "a"] if verb == "move" else []), "--dry-run", "-o", "json")
    plan = done.json()
    assert isinstance(plan, dict) and (done.code, plan["would"], plan["job"]) == (0, verb, "id-j")
    assert {method for method, _ in coordinator.state.requests} == {"GetJob"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["checkpoint", "x"], ["park", "x"], ["move", "x", "--to", "a"], ["restore", "x"], ["stop", "x"], ["wait", "x"],
        ["show", "x"], ["events", "x"], ["logs", "x"], ["pull", "x"], ["checkpoints", "x"], ["inspect", "x"],
        ["check", "x"], ["pin", "x"], ["unpin", "x"], ["exec", "x", "--", "true"],
    ],
)  # fmt: skip
def test_a_thing_that_does_not_exist_is_named(coordinator: FakeCoordinator, run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.code == 202 and done.out == ""
    assert " x " in done.err and len(done.err.splitlines()) == 2


def test_a_checkpoint_prints_its_id_and_what_it_cost(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j")
    done = run("checkpoint", "j")
    assert done.out == "c-1\n" and "stood still for 0.50 s" in done.err
    found = run("park", "j", "--keep", "host", "--output", "yaml")
    assert yaml.safe_load(found.out)["id"] == "c-1"
    assert [request.keep for method, request in coordinator.state.requests if method == "Park"] == ["host"]
    assert "cannot be kept on 'disk'" in run("park", "j", "--keep", "disk").err


def test_an_aborted_checkpoint_ends_with_its_code_and_reason(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j")
    coordinator.state.attempt = pb.Attempt(phase="aborted", reason="pod 1 did not answer")
    done = run("checkpoint", "j")
    assert done.code == 212 and "pod 1 did not answer" in done.err and done.out == ""


def test_move_and_restore_hand_on_nodes_and_print_the_job(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j")
    coordinator.state.checkpoints["c-1"] = pb.CheckpointInfo(id="c-1")
    moved = run("move", "j", "--to", "a,b", "-o", "json").json()
    assert isinstance(moved, dict) and moved["incarnation"] == 2
    assert run("restore", "j", "--checkpoint", "c-1", "--on", "c").code == 0
    assert list(coordinator.asked("Move")[0].nodes) == ["a", "b"]
    asked = coordinator.asked("Restore")[0]
    assert (asked.checkpoint, list(asked.nodes)) == ("c-1", ["c"])


@pytest.mark.parametrize(
    ("phase", "code", "ends"),
    [("finished", 0, 0), ("finished", None, 0), ("failed", 5, 5), ("failed", None, 214), ("stopped", None, 130)],
)
def test_wait_ends_with_the_jobs_code(
    coordinator: FakeCoordinator, run: Run, phase: str, code: int | None, ends: int
) -> None:
    job = coordinator.state.add("j")
    coordinator.state.change(job, phase, code)
    assert run("wait", "j").code == ends


def test_wait_gives_up_in_time_and_says_that_the_job_runs_on(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j")
    done = run("wait", "j", "--timeout", "100ms")
    assert done.code == 208 and "runs on" in done.err


@pytest.mark.parametrize("form", ["table", "json", "yaml"])
def test_every_listing_prints_in_every_form(coordinator: FakeCoordinator, run: Run, form: str) -> None:
    coordinator.state.add("j")
    coordinator.state.nodes = [pb.Node(node="n-1", live=True, ready=True, cpus=2)]
    coordinator.state.checkpoints["c-1"] = pb.CheckpointInfo(id="c-1", job="id-j", job_name="j", latest=True)
    coordinator.state.events = [pb.JobEvent(time=5.0, sentence="Job j started.", data_json='{"pods": 1}')]
    coordinator.state.logs = [_chunk(0, "hello\n")]
    expected = {
        ("jobs",): "j", ("nodes",): "n-1", ("checkpoints",): "c-1", ("checkpoints", "j"): "c-1", ("show", "j"): "j",
        ("show", "n-1"): "n-1", ("show", "c-1"): "c-1", ("events", "j"): "Job j started.", ("logs", "j"): "hello",
        ("inspect", "c-1"): "process memory", ("check", "c-1"): "7", ("prune", "--dry-run"): "c-0", ("status",): "here",
        ("pin", "c-1"): "c-1", ("unpin", "c-1"): "c-1", ("checkpoint", "j"): "c-1", ("wait", "j"): "",
    }  # fmt: skip
    for arguments, text in expected.items():
        if arguments == ("wait", "j"):
            coordinator.state.change(coordinator.state.jobs["id-j"], "finished", 0)
        done = run(*arguments, "--output", form)
        assert done.code == 0, (arguments, done)
        assert text in done.out, arguments
        if form == "json":
            texts = done.out.splitlines() if arguments[0] in ("events", "logs") else [done.out]
            assert all(json.loads(text) is not None for text in texts)
        elif form == "yaml":
            assert list(yaml.safe_load_all(done.out))


def test_a_table_in_a_pipe_has_one_line_for_each_thing(coordinator: FakeCoordinator, run: Run) -> None:
    for number in range(3):
        coordinator.state.add(f"a-very-long-name-of-a-job-{number}" * 4, reason="r" * 300)
    lines = [line for line in run("jobs").out.splitlines() if "very-long" in line]
    assert len(lines) == 3


def test_logs_of_one_rank_have_no_prefix_and_a_rank_beyond_is_refused(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j").spec.pods = 2
    coordinator.state.logs = [_chunk(0, "zero\n"), _chunk(1, "one\n", stderr=True)]
    assert run("logs", "j", "--rank", "1").err == "one\n"
    assert run("logs", "j").out == "[rank 0] zero\n"
    done = run("logs", "j", "--rank", "2")
    assert done.code == 201 and "0 to 1" in done.err
    assert run("logs", "j", "--rank", "-5").code == 201


def test_a_check_that_finds_damage_ends_with_its_code(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.checkpoints["bad"] = pb.CheckpointInfo(id="bad")
    done = run("check", "bad", "--read-data", "-o", "json")
    assert done.code == 209 and "ab12" in done.err
    assert coordinator.asked("CheckCheckpoint")[0].read_data


def test_pin_unpin_and_prune_change_only_what_they_are_asked_to(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.checkpoints["c-1"] = pb.CheckpointInfo(id="c-1")
    run("pin", "c-1", "--dry-run")
    assert coordinator.asked("PinCheckpoint") == []
    run("pin", "c-1")
    assert coordinator.state.checkpoints["c-1"].pinned
    run("unpin", "c-1")
    assert not coordinator.state.checkpoints["c-1"].pinned
    run("prune", "--dry-run")
    run("prune")
    assert [request.dry_run for request in coordinator.asked("Prune")] == [True, False]


@pytest.mark.parametrize(
    ("code", "words", "line"),
    [
        (202, "/proc/nope", "certs create --authority /proc/nope"),
        (201, "{file}", "certs create --authority {file}"),
        (202, "{file}/x", "certs create --authority {file}/x"),
        (201, "HOST:PORT", "--coordinator somewhere jobs"),
        (201, "'b' is not", "--coordinator a:1,b jobs"),
    ],
)
def test_a_path_or_address_that_cannot_be_is_said_in_a_line(
    coordinator: FakeCoordinator, run: Run, tmp_path: Path, code: int, words: str, line: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    done = run(*line.format(file=file).split())
    said, hint = done.err.splitlines()
    assert done.code == code and words.format(file=file) in said and hint.startswith("  ")


def test_deleting_asks_names_what_goes_and_deletes_by_id(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("old", "finished")
    coordinator.state.add("busy")
    coordinator.state.checkpoints["c-1"] = pb.CheckpointInfo(id="c-1", job="id-old")
    dry = run("delete", "old", "--dry-run", "-o", "json")
    assert dry.json() == [{"job": "id-old", "name": "old", "checkpoints": ["c-1"], "would": "delete"}]
    refused = run("delete", "old")
    assert refused.code == UsageError.exit_code and "-y" in refused.err
    both = run("delete", "old", "busy", "-y")
    assert both.code == 203 and "busy is running" in both.err
    assert all(request.dry_run for request in coordinator.asked("DeleteJob")), "nothing goes when one has to stay"
    done = run("delete", "old", "-y")
    assert done.out == "deleted old and its checkpoints c-1\n"
    assert [request.job for request in coordinator.asked("DeleteJob")][-1] == "id-old"
    assert run("delete", "old", "-y").code == 202


def test_exec_hands_on_output_and_exit_code(
    coordinator: FakeCoordinator, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.state.add("j")
    with Path("/dev/null").open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        done = run("exec", "j", "--rank", "0", "--", "nvidia-smi", "-L")
    assert (done.code, done.out) == (3, "nvidia-smi -L\n")


def test_pull_writes_files_and_lists_them(coordinator: FakeCoordinator, run: Run, tmp_path: Path) -> None:
    coordinator.state.add("j")
    coordinator.state.files = [worker_pb2.FilePart(path="out.txt", mode=0o100644, data=b"x", last=True)]
    assert run("pull", "j", "--to", str(tmp_path / "to")).out == "out.txt\n"
    assert (tmp_path / "to/out.txt").read_bytes() == b"x"


def test_the_doctor_of_a_node_ends_with_126_when_something_is_missing(coordinator: FakeCoordinator, run: Run) -> None:
    done = run("doctor", "--node", "n-1")
    assert done.code == 206 and "modprobe vxlan" in done.out and "vxlan" in done.err


def test_without_a_coordinator_the_way_out_is_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    for name in ("MOORAGE_COORDINATOR", "MOORAGE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    done = run("--config", str(empty), "jobs")
    assert done.code == 201 and "moorage dev up" in done.err


def test_a_coordinator_that_cannot_be_reached_ends_with_127(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.fails["Status"] = [Unavailable("coordinator is not leading", "wait")] * 50
    done = run("status")
    assert done.code == 207 and done.out == ""


def test_ctrl_c_stops_the_job_once_and_again_at_once(
    coordinator: FakeCoordinator, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moorage.cli import follow

    coordinator.state.logs = [_chunk(0, "x\n")]

    def interrupt(self: object, piece: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow.Printer, "take", interrupt)
    monkeypatch.setattr(follow, "_confirm", lambda job: True)
    assert run("run", "--", "sleep", "9").code == 130
    assert coordinator.asked("Stop")[-1].grace_seconds == 10

    def impatient(job: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "_confirm", impatient)
    assert run("run", "--", "sleep", "9").code == 130
    assert coordinator.asked("Stop")[-1].grace_seconds == 0
    monkeypatch.setattr(follow, "_confirm", lambda job: False)
    done = run("run", "--name", "on", "--", "sleep", "9")
    assert done.code == 0 and "runs on" in done.err and len(coordinator.asked("Stop")) == 2


class Terminal:
    """`moorage` in a process of its own, on a terminal: what it writes there, and keys typed into it."""

    def __init__(self, coordinator: FakeCoordinator, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environ = os.environ | {"MOORAGE_CONFIG": str(coordinator.config_file)}
        take_terminal = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        line = [sys.executable, "-c", take_terminal, sys.executable, "-m", "moorage.cli.main", *arguments]
        self.process = subprocess.Popen(
            line, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> None:
        while text not in self.seen:
            ready = select.select([self._ours], [], [], 30)[0]
            assert ready, f"{text!r} did not come: {self.seen}"
            try:
                self.seen += os.read(self._ours, 65536).decode()
            except OSError:  # the process ended, and with it the terminal
                raise AssertionError(f"{text!r} did not come: {self.seen}") from None

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until_it_reads(self) -> None:
        # An interrupt that comes just before Python enters read() is noticed only after it. People are not so fast.
        deadline = time.monotonic() + 30
        while not re.match(r"\d+ 0x0 ", Path(f"/proc/{self.process.pid}/syscall").read_text()):
            assert time.monotonic() < deadline, self.seen
            time.sleep(0.01)

    def end(self) -> int:
        code = self.process.wait(30)
        os.close(self._ours)
        return code


def test_ctrl_c_on_a_terminal_asks_and_no_lets_the_job_run_on(coordinator: FakeCoordinator) -> None:
    coordinator.state.logs = [_chunk(0, "working\n")]
    terminal = Terminal(coordinator, "run", "--name", "j", "--", "sleep", "9")
    terminal.until("working")
    terminal.type("\x03")
    terminal.until("[y/N]")
    terminal.type("n\n")
    terminal.until("runs on")
    assert terminal.end() == 0
    assert coordinator.asked("Stop") == [] and "Traceback" not in terminal.seen


def test_ctrl_c_on_a_terminal_and_yes_stops_the_job(coordinator: FakeCoordinator) -> None:
    coordinator.state.logs = [_chunk(0, "working\n")]
    terminal = Terminal(coordinator, "run", "--name", "j", "--", "sleep", "9")
    terminal.until("working")
    terminal.type("\x03")
    terminal.until("[y/N]")
    terminal.type("y\n")
    terminal.until("stopping job")
    assert terminal.end() == 130
    assert [request.grace_seconds for request in coordinator.asked("Stop")] == [10]
    assert "Traceback" not in terminal.seen


def test_a_second_ctrl_c_stops_the_job_at_once(coordinator: FakeCoordinator) -> None:
    coordinator.state.logs = [_chunk(0, "working\n")]
    terminal = Terminal(coordinator, "run", "--name", "j", "--", "sleep", "9")
    terminal.until("working")
    terminal.type("\x03")
    terminal.until("[y/N]")
    terminal.until_it_reads()
    terminal.type("\x03")
    assert terminal.end() == 130
    assert [request.grace_seconds for request in coordinator.asked("Stop")] == [0]
    assert "Traceback" not in terminal.seen


def test_a_terminal_sees_a_progress_bar_and_data_all_the_same(coordinator: FakeCoordinator) -> None:
    coordinator.state.add("j")
    terminal = Terminal(coordinator, "checkpoint", "j")
    terminal.until("checkpoint of j")
    terminal.until("c-1\r\n")
    assert terminal.end() == 0


def test_an_interrupt_without_a_terminal_stops_the_job(coordinator: FakeCoordinator) -> None:
    coordinator.state.logs = [_chunk(0, "working\n")]
    process = subprocess.Popen(
        [sys.executable, "-m", "moorage.cli.main", "run", "--", "sleep", "9"],
        env=os.environ | {"MOORAGE_CONFIG": str(coordinator.config_file)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, len(coordinator.asked("Stop"))) == (130, 1), err
    assert "Traceback" not in err


def test_a_reader_that_goes_away_is_no_error(coordinator: FakeCoordinator) -> None:
    coordinator.state.add("j")
    coordinator.state.logs = [_chunk(0, "line\n" * 100_000)]
    environ = os.environ | {"MOORAGE_CONFIG": str(coordinator.config_file)}
    writer = subprocess.Popen(
        [sys.executable, "-m", "moorage.cli.main", "logs", "j"],
        env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert writer.stdout is not None and writer.stderr is not None
    assert writer.stdout.readline() == b"line\n"
    writer.stdout.close()
    assert (writer.wait(60), writer.stderr.read()) == (0, b"")
    writer.stderr.close()


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version").out.startswith("moorage 0.")


def test_text_that_cannot_travel_and_limits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("moorage"))]

    def said(*arguments: bytes | str, shell: str = "", cwd: Path = tmp_path) -> tuple[int, str]:
        line = [*command, *arguments] if not shell else ["sh", "-c", shell.format(*command)]
        done = subprocess.run(line, cwd=cwd, capture_output=True, check=False)
        return done.returncode, done.stderr.decode()

    for arguments, words in (
        (("run", "--env", b"X=\xff", "--", "true"), "--env is not valid UTF-8"),
        (("run", "--", "printf", b"\xff"), "the command is not valid UTF-8"),
        (("run", "--cpus", "-1", "--", "true"), "--cpus -1 is too small"),
        (("run", "--memory", "1", "--", "true"), "--memory"),
        (("move", "j"), "no node is named"),
        (("dev", "up", "--lease", "0s", "--dry-run"), "--lease 0s is too short"),
        (("dev", "up", "--nodes", "0", "--dry-run"), "1 to 200 nodes, not 0"),
        (("dev", "up", "--slots", "-1", "--dry-run"), "--slots -1 is too small"),
    ):
        code, text = said(*arguments)
        assert code == UsageError.exit_code and words in text and "Traceback" not in text, text
    for shell, code, words in (
        ("mkdir gone; cd gone; rmdir ../gone; {} run -- true", UsageError.exit_code, "does not exist any more"),
        ("{} --version >/dev/full", MoorageError.exit_code, "cannot be written"),
        ("{} --version >&-", 0, ""),
    ):
        assert said(shell=shell)[0] == code
        assert words in said(shell=shell)[1] and "Traceback" not in said(shell=shell)[1]


def test_another_cluster_on_the_port_is_named_in_two_lines_and_nothing_else(tmp_path: Path) -> None:
    """In a process of its own: what gRPC's core writes goes past Python's stderr."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    script = (
        "import sys; from moorage.cli import options, main; from moorage.coordinator.client import sync;"
        "made = sync.Client.__init__;"
        "sync.Client.__init__ = lambda self, **given: made(self, **(given | {'patience': 0.5}));"
        "main.main(sys.argv[1:])"
    )
    with FakeCoordinator(tmp_path / "mine") as mine, FakeCoordinator(tmp_path / "other") as other:
        command_line = ["--config", str(mine.config_file), "--coordinator", other.config.coordinator, "jobs"]
        environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        done = subprocess.run(
            [sys.executable, "-c", script, *command_line], capture_output=True, text=True, env=environment, check=False
        )
    first, second = done.stderr.splitlines()
    assert done.returncode == Unavailable.exit_code
    assert first == (
        f"moorage: coordinator {other.config.coordinator} is of another authority: its certificate is not one that is"
        " trusted here"
    )
    assert "tls.ca" in second


def test_the_command_leaves_grpcs_setting_to_its_jobs_as_it_was() -> None:
    script = "import os, moorage.cli.main; print(os.environ.get('GRPC_VERBOSITY'))"
    for value in (None, "debug"):
        environment = {name: kept for name, kept in os.environ.items() if name != "GRPC_VERBOSITY"}
        environment |= {"GRPC_VERBOSITY": value} if value else {}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
        )
        assert done.stdout.strip() == str(value)
