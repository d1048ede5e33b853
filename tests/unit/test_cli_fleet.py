"""cordon, uncordon, drain and top against a coordinator that only remembers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from rich.console import Console

from moorage.cli import completing
from moorage.cli import main as command
from moorage.cli.options import config_file, global_flags
from moorage.cli.top import Rates, picture, render
from moorage.coordinator.client import JobInfo, NodeInfo
from moorage.v1 import coordinator_pb2 as pb
from moorage.v1 import types_pb2
from tests.support.fake_coordinator import FakeCoordinator


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCoordinator]:
    with FakeCoordinator(tmp_path) as made:
        monkeypatch.setenv("MOORAGE_CONFIG", str(made.config_file))
        made.state.nodes = [pb.Node(node=name, live=True, ready=True, cpus=2) for name in ("n-1", "n-2")]
        yield made


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    def call(*arguments: str) -> Done:
        with pytest.raises(SystemExit) as end:
            command.main(list(arguments))
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Done(end.value.code if isinstance(end.value.code, int) else 0, captured.out, captured.err)

    yield call
    global_flags.clear()
    config_file[0] = None


def _plan(coordinator: FakeCoordinator, *, homeless: bool = False) -> None:
    moves = [
        pb.DrainMove(job="a", name="a", wave=1, source=["n-1"], target=["n-2"], state="waiting"),
        pb.DrainMove(job="b", name="b", wave=1, source=["n-1", "n-2"], target=["n-3", "n-2"], state="waiting"),
    ]
    plan = pb.DrainInfo(id="d-1", phase="running", nodes=["n-1"], waves=[pb.DrainWave(nodes=["n-1"], moves=moves)])
    if homeless:
        stuck = pb.DrainMove(job="c", name="c", source=["n-1"], state="left", reason="no room", choices=["park it"])
        plan.homeless.append(stuck)
    coordinator.state.drain = plan
    coordinator.state.nodes[0].cordoned = True


def _ends(coordinator: FakeCoordinator, phase: str, *states: str) -> None:
    """How a watch of the drain goes: as planned, then with these states."""
    last = pb.DrainInfo()
    last.CopyFrom(coordinator.state.drain)
    last.phase, last.over = phase, phase != "running"
    for move, state in zip(last.waves[0].moves, states, strict=True):
        move.state = state
        move.placed.extend(move.target)
    last.reason = "" if phase == "done" else "b could not be moved"
    coordinator.state.drained = [coordinator.state.drain, last]


def test_a_node_is_cordoned_and_uncordoned_under_each_of_its_names(coordinator: FakeCoordinator, run: Run) -> None:
    done = run("cordon", "n-1", "--reason", "fan")
    assert (done.code, done.err) == (0, "n-1 cordoned\n") and "ready, cordoned" in done.out
    assert coordinator.asked("Cordon")[0].reason == "fan"
    assert "ready, cordoned" in run("nodes").out
    for verb in ("uncordon", "undrain"):
        assert run(verb, "n-1", "-l", "rack=7").err == "n-1 uncordoned\n"
    assert coordinator.asked("Cordon")[-1].choice.selector == "rack=7"
    assert run("cordon", "n-1", "--dry-run").err == "n-1 would be cordoned\n"


def test_a_dry_run_prints_the_plan_and_begins_nothing(coordinator: FakeCoordinator, run: Run) -> None:
    _plan(coordinator)
    done = run("drain", "n-1", "--dry-run")
    assert done.out.splitlines() == ["wave 1: n-1", "  a: n-1 -> n-2", "  b: n-1 -> n-3"]
    assert json.loads(run("drain", "n-1", "--dry-run", "-o", "json").out)["phase"] == "planned"
    assert all(request.dry_run for request in coordinator.asked("Drain"))


def test_every_flag_reaches_the_coordinator(coordinator: FakeCoordinator, run: Run) -> None:
    _plan(coordinator)
    _ends(coordinator, "done", "moved", "moved")
    line = ["drain", "-l", "rack=7", "--on-driver", "570", "--parallel", "2", "--deadline", "15m", "-y"]
    assert run(*line, "--homeless", "park").code == 0
    request = coordinator.asked("Drain")[-1]
    assert (request.choice.selector, request.choice.driver, request.parallel) == ("rack=7", "570", 2)
    assert (request.timeout_seconds, request.homeless, request.dry_run) == (900, pb.HOMELESS_PARK, False)


def test_a_drain_tells_of_each_job_and_sums_up(coordinator: FakeCoordinator, run: Run) -> None:
    _plan(coordinator)
    _ends(coordinator, "done", "moved", "parked")
    done = run("drain", "n-1", "-y")
    assert done.code == 0 and "drain of n-1: done; 1 moved, 1 parked" in done.out
    assert "a runs on n-2" in done.err and "n-1 stays cordoned until" in done.err
    summary = json.loads(run("drain", "n-1", "-y", "-o", "json").out)
    assert (summary["phase"], [move["state"] for move in summary["waves"][0]["moves"]]) == ("done", ["moved", "parked"])


def test_it_asks_first_and_without_a_terminal_wants_a_yes(coordinator: FakeCoordinator, run: Run) -> None:
    _plan(coordinator)
    done = run("drain", "n-1")
    assert done.code == 201 and "say -y" in done.err and "a: n-1 -> n-2" in done.err
    assert [request.dry_run for request in coordinator.asked("Drain")] == [True]


def test_who_has_no_other_place_stops_it_before_anything_is_touched(coordinator: FakeCoordinator, run: Run) -> None:
    _plan(coordinator, homeless=True)
    done = run("drain", "n-1", "-y")
    assert done.code == 205 and "no other place for c; nothing was touched" in done.err
    assert "no other place: c (n-1): no room\n    park it\n" in done.out
    assert [request.dry_run for request in coordinator.asked("Drain")] == [True]
    assert run("drain", "n-1", "-y", "--homeless", "somewhere").code == 201


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_of_nodes_that_cannot_be_is_refused_in_words(
    coordinator: FakeCoordinator, run: Run, number: str
) -> None:
    done = run("drain", "n-1", f"--parallel={number}", "--dry-run")
    assert done.code == 201 and f"--parallel {number} is too small" in done.err and not coordinator.asked("Drain")


@pytest.mark.parametrize(("phase", "code"), [("incomplete", 212), ("timed-out", 208), ("cancelled", 130)])
def test_what_is_not_done_ends_with_a_code_of_its_own(
    coordinator: FakeCoordinator, run: Run, phase: str, code: int
) -> None:
    _plan(coordinator)
    _ends(coordinator, phase, "moved", "failed")
    done = run("drain", "n-1", "-y")
    assert done.code == code and "moorage drain n-1 goes on" in done.err


def test_a_drain_that_uncordon_called_off_does_not_say_that_its_nodes_are_cordoned(
    coordinator: FakeCoordinator, run: Run
) -> None:
    _plan(coordinator)
    _ends(coordinator, "cancelled", "moved", "waiting")
    coordinator.state.nodes[0].cordoned = False
    done = run("drain", "n-1", "-y")
    assert done.code == 130 and "cancelled" in done.out and "cordoned" not in done.err


def test_ctrl_c_calls_it_off_and_says_how_it_stands(coordinator: FakeCoordinator) -> None:
    _plan(coordinator)
    _ends(coordinator, "running", "moving", "waiting")
    line = [sys.executable, "-P", "-m", "moorage.cli.main", "drain", "n-1", "-y"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        while "is being checkpointed and moved to n-2" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        rest, out = process.stderr.read(), process.stdout.read()
    assert process.returncode == 130
    assert "called off before b moved" in rest and "stays cordoned" in rest and "Traceback" not in rest
    assert "cancelled" in out and coordinator.asked("CancelDrain")[0].drain == "d-1"


def test_top_prints_one_picture_for_people_and_for_programs(coordinator: FakeCoordinator, run: Run) -> None:
    coordinator.state.add("j", reason="Job j runs.")
    assert "j" in run("top", "--once", "-n", "100ms").out
    view: Any = json.loads(run("top", "--once", "-n", "100ms", "-o", "json").out)
    assert [node["node"] for node in view["nodes"]] == ["n-1", "n-2"] and view["jobs"][0]["phase"] == "running"
    assert run("top", "--once", "-n", "1ms").code == 201


def test_rates_are_what_was_used_since_the_last_look() -> None:
    def job(cpu: float, output: int, incarnation: int = 1) -> JobInfo:
        pod = types_pb2.PodStatus(pod=0, node="n", incarnation=incarnation, cpu_seconds=cpu, output_bytes=output)
        return JobInfo.of(pb.Job(id="j", phase="running", pods=[pod]))

    rates, nodes = Rates(), [NodeInfo.of(pb.Node(node="n", cpus=4))]
    assert picture(nodes, [job(10, 0)], rates, 100.0).jobs[0].cores == 0
    view = picture(nodes, [job(13, 500)], rates, 102.0)
    assert (view.jobs[0].cores, view.jobs[0].output_bytes_per_second, view.nodes[0].cores) == (1.5, 250, 1.5)
    assert picture(nodes, [job(1, 0, incarnation=2)], rates, 103.0).jobs[0].cores == 0


def test_a_narrow_picture_leaves_out_columns_and_never_cuts_a_name() -> None:
    def job(name: str, phase: str) -> JobInfo:
        pods = [types_pb2.PodStatus(pod=at, node=f"node-{at}") for at in range(4)]
        spec = types_pb2.JobSpec(name=name)
        return JobInfo.of(pb.Job(id=name, spec=spec, phase=phase, pods=pods, reason=f"Job {name} {'runs on ' * 20}"))

    nodes = [NodeInfo.of(pb.Node(node=f"node-{at}", cpus=4, live=at != 8, ready=True)) for at in range(9)]
    jobs = [*(job(f"a-job-of-some-length-{at}", "running") for at in range(30)), job("in-trouble", "parked")]
    view = picture(nodes, jobs, Rates(), 100.0)
    for width, height in ((70, 24), (100, 30), (160, 60), (0, 0)):
        console = Console(width=width or 10_000, file=io.StringIO())
        console.print(render(view, width, height))
        shown = cast("io.StringIO", console.file).getvalue().splitlines()
        assert not height or len(shown) < height, (width, height)
        [trouble] = [line for line in shown if "in-trouble" in line]
        assert "parked" in trouble and any("a-job-of-some-length-1 " in line for line in shown)
        assert any("node-8 " in line and "lost" in line for line in shown)
        assert ("node-0,node-1,+2" in trouble) == (width != 70)
        assert any("more jobs" in line for line in shown) == (height in (24, 30))


def test_a_shell_completes_the_names_of_jobs_and_nodes(
    coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.state.add("digits")
    coordinator.state.add("letters")
    program = [sys.executable, "-P", "-m", "moorage.cli.main"]
    for typed, wanted in (
        ("moorage park dig", "digits"),
        ("moorage drain n-", "n-1\nn-2"),
        ("moorage wait x", ""),
        ("moorage move digits --to n-1,", "n-1,n-2"),
        ("moorage events let", "letters"),
    ):
        environment = os.environ | {
            "_MOORAGE_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(typed.count(" ")),
        }
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == wanted, (typed, done)
    assert completing.node_names("n-2") == ["n-2"]
    monkeypatch.setenv("MOORAGE_CONFIG", "/nowhere")
    assert completing.job_names("") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_flags(shell: str) -> None:
    program = [sys.executable, "-P", "-m", "moorage.cli.main"]
    for typed, wanted in (("moorage unc", "uncordon"), ("moorage drain --para", "--parallel")):
        environment = {
            "PATH": "/usr/bin:/bin",
            "_MOORAGE_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(typed.count(" ")),
            "_TYPER_COMPLETE_ARGS": typed,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        assert wanted in done.stdout, (shell, typed, done)


def test_top_is_a_live_view_on_a_terminal_until_ctrl_c(coordinator: FakeCoordinator) -> None:
    coordinator.state.add("looked-at", reason="Job runs.")
    parent, child = pty.openpty()
    line = [sys.executable, "-P", "-m", "moorage.cli.main", "top", "-n", "100ms"]
    process = subprocess.Popen(line, stdin=child, stdout=child, stderr=child, env=os.environ | {"COLUMNS": "160"})
    os.close(child)
    shown = b""
    while b"looked-at" not in shown:
        assert process.poll() is None, shown
        shown += os.read(parent, 65536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal is gone with its last user
        while more := os.read(parent, 65536):
            shown += more
    os.close(parent)
    assert process.wait(timeout=30) == 0 and b"Traceback" not in shown
