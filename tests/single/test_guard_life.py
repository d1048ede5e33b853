"""A pod from its start to its end in the hands of its guard: real runc, no CRIU."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.errors import Conflict, MoorageError
from moorage.worker.journal_frames import Kind
from tests.support.pod_lab import pod_lab, run, shell, until, until_event

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
