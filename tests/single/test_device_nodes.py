"""A pod with the device nodes of one GPU comes back where it has another: no driver is needed for that."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from moorage.worker import device_nodes
from moorage.worker.sandbox.oci import DeviceRule
from tests.support.pod_lab import pod_lab, run, shell, until

pytestmark = pytest.mark.root

LOOK = "while :; do echo $(cd /dev && ls -l nvidia* | tr -s ' ' | cut -d ' ' -f 1,5,6,10); sleep 0.05; done"
ZERO, ONE = "crw-rw-rw- 195, 0 nvidia0", "crw-rw-rw- 195, 1 nvidia1"


def gpu(minor: int) -> DeviceRule:
    return DeviceRule(kind="c", major=195, minor=minor, node=f"/dev/nvidia{minor}")


def test_a_pod_with_one_gpu_comes_back_with_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with pod_lab(tmp_path) as lab:
            lab.lay(shell(LOOK))
            lab.bundle(devices=[gpu(0)])
            guard = await lab.guard()
            await guard.start()
            await until(lambda: lab.text().count("\n") > 3)
            assert set(lab.text().splitlines()) == {ZERO}
            await guard.freeze("checkpoint")
            await guard.checkpoint(lab.folder / "images", work=lab.folder / "criu")
            again = lab.successor()
            await guard.kill()
            again.bundle(devices=[gpu(1)])
            second = await again.guard(incarnation=2)
            await second.restore(lab.folder / "images", work=again.folder / "criu")
            device_nodes.lay(Path("/proc", str(again.procs()[0]), "root", "dev"), {"nvidia1": os.makedev(195, 1)})
            await second.thaw("released")
            await until(lambda: ONE in again.text().splitlines()[-1:])

    run(test)


def test_nodes_that_are_right_stay_and_only_those_of_the_driver_go(tmp_path: Path) -> None:
    os.mknod(tmp_path / "nvidia0", stat.S_IFCHR | 0o600, os.makedev(195, 0))
    os.mknod(tmp_path / "nvidia2", stat.S_IFCHR | 0o600, os.makedev(195, 3))
    (tmp_path / "nvidia7").symlink_to("/dev/null")
    os.mknod(tmp_path / "nvidia-uvm", stat.S_IFCHR | 0o600, os.makedev(511, 0))  # numbered by each kernel anew
    for name in ("nvidia-modeset", "null"):
        (tmp_path / name).touch()
    before = (tmp_path / "nvidia0").stat().st_ino
    wanted = {"nvidia0": os.makedev(195, 0), "nvidia2": os.makedev(195, 2), "nvidia-uvm": os.makedev(509, 0)}
    device_nodes.lay(tmp_path, wanted)
    assert {path.name for path in tmp_path.iterdir()} == {"null", "nvidia-modeset", *wanted}
    assert os.major((tmp_path / "nvidia-uvm").stat().st_rdev) == 509
    assert (tmp_path / "nvidia0").stat().st_ino == before
    assert os.minor((tmp_path / "nvidia2").stat().st_rdev) == 2
    assert stat.S_IMODE((tmp_path / "nvidia2").stat().st_mode) == 0o666
