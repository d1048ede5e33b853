"""Which NCCL libraries a job could open."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from moorage.worker.nccl import libraries


def _file(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("nccl")
    return str(path)


def _found(root: Path, paths: list[str], **environment: str) -> set[str]:
    return {path for path in libraries.find(paths, environment, root=Path("/")) if path.startswith(str(root))}


def test_of_python_packages_variables_and_their_links(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.12/site-packages"
    wheel = _file(site / "nvidia/nccl/lib/libnccl.so.2")
    cupy = _file(site / "cupy/.data/lib/libnccl.so.2.27.3")
    _file(site / "nvidia/nccl/lib/libnccl_device.bc")
    own = _file(tmp_path / "own/libnccl.so.2.1")
    (tmp_path / "own/libnccl.so.2").symlink_to("libnccl.so.2.1")
    (tmp_path / "own/libnccl.so.2.9").symlink_to(_file(tmp_path / "something"))
    engine = _file(tmp_path / "engine/libnccl-tuned.so")
    other = _file(tmp_path / "more/nvidia/cu13/lib/libnccl.so.2")
    python = str(tmp_path / "venv/bin/python")
    assert _found(tmp_path, [python]) == {wheel, cupy}
    assert _found(tmp_path, [], VIRTUAL_ENV=str(tmp_path / "venv")) == {wheel, cupy}
    assert _found(tmp_path, [], LD_LIBRARY_PATH=f"relative::{tmp_path}/own:{tmp_path}/none") == {own}
    assert _found(tmp_path, [], VLLM_NCCL_SO_PATH=engine, LD_PRELOAD="/no/such/libnccl.so.2 other.so") == {engine}
    assert _found(tmp_path, [], PYTHONPATH=f"{tmp_path}/more") == {other}


def test_in_an_image(tmp_path: Path) -> None:
    root = tmp_path / "image"
    _file(root / "usr/lib/python3/dist-packages/none")
    _file(root / "usr/local/lib/python3.11/dist-packages/nvidia/nccl/lib/libnccl.so.2")
    outside = _file(tmp_path / "libnccl.so.2")
    (root / "opt").mkdir()
    (root / "opt/libnccl.so.2").symlink_to(outside)
    found = libraries.find(["/usr/bin/python3"], {"LD_LIBRARY_PATH": "/opt"}, root=root)
    assert found == ["/usr/local/lib/python3.11/dist-packages/nvidia/nccl/lib/libnccl.so.2"]


def test_who_has_mapped_one_that_nobody_stands_over(tmp_path: Path) -> None:
    covered, real, late = (_file(tmp_path / folder / "libnccl.so.2") for folder in ("known", "real", "late"))
    maps = []
    for path in (covered, real, late):
        with Path(path).open() as file:
            maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    own = os.getpid()
    found = libraries.uncovered([own, 1 << 30], [covered], real=f"{tmp_path}/real")
    assert [entry for entry in found if entry[1].startswith(str(tmp_path))] == [(own, late)]
    for mapped in maps:
        mapped.close()
