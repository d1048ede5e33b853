"""What a runc that was killed in the middle of a restore leaves behind does no harm."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from moorage.worker.sandbox.runc import Runc

pytestmark = pytest.mark.root


def test_deleting_a_half_restored_container_keeps_its_root_file_system(tmp_path: Path) -> None:
    runc = Runc.installed(root=tmp_path / "run c", log=tmp_path / "runc.log")
    pod = tmp_path / "pod"
    (pod / "etc").mkdir(parents=True)
    (pod / "etc" / "passwd").write_text("root")
    restore_root = runc.root / "half" / "criu-root"
    restore_root.mkdir(parents=True)
    for _ in range(2):
        subprocess.run(["mount", "--rbind", str(pod), str(restore_root)], check=True)
    try:
        asyncio.run(runc.delete("half", force=True))
        assert (pod / "etc" / "passwd").read_text() == "root"
        assert not (runc.root / "half").exists()
        assert "criu-root" not in Path("/proc/self/mountinfo").read_text().partition(str(tmp_path))[2]
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", str(restore_root)], check=False, capture_output=True)
