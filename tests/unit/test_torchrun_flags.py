"""`moorage torchrun` reads a line as torchrun does."""

from __future__ import annotations

import os

import pytest

from moorage.cli.follow import outputs
from moorage.cli.torchrun_flags import Launch, parse
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
    assert (found.nnodes, found.nproc_per_node, found.master_port, found.run_id) == (2, 4, 29400, "7")
    assert (found.script, found.arguments) == ("t.py", ["--lr", "0.1"])


def test_the_scripts_own_flags_are_never_taken() -> None:
    found = _parse("t.py --nnodes 9 -m --name x -- -d")
    assert found.nnodes == 1 and not found.module and found.options["name"] == ""
    assert found.arguments == ["--nnodes", "9", "-m", "--name", "x", "--", "-d"]


def test_environment_variables_stand_for_flags_that_are_not_given() -> None:
    found = _parse("--nnodes 3 t.py", PET_NNODES="2", PET_NPROC_PER_NODE="5", PET_MAX_RESTARTS="7", PET_STANDALONE="0")
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == (3, 5, 7)


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
            found.script, found.arguments, nnodes=found.nnodes, nproc_per_node=found.nproc_per_node,
            module=found.module, no_python=found.no_python,
        )  # fmt: skip
        return list(spec.command)

    assert command("t.py a") == ["/py", "-u", "t.py", "a"]
    assert command("-m pkg.train a") == ["/py", "-u", "-m", "pkg.train", "a"]
    assert command("--no-python ./train a") == ["./train", "a"]
    assert command("--run-path t.py a")[:3] == ["/py", "-u", "-c"]


def test_processes_are_counted_as_torchrun_counts_them() -> None:
    assert _parse("--nproc-per-node cpu t.py").nproc_per_node == os.cpu_count()
    assert _parse("--nproc-per-node auto t.py").nproc_per_node == os.cpu_count()
    assert _parse("--nproc-per-node gpu --gpus-per-pod 8 t.py").nproc_per_node == 8
    assert _parse("--nproc-per-node auto --gpus-per-pod 8 t.py").nproc_per_node == 8


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--nnodes 1:4 t.py", "--nnodes 4"),
        ("--nnodes x t.py", "not a number"),
        ("--nnodes 0 t.py", "too small"),
        ("--nproc-per-node gpu t.py", "--gpus-per-pod"),
        ("--nproc-per-node 0 t.py", "not a number"),
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
