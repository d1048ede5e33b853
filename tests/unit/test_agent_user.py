from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.errors import Forbidden, MoorageError, UsageError
from moorage.v1.types_pb2 import JobSpec, Mount
from moorage.worker.layers import PodLayers
from moorage.worker.layers.owner import Owner, acting_as
from moorage.worker.pod_user import command_paths, resolve


def test_the_user_is_the_one_asked_for_else_the_owner() -> None:
    assert resolve(JobSpec(owner="user:root", as_root=True))[:2] == (0, 0)
    assert resolve(JobSpec(owner="user:nobody-knows", user="root", as_root=True)).home == "/root"
    assert resolve(JobSpec(owner="x", user="0", as_root=True)).name == "root"
    groups = resolve(JobSpec(user="0", as_root=True)).groups
    assert resolve(JobSpec(owner="x", user="0:7", as_root=True))[:3] == (0, 7, (7, *groups))


@pytest.mark.parametrize("spec", [JobSpec(owner="user:root"), JobSpec(owner="x", user="0"), JobSpec(user="0:7")])
def test_nothing_runs_as_root_unless_its_owners_role_allows_it(spec: JobSpec) -> None:
    with pytest.raises(Forbidden, match="may not run as root"):
        resolve(spec)


def test_a_number_without_an_account_is_taken_as_it_is() -> None:
    user = resolve(JobSpec(user="4123456:4123457"))
    assert (user.uid, user.gid, user.groups) == (4123456, 4123457, (4123457,))
    assert user.environment() == {"HOME": "/", "USER": "4123456", "LOGNAME": "4123456"}


@pytest.mark.parametrize(
    "spec", [JobSpec(user="nobody-knows"), JobSpec(owner="user:nobody-knows"), JobSpec(user="a:b")]
)
def test_an_account_that_does_not_exist_is_named(spec: JobSpec) -> None:
    with pytest.raises(UsageError, match="does not exist on this node"):
        resolve(spec)


def test_a_command_is_found_in_the_jobs_path_with_what_it_links_to(tmp_path: Path) -> None:
    tool = tmp_path / "real" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").symlink_to(tool)
    spec = JobSpec(command=["tool"], env={"PATH": str(tmp_path / "bin")})
    assert command_paths(spec) == [str(tmp_path / "bin" / "tool"), str(tool)]
    relative = JobSpec(command=["./tool"], working_directory=str(tmp_path / "real"))
    assert command_paths(relative)[0] == str(tool)


def test_the_prefix_of_a_virtual_environment_belongs_to_the_command(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    assert str(tmp_path / "venv") in command_paths(JobSpec(command=[str(python)]))


@pytest.mark.parametrize("command", [["no-such-command"], ["/no/such/command"], ["./no-such-command"]])
def test_a_command_that_does_not_exist_is_named(command: list[str]) -> None:
    with pytest.raises(UsageError, match=f"command {command[0]} does not exist on this node"):
        command_paths(JobSpec(command=command))


def test_a_command_that_cannot_be_executed_is_said_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with pytest.raises(UsageError, match=r"\./plain is not executable"):
        command_paths(JobSpec(command=["./plain"], working_directory=str(tmp_path)))
    with pytest.raises(UsageError, match="/tmp is a folder"):
        command_paths(JobSpec(command=["/tmp"]))


def test_a_job_without_a_command_is_refused() -> None:
    with pytest.raises(UsageError, match="has no command"):
        command_paths(JobSpec(name="x"))


def test_a_command_is_looked_for_in_the_image(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "inside").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "inside").chmod(0o755)
    assert command_paths(JobSpec(command=["inside"], image=str(tmp_path))) == ["/bin/inside"]
    with pytest.raises(UsageError, match="does not exist in image"):
        command_paths(JobSpec(command=["elsewhere"], image=str(tmp_path)))


def test_a_command_is_looked_for_in_what_is_mounted(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    (tools / "bin").mkdir(parents=True)
    for name, mode in (("tool", 0o755), ("plain", 0o644)):
        (tools / "bin" / name).write_text("#!/bin/sh\n")
        (tools / "bin" / name).chmod(mode)
    (tools / "link").symlink_to("/p/bin/tool")  # leads nowhere on this host
    mounts = [Mount(source=str(tools), destination="/p"), Mount(source=str(tools / "bin" / "tool"), destination="/t/x")]

    def paths(*command: str, **more: Any) -> list[str]:
        return command_paths(JobSpec(command=command, mounts=mounts, **more))

    assert paths("/p/bin/tool") == ["/p/bin/tool"]
    assert paths("/p/link") == ["/p/link"]
    assert paths("/t/x") == ["/t/x"]
    assert paths("bin/tool", working_directory="/p") == ["/p/bin/tool"]
    assert paths("tool", env={"PATH": "/nowhere:/p/bin"}) == ["/p/bin/tool"]
    assert paths("/p/bin/tool", image=str(tools)) == ["/p/bin/tool"]
    with pytest.raises(UsageError, match=r"command /p/other does not exist in .*/tools \(which is mounted at /p\)"):
        paths("/p/other")
    with pytest.raises(UsageError, match="command /p/bin/plain is not executable"):
        paths("/p/bin/plain")


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own lie where only root may."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.root
def test_no_answer_tells_a_user_what_lies_where_he_may_not_look(reachable: Path) -> None:
    closed = reachable / "closed"
    closed.mkdir()
    for name in ("plain", "tool"):
        (closed / name).touch()
    (closed / "tool").chmod(0o755)
    (closed / "folder").mkdir()
    closed.chmod(0o700)
    (reachable / "link").symlink_to(closed / "plain")
    (reachable / "private").touch(0o644)
    nobody = Owner(4123456, 4123456)

    def said(*command: str, **more: Any) -> str:
        with pytest.raises(MoorageError) as refused, acting_as(nobody):
            command_paths(JobSpec(command=command, **more))
        return refused.value.message.replace(command[0], "IT")

    closed_ones = [str(closed / name) for name in ("plain", "tool", "folder", "nothing", "plain/x")]
    assert {said(name) for name in [*closed_ones, str(reachable / "link")]} == {
        "the job's user may not reach IT on this node"
    }
    assert said(str(reachable / "private")) == "command IT is not executable"
    assert said(str(reachable / "nothing")) == "command IT does not exist on this node"
    path = {"PATH": str(closed)}
    assert {said(name, env=path) for name in ("plain", "tool", "nothing")} == {"command IT does not exist on this node"}

    def planned(folder: Path) -> str:
        with pytest.raises(MoorageError) as refused:
            PodLayers.plan(reachable / "pod", image=None, working_directory=str(folder), owner=nobody)
        return refused.value.message.replace(str(folder), "IT")

    assert {planned(closed / name) for name in ("plain", "folder", "nothing")} == {
        "the job's user may not reach the working directory IT on this node"
    }
    assert planned(reachable / "nothing") == "the working directory IT does not exist on this node"
    assert command_paths(JobSpec(command=[str(closed / "tool")])) == [str(closed / "tool")]  # root again
