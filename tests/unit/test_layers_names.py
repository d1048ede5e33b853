"""Names of files by their device and inode number."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.worker.layers.layer import Layer
from moorage.worker.layers.names import names_of


@pytest.mark.parametrize(("mountpoint", "expected"), [("/", "/tmp/folder/file"), ("/data", "/data/tmp/folder/file")])
@pytest.mark.parametrize("written", [True, False], ids=["written by the pod", "seen by the pod"])
def test_a_name_has_one_slash_in_front(tmp_path: Path, mountpoint: str, expected: str, written: bool) -> None:
    layer = Layer("root", mountpoint, tmp_path / "lower", tmp_path / "layer")
    shown = layer.merged / "tmp" / "folder" / "file"
    shown.parent.mkdir(parents=True)
    shown.touch()
    (layer.upper / "tmp" / "folder").mkdir(parents=True)
    if written:
        (layer.upper / "tmp" / "folder" / "file").touch()
    status = shown.stat()
    identity = (status.st_dev, status.st_ino)
    assert names_of([layer], [identity], deep=True) == {identity: expected}
