"""The OCI configuration, the init's file, limits and cgroup mounts: plain data in, plain data out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moorage.errors import UsageError
from moorage.worker.sandbox import criu, limits, oci, podinit
from moorage.worker.sandbox.cgroup import PodCgroup, parse_mounts
from moorage.worker.sandbox.oci import Bind, DeviceRule, PodConfig

V1 = {
    "freezer": Path("/sys/fs/cgroup/freezer"),
    "cpuacct": Path("/sys/fs/cgroup/cpu,cpuacct"),
    "": Path("/sys/fs/cgroup/unified"),
}
V2 = {"": Path("/sys/fs/cgroup")}


def config(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "root": Path("/state/merged"), "netns": Path("/run/netns/p0"), "hostname": "job-0", "cgroup": "/moorage/c/p0",
        "argv": podinit.argv(), "criu_config": Path("/state/criu.conf"),
    }  # fmt: skip
    return oci.build(PodConfig(**(fields | changes)))


def test_namespaces_are_the_pods_own_and_the_network_is_given() -> None:
    assert config()["linux"]["namespaces"] == [
        *({"type": kind} for kind in ("pid", "mount", "ipc", "uts", "time")),
        {"type": "network", "path": "/run/netns/p0"},
    ]
    assert {"type": "time"} not in config(time_namespace=False)["linux"]["namespaces"]


def test_criu_reads_the_pods_own_options() -> None:
    assert config(annotations={"a": "b"})["annotations"] == {"a": "b", "org.criu.config": "/state/criu.conf"}


def test_io_uring_does_not_exist_in_a_pod() -> None:
    (rule,) = config()["linux"]["seccomp"]["syscalls"]
    assert set(rule["names"]) == {"io_uring_setup", "io_uring_enter", "io_uring_register"}
    assert (rule["action"], rule["errnoRet"]) == ("SCMP_ACT_ERRNO", 38)


@pytest.mark.parametrize("uid", [0, 1000])
def test_rights_follow_the_owner(uid: int) -> None:
    process = config(uid=uid)["process"]
    effective = set(process["capabilities"]["effective"])
    assert process["noNewPrivileges"] == (uid != 0)
    assert ("CAP_NET_RAW" in effective) == (uid == 0)
    assert {"CAP_SETUID", "CAP_SETGID", "CAP_KILL"} <= effective
    assert not effective & {"CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_SYS_MODULE", "CAP_SYS_PTRACE"}
    assert "inheritable" not in process["capabilities"]
    assert "ambient" not in process["capabilities"]


def test_a_process_of_exec_has_the_rights_of_a_rank() -> None:
    root = oci.build_exec(["sh"], env={"A": "b"}, cwd="/", uid=0, gid=0)
    other = oci.build_exec(["sh"], env={}, cwd="/w", uid=7, gid=8, groups=[9])
    assert root["capabilities"]["effective"] == list(oci.ROOT_CAPABILITIES)
    assert other["capabilities"]["effective"] == []
    assert other["user"] == {"uid": 7, "gid": 8, "additionalGids": [9]}
    assert other["noNewPrivileges"]
    assert root["env"] == ["A=b"]


def test_mounts_come_in_an_order_in_which_none_hides_another() -> None:
    binds = [
        Bind(source=Path("/x"), destination="/data/deep/er"),
        Bind(source=Path("/dev/nvidia0"), destination="/dev/nvidia0", device=True),
        Bind(source=Path("/y"), destination="/data", read_only=True),
    ]
    mounts = config(binds=binds, shm_bytes=1 << 20)["linux"] and config(binds=binds, shm_bytes=1 << 20)["mounts"]
    order = [mount["destination"] for mount in mounts]
    assert order.index("/data") < order.index("/data/deep/er")
    assert order.index("/dev") < order.index("/dev/nvidia0")
    by_place = {mount["destination"]: mount for mount in mounts}
    assert "ro" in by_place["/data"]["options"]
    assert by_place["/dev/nvidia0"]["options"][0] == "bind"
    assert f"size={1 << 20}" in by_place["/dev/shm"]["options"]
    assert "ro" in by_place["/sys"]["options"]
    assert "newinstance" in by_place["/dev/pts"]["options"]
    assert "/tmp" not in by_place


def test_resources_are_limited_only_when_asked() -> None:
    assert set(config()["linux"]["resources"]) == {"devices"}
    resources = config(cpus=1.5, memory_bytes=1 << 30, pids=100)["linux"]["resources"]
    assert resources["cpu"] == {"period": 100_000, "quota": 150_000}
    assert resources["memory"] == {"limit": 1 << 30, "swap": 1 << 30}
    assert resources["pids"] == {"limit": 100}


def test_devices_are_denied_but_for_those_named() -> None:
    rules = config(devices=[DeviceRule(kind="c", major=195, minor=None)])["linux"]["resources"]["devices"]
    assert rules == [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 195, "access": "rw"},
    ]


def test_limits_are_what_this_process_may_grant() -> None:
    wanted = {"RLIMIT_NOFILE": (65536, 1048576), "RLIMIT_CORE": (0, 2**64 - 1)}
    assert limits.clamp(wanted, {"RLIMIT_NOFILE": 20000}, may_raise=False) == {
        "RLIMIT_NOFILE": (20000, 20000),
        "RLIMIT_CORE": (0, 2**64 - 1),
    }
    assert limits.clamp(wanted, {"RLIMIT_NOFILE": 20000}, may_raise=True) == wanted


def test_the_bundle_is_written_for_its_owner_only(tmp_path: Path) -> None:
    pod = PodConfig(
        root=Path("/r"), netns=Path("/n"), hostname="h", cgroup="/c", argv=["init"], criu_config=Path("/criu.conf")
    )
    path = oci.write_bundle(tmp_path, pod)
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["process"]["args"] == ["init"]
    oci.write_exec(tmp_path / "exec.json", oci.build_exec(["sh"], env={"S": "secret"}, cwd="/", uid=0, gid=0))
    assert (tmp_path / "exec.json").stat().st_mode & 0o777 == 0o600


def test_the_inits_file_holds_what_each_rank_needs() -> None:
    ranks = [podinit.Rank(rank=4, argv=["a b", "c\nd"], env={"RANK": "4"}), podinit.Rank(rank=5, argv=["x"])]
    data = podinit.encode(
        podinit.InitConfig(ranks=ranks, env={"K": "v=w"}, cwd="/w w", uid=7, gid=8, groups=[9, 10], umask=0o077)
    )
    fields = data.split(b"\0")
    assert fields[0] == b"moorage-init 1"
    assert fields[-2:] == [b"end", b""]
    assert b"cwd /w w" in fields
    assert b"umask 77" in fields
    assert b"groups 9,10" in fields
    assert fields[fields.index(b"rank 4") : fields.index(b"rank 5")] == [
        b"rank 4", b"argv a b", b"argv c\nd", b"env RANK=4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        podinit.InitConfig(ranks=[podinit.Rank(rank=0, argv=[])]),
        podinit.InitConfig(ranks=[podinit.Rank(rank=0, argv=["a\0b"])]),
        podinit.InitConfig(ranks=[podinit.Rank(rank=0, argv=["a"])], env={"A": "x\0y"}),
    ],
)
def test_what_the_init_could_not_read_is_refused(config: podinit.InitConfig) -> None:
    with pytest.raises(UsageError):
        podinit.encode(config)


def test_cgroup_hierarchies_are_found_where_they_are_mounted() -> None:
    hybrid = """
30 24 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid - cgroup2 cgroup2 rw
33 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
34 30 0:31 / /sys/fs/cgroup/free\\040zer rw shared:9 - cgroup cgroup rw,freezer
40 24 0:40 / /mnt/other rw - cgroup2 cgroup2 rw
"""
    mounts = parse_mounts(hybrid)
    assert mounts[""] == Path("/sys/fs/cgroup/unified")
    assert mounts["freezer"] == Path("/sys/fs/cgroup/free zer")
    assert mounts["cpuacct"] == mounts["cpu"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert parse_mounts("1 2 0:3 / /sys/fs/cgroup rw - cgroup2 none rw") == {"": Path("/sys/fs/cgroup")}


def test_version_one_is_used_where_runc_would_use_it() -> None:
    assert not PodCgroup("/moorage/p", mounts=V1).unified
    assert PodCgroup("/moorage/p", mounts=V1).folder == Path("/sys/fs/cgroup/freezer/moorage/p")
    assert PodCgroup("/moorage/p", mounts=V2).unified
    assert PodCgroup("/moorage/p", mounts=V2).folder == Path("/sys/fs/cgroup/moorage/p")


@pytest.mark.parametrize(("mounts", "line"), [(V1, "echo FROZEN > '"), (V2, "echo 1 > '")])
def test_criu_freezes_the_pod_before_it_lets_it_go(mounts: dict[str, Path], line: str, tmp_path: Path) -> None:
    cgroup = PodCgroup("/moorage/p", mounts=mounts)
    criu.write_for_restore(tmp_path, cgroup)
    options = (tmp_path / criu.CONFIG_FILE).read_text()
    assert f'action-script "{tmp_path / criu.HOLD_FILE}"' in options
    assert line + str(cgroup.folder) in (tmp_path / criu.HOLD_FILE).read_text()
    assert (tmp_path / criu.HOLD_FILE).stat().st_mode & 0o777 == 0o700
    criu.write_for_dump(tmp_path)
    dump = (tmp_path / criu.CONFIG_FILE).read_text()
    assert "action-script" not in dump
    assert {"tcp-established", "file-locks", "network-lock nftables"} <= set(dump.splitlines())
