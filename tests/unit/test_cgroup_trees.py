"""Cgroups of hosts that this machine is not: version 2 with systemd, version 1 without, and both at once. The trees are
files; what the kernel would do to them, the test does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moorage.errors import EnvironmentLacking, MoorageError
from moorage.worker.sandbox.cgroup import PodCgroup, parse_mounts

ROOT = "25 30 0:23 / /sys rw shared:7 - sysfs sysfs rw\n"
#: Debian 12 and 13, Ubuntu 24.04.
SYSTEMD = ROOT + "28 25 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
#: A container's machine without systemd.
VERSION_1 = ROOT + "".join(
    f"{n} 25 0:{n} / /sys/fs/cgroup/{name} rw shared:{n} - cgroup cgroup rw,{options}\n"
    for n, (name, options) in enumerate(
        [("freezer", "freezer"), ("cpu,cpuacct", "cpu,cpuacct"), ("memory", "memory"), ("devices", "devices")], 40
    )
)
#: systemd with both, as older releases start it.
HYBRID = VERSION_1 + "60 25 0:60 / /sys/fs/cgroup/unified rw shared:60 - cgroup2 cgroup2 rw\n"
#: A container's own view beside the host's, which is mounted elsewhere.
ELSEWHERE = SYSTEMD + "70 25 0:26 / /host/sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def test_hierarchies_are_found_on_each_kind_of_host() -> None:
    assert parse_mounts(SYSTEMD) == {"": Path("/sys/fs/cgroup")}
    assert parse_mounts(ELSEWHERE) == {"": Path("/sys/fs/cgroup")}
    assert parse_mounts(VERSION_1)["freezer"] == Path("/sys/fs/cgroup/freezer")
    assert parse_mounts(VERSION_1)["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert parse_mounts(HYBRID)[""] == Path("/sys/fs/cgroup/unified")


def test_version_2_is_used_where_it_is_alone_and_version_1_where_both_are() -> None:
    assert PodCgroup("/m/n/p", mounts=parse_mounts(SYSTEMD)).unified
    assert not PodCgroup("/m/n/p", mounts=parse_mounts(VERSION_1)).unified
    assert not PodCgroup("/m/n/p", mounts=parse_mounts(HYBRID)).unified
    with pytest.raises(EnvironmentLacking, match="no cgroup freezer"):
        PodCgroup("/m/n/p", mounts=parse_mounts(ROOT))


def tree(top: Path, version: int) -> PodCgroup:
    """A pod's cgroup in a tree of files."""
    mounts = {"": top} if version == 2 else {"freezer": top / "freezer", "cpuacct": top / "cpuacct"}
    group = PodCgroup("/moorage-c/n/j-1-0", mounts=mounts)
    group.folder.mkdir(parents=True)
    (group.folder / "cgroup.procs").write_text("")
    if version == 2:
        (group.folder / "cgroup.freeze").write_text("0\n")
        (group.folder / "cgroup.events").write_text("populated 1\nfrozen 0\n")
        (group.folder / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    else:
        (group.folder / "freezer.state").write_text("THAWED\n")
        usage = top / "cpuacct" / "moorage-c/n/j-1-0"
        usage.mkdir(parents=True)
        (usage / "cpuacct.usage").write_text("1500000000\n")
    return group


def let_kernel(group: PodCgroup, *, frozen: bool) -> None:
    """What the kernel writes once every process stands, or goes on."""
    if group.unified:
        (group.folder / "cgroup.events").write_text(f"populated 1\nfrozen {int(frozen)}\n")
    else:
        (group.folder / "freezer.state").write_text("FROZEN\n" if frozen else "THAWED\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_freeze_waits_until_every_process_stands(tmp_path: Path, version: int) -> None:
    group = tree(tmp_path, version)
    assert group.state() == "thawed"
    assert group.cpu_seconds() == pytest.approx(1.5)

    async def main() -> None:
        freezing = asyncio.create_task(group.freeze())
        switch = group.folder / ("cgroup.freeze" if version == 2 else "freezer.state")
        await asyncio.sleep(0)
        assert switch.read_text().strip() in ("1", "FROZEN")
        if version == 2:
            assert group.state() == "freezing"
            assert not freezing.done()
        let_kernel(group, frozen=True)
        await freezing
        assert group.state() == "frozen"
        thawing = asyncio.create_task(group.thaw())
        await asyncio.sleep(0)
        let_kernel(group, frozen=False)
        await thawing
        assert group.state() == "thawed"

    asyncio.run(main())


def test_what_does_not_freeze_in_time_is_an_error_on_version_2(tmp_path: Path) -> None:
    group = tree(tmp_path, 2)
    with pytest.raises(MoorageError, match="cannot be frozen"):
        asyncio.run(group.freeze(seconds=0.05))


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_that_is_gone_is_no_error(tmp_path: Path, version: int) -> None:
    mounts = {"": tmp_path} if version == 2 else {"freezer": tmp_path}
    group = PodCgroup("/gone", mounts=mounts)
    assert group.state() == "absent"
    assert group.processes() == []
    assert group.cpu_seconds() == 0
    asyncio.run(group.freeze())
    asyncio.run(group.kill(1.0))
