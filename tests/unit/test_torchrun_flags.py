"""`moorage torchrun` reads a line as torchrun does."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moorage.cli.rank_files import RankFiles, in_folder, outputs
from moorage.cli.torchrun import _meeting_name, make_spec
from moorage.cli.torchrun_flags import REFUSED, Launch, environment_defaults, parse, parser, processes
from moorage.coordinator.client import torchrun_spec
from moorage.errors import UsageError
from moorage.v1 import types_pb2


def _parse(line: str, **environ: str) -> Launch:
    return parse(line.split(), environ)


@pytest.mark.parametrize(
    "line",
    [
        "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=host:29400 --rdzv-id=7 t.py --lr 0.1",
        "--nnodes 2:2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint host:29400 --rdzv_id 7 t.py --lr 0.1",
    ],
)
def test_flags_are_read_in_both_spellings(line: str) -> None:
    found = _parse(line)
    assert (found.nnodes, found.nproc_per_node, found.master_port, found.run_id) == (2, "4", 29400, "7")
    assert (found.script, found.arguments) == ("t.py", ["--lr", "0.1"])


def test_the_scripts_own_flags_are_never_taken() -> None:
    found = _parse("t.py --nnodes 9 -m --name x -- -d")
    assert found.nnodes == 1 and not found.module and found.options["name"] == ""
    assert found.arguments == ["--nnodes", "9", "-m", "--name", "x", "--", "-d"]


def test_environment_variables_stand_for_flags_that_are_not_given() -> None:
    found = _parse("--nnodes 3 t.py", PET_NNODES="2", PET_NPROC_PER_NODE="5", PET_MAX_RESTARTS="7", PET_STANDALONE="0")
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == (3, "5", 7)


@pytest.mark.parametrize("flag", ["PET_NNODES", "PET_MAX_RESTARTS"])
def test_an_environment_variable_that_cannot_be_is_named(flag: str) -> None:
    with pytest.raises(UsageError, match="many"):
        _parse("t.py", **{flag: "many"})


def test_a_module_a_program_and_a_script_become_the_commands_that_torchrun_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHON_EXEC", "/py")

    def command(line: str) -> list[str]:
        found = _parse(line)
        spec = torchrun_spec(
            found.script, found.arguments, nnodes=found.nnodes, nproc_per_node=int(found.nproc_per_node),
            module=found.module, no_python=found.no_python,
        )  # fmt: skip
        return list(spec.command)

    assert command("t.py a") == ["/py", "-u", "t.py", "a"]
    assert command("-m pkg.train a") == ["/py", "-u", "-m", "pkg.train", "a"]
    assert command("--no-python ./train a") == ["./train", "a"]
    assert command("--run-path t.py a")[:3] == ["/py", "-u", "-c"]


def test_processes_are_counted_as_torchrun_counts_them() -> None:
    assert processes("cpu", 0) == processes("auto", 0) == os.cpu_count()
    assert processes("gpu", 8) == processes("auto", 8) == 8
    assert processes("3", 8) == 3
    assert make_spec(_parse("--nproc-per-node gpu t.py"), gpus=4).ranks_per_pod == 4


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--nnodes 1:4 t.py", "--nnodes 4"),
        ("--nnodes x t.py", "not a number"),
        ("--nnodes 0 t.py", "too small"),
        ("--node-rank 2 --nnodes 2 t.py", "0 to 1"),
        ("--rdzv-conf join_timeout=soon t.py", "join_timeout"),
        ("--rdzv-conf what t.py", "KEY=VALUE"),
        ("--signals-to-handle SIGKILL t.py", "SIGKILL"),
        ("--event-log-handler mine t.py", "console"),
        ("--local-ranks-filter a t.py", "0,1,2"),
        ("--numa-binding moon t.py", "numa"),
        ("--start-method moon t.py", "start-method"),
        ("--standalone --nnodes 2 t.py", "--standalone"),
        ("--rdzv-backend etcd t.py", "etcd is not supported"),
        ("--frobnicate t.py", "frobnicate"),
        ("--max-restarts many t.py", "max-restarts"),
        ("--run-path --module t.py", "--run-path"),
        ("", "script"),
    ],
)
def test_what_cannot_be_is_said_with_the_way_out(line: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        _parse(line)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(("text", "gpus"), [("gpu", 0), ("0", 0), ("xpu", 1), ("some", 1)])
def test_processes_that_cannot_be_are_refused(text: str, gpus: int) -> None:
    with pytest.raises(UsageError, match="--nproc-per-node"):
        processes(text, gpus)


#: What each flag of torchrun does here: a line with it, and what then holds. The parser's own flags must all be here.
HONOURED: dict[str, tuple[str, Callable[[Launch], bool]]] = {
    "nnodes": ("--nnodes 3", lambda found: found.nnodes == 3),
    "nproc_per_node": ("--nproc-per-node 4", lambda found: found.nproc_per_node == "4"),
    "rdzv_backend": ("--rdzv-backend c10d", lambda found: found.nnodes == 1),
    "rdzv_endpoint": ("--nnodes 2 --rdzv-endpoint h:7", lambda found: found.rendezvous.startswith("h:7/")),
    "rdzv_id": ("--nnodes 2 --rdzv-id 9", lambda found: found.run_id == "9"),
    "rdzv_conf": ("--rdzv-conf join_timeout=5,read_timeout=3", lambda found: found.join_seconds == 5),
    "standalone": ("--standalone", lambda found: found.run_id != "none" and not found.rendezvous),
    "max_restarts": ("--max-restarts 2", lambda found: make_spec(found, gpus=0).policy.elastic),
    "monitor_interval": ("--monitor-interval 5", lambda found: True),
    "start_method": ("--start-method fork", lambda found: True),
    "event_log_handler": ("--event-log-handler console", lambda found: found.console_events),
    "role": ("--role trainer", lambda found: make_spec(found, gpus=0).rank_env["ROLE_NAME"] == "trainer"),
    "module": ("-m", lambda found: "-m" in make_spec(found, gpus=0).command),
    "no_python": ("--no-python", lambda found: make_spec(found, gpus=0).command[0] == "t.py"),
    "run_path": ("--run-path", lambda found: "runpy" in make_spec(found, gpus=0).command[3]),
    "log_dir": ("--log-dir logs", lambda found: found.log_dir == "logs"),
    "redirects": ("-r 3", lambda found: found.redirects == "3"),
    "tee": ("--tee 0:1", lambda found: found.tee == "0:1"),
    "local_ranks_filter": ("--local-ranks-filter 0,2", lambda found: found.local_ranks_filter == [0, 2]),
    "duplicate_stdout_filters": ("--duplicate-stdout-filters a,b,,c", lambda found: found.filters[0] == ["a", "b,c"]),
    "duplicate_stderr_filters": ("--duplicate_stderr_filters a", lambda found: found.filters[1] == ["a"]),
    "node_rank": ("--nnodes 2 --node-rank 1", lambda found: found.node_rank == 1),
    "master_addr": ("--nnodes 2 --master-addr h", lambda found: found.rendezvous == "h:29500/none"),
    "master_port": ("--master-port 7", lambda found: make_spec(found, gpus=0).master_port == 7),
    "local_addr": ("--local-addr h", lambda found: True),
    "logs_specs": ("--logs-specs mine", lambda found: found.logs_specs == "mine"),
    "numa_binding": ("--numa-binding node", lambda found: "torch.numa" in make_spec(found, gpus=0).command[2]),
    "signals_to_handle": ("--signals-to-handle SIGUSR1", lambda found: found.signals == [signal.SIGUSR1]),
    "shutdown_timeout": ("--shutdown-timeout 5", lambda found: found.shutdown_seconds == 5),
    "virtual_local_rank": (
        "--virtual-local-rank",
        lambda found: make_spec(found, gpus=2).rank_env["CUDA_VISIBLE_DEVICES"] == "${local_rank}",
    ),
}


@pytest.mark.torch
def test_every_flag_of_the_installed_torchrun_is_honoured() -> None:
    from torch.distributed.run import get_args_parser

    mine = {name for action in parser()._actions for name in action.option_strings}
    for action in get_args_parser()._actions:
        if action.dest in ("help", "training_script", "training_script_args"):
            continue
        assert action.dest in HONOURED, f"{action.option_strings}: neither honoured nor refused with a reason"
        assert set(action.option_strings) <= mine, action.option_strings


#: Values that a flag takes, where 3 is none.
_VALUES = {
    "start_method": "fork",
    "rdzv_backend": "c10d",
    "nnodes": "3",
    "event_log_handler": "console",
    "numa_binding": "node",
    "rdzv_conf": "join_timeout=5",
}


@pytest.mark.torch
@pytest.mark.parametrize("flag", HONOURED)
def test_a_variable_is_read_where_torchrun_reads_it(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    switch = next(action for action in parser()._actions if action.dest == flag).nargs == 0
    value = "1" if switch else _VALUES.get(flag, "3")
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    plain = getattr(get_args_parser().parse_args(["t.py"]), flag)
    monkeypatch.setenv(f"PET_{flag.upper()}", value)
    theirs = getattr(get_args_parser().parse_args(["t.py"]), flag)
    mine = parser()
    environment_defaults(mine, os.environ)
    found = getattr(mine.parse_args(["t.py"]), flag)
    theirs = ",".join(theirs) if isinstance(theirs, list) else theirs
    if theirs == plain:  # torchrun reads none
        assert str(found) != value or str(plain) == value, (plain, found)
    else:
        assert str(found) == str(theirs) or bool(found) is bool(theirs) is switch, (theirs, found)


@pytest.mark.parametrize("flag", HONOURED)
def test_a_flag_does_what_it_is_for(flag: str) -> None:
    line, holds = HONOURED[flag]
    assert holds(_parse(f"{line} t.py"))


def test_only_three_things_are_refused_each_with_a_reason() -> None:
    assert len(REFUSED) == 3 and all(REFUSED.values())


def test_lines_of_several_nodes_meet_in_one_job() -> None:
    first = _parse("--nnodes 2 --node-rank 0 --master-addr h --master-port 7 t.py")
    second = _parse("--nnodes 2 --node-rank 1 --master-addr h --master-port 7 t.py")
    assert _meeting_name(first) == _meeting_name(second) != ""
    other = _parse("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:7 --rdzv-id 3 t.py")
    assert _meeting_name(other) not in ("", _meeting_name(first))
    assert _meeting_name(_parse("--nnodes 2 t.py")) == _meeting_name(_parse("t.py")) == ""
    on_one_machine = [_parse(f"--nnodes 2 --node-rank {n} --master-addr 127.0.0.1 t.py") for n in (0, 1)]
    assert len({_meeting_name(line) for line in on_one_machine} - {""}) == 1
    assert socket.gethostname() in on_one_machine[0].rendezvous  # another machine's 127.0.0.1 is another place
    assert make_spec(_parse("--nnodes 2 --name mine --rdzv-endpoint h:7 t.py"), gpus=0).name == "mine"


def test_outputs_go_to_files_to_the_terminal_or_to_both(tmp_path: Path) -> None:
    where = in_folder(tmp_path, pods=2, per_pod=1, redirects={0: 1}, tee={0: 2})
    files = RankFiles(where, filters=(["needle"], []), filtered=(str(tmp_path / "filtered"), ""))
    files.write(1, False, b"hay\nneed")
    files.write(1, False, b"le\n")
    files.write(1, True, b"error\n")
    files.close()
    assert (files.shown(1, False), files.shown(1, True)) == (False, True)
    assert (tmp_path / "1" / "stdout.log").read_text() == "hay\nneedle\n"
    assert (tmp_path / "1" / "stderr.log").read_text() == "error\n"
    assert (tmp_path / "filtered").read_text() == "needle\n"


def test_outputs_are_chosen_for_all_ranks_or_for_each() -> None:
    assert outputs("3", 2, "--tee") == {0: 3, 1: 3}
    assert outputs("0:1,1:2", 3, "--tee") == {0: 1, 1: 2, 2: 0}
    with pytest.raises(UsageError, match="--tee"):
        outputs("4", 2, "--tee")


@pytest.mark.parametrize(
    ("given", "restarts", "on_failure"),
    [
        (None, 0, types_pb2.ON_FAILURE_RESTORE),  # on the wire, 0 is no limit
        (0, 0, types_pb2.ON_FAILURE_FAIL),
        (2, 2, types_pb2.ON_FAILURE_RESTORE),
    ],
)
def test_no_restarts_and_no_limit_on_restarts_are_two_things(given: int | None, restarts: int, on_failure: int) -> None:
    line = "t.py" if given is None else f"--max-restarts {given} t.py"
    policy = torchrun_spec("t.py", max_restarts=_parse(line).max_restarts).policy
    assert (policy.max_restarts, policy.on_failure) == (restarts, on_failure)


def test_fewer_than_no_restarts_are_refused() -> None:
    with pytest.raises(UsageError, match="--max-restarts"):
        torchrun_spec("t.py", max_restarts=-1)
