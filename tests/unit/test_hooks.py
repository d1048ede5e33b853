"""`moorage.hooks`: callbacks from the file of events, once for each line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage import hooks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "listeners").mkdir()
    (tmp_path / "events").write_text("")
    monkeypatch.setenv(hooks.EVENTS_FILE, str(tmp_path / "events"))
    monkeypatch.setenv(hooks.ENVIRONMENT_FILE, str(tmp_path / "environment"))
    monkeypatch.setattr(hooks, "_listener", hooks._Listener())
    yield tmp_path


def write(folder: Path, *lines: str) -> None:
    (folder / "events").write_text("".join(f"{line}\n" for line in lines))


def test_each_line_is_one_call_in_order(folder: Path) -> None:
    write(folder, "1 before-checkpoint 1 {}", "2 after-checkpoint 1 {}")
    heard: list[tuple[int, str, int]] = []
    for kind in hooks.KINDS:
        hooks.on(kind, lambda event: heard.append((event.number, event.kind, event.id)), thread=False)
    assert hooks.poll() == 0  # what was before it listened does not count
    write(folder, "2 after-checkpoint 1 {}", '3 before-checkpoint 2 {"then": "stop"}', "4 before-restore 5 {}", "half")
    assert (hooks.poll(), hooks.poll()) == (2, 0)
    assert heard == [(3, "before-checkpoint", 2), (4, "before-restore", 5)]
    assert (folder / "listeners" / str(os.getpid())).read_text() == "4\n"


def test_a_callback_that_fails_is_told_of_and_not_called_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(event: hooks.Event) -> None:
        raise RuntimeError("no")

    heard: list[int] = []
    hooks.on("after-restore", fail, thread=False)
    hooks.on("after-restore", lambda event: heard.append(event.id), thread=False)
    write(folder, "1 after-restore 2 {}")
    assert (hooks.poll(), hooks.poll(), heard) == (1, 0, [2])
    assert "callback for after-restore 2 failed" in capsys.readouterr().err


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(ValueError, match="before-checkpoint"):
        hooks.on("midnight", print)


def test_the_environment_file(folder: Path) -> None:
    assert (hooks.environment(), hooks.incarnation()) == ({}, 0)
    (folder / "environment").write_text("MOORAGE_INCARNATION=7\nMOORAGE_CHECKPOINT=\nMOORAGE_JOB_NAME=a=b\n")
    assert hooks.incarnation() == 7
    assert hooks.environment()["MOORAGE_JOB_NAME"] == "a=b" and hooks.environment()["MOORAGE_CHECKPOINT"] == ""


def test_it_is_light_to_import() -> None:
    code = (
        "import sys; from moorage import hooks; print(*(m for m in ('grpc', 'msgspec', 'asyncio') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_child_has_none_of_its_parent_s_callbacks(folder: Path) -> None:
    hooks.on("after-restore", lambda event: None, thread=False)
    pid = os.fork()
    if pid == 0:
        os._exit(1 if any(hooks._listener.callbacks.values()) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
