"""What a job mounts, bound where runc finds it, and never removed with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.dev import sweep
from moorage.v1.types_pb2 import JobSpec, Mount
from moorage.worker import pod_user
from moorage.worker.pod_user import Opened, User

pytestmark = pytest.mark.root

ROOT = User(0, 0, (0,), "root", "/root")


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "set").write_text("precious")
    (tmp_path / "file").write_text("one")
    return JobSpec(mounts=[Mount(source=str(tmp_path / name), destination=f"/{name}") for name in ("data", "file")])


def test_mounts_are_bound_for_as_long_as_a_pod_is_brought_up(tmp_path: Path, spec: JobSpec) -> None:
    opened = Opened(spec, ROOT)
    data, file = opened.bind(tmp_path / "sources" / "pod")
    (tmp_path / "data").rename(tmp_path / "elsewhere")  # the name does not count any more
    assert (data / "set").read_text() == "precious" and file.read_text() == "one"
    opened.close()
    opened.close()
    assert not sweep.mounts_below(tmp_path) and not (tmp_path / "sources" / "pod").exists()
    assert (tmp_path / "elsewhere" / "set").read_text() == "precious"


def test_what_a_dead_worker_left_bound_is_unbound_and_not_removed(tmp_path: Path, spec: JobSpec) -> None:
    opened = Opened(spec, ROOT)
    opened.bind(tmp_path / "sources" / "pod")
    (tmp_path / "sources" / "pod" / "odd").mkdir()
    (tmp_path / "sources" / "pod" / "odd" / "kept").touch()
    pod_user.sweep(tmp_path / "sources")
    assert not sweep.mounts_below(tmp_path)
    assert [path.name for path in (tmp_path / "sources" / "pod").iterdir()] == ["odd"]
    assert (tmp_path / "data" / "set").read_text() == "precious" and (tmp_path / "file").read_text() == "one"
    opened.close()
