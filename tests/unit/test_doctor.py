"""Doctor: each lack of a machine is found, told from what works without it, and comes with a cure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moorage.runtime import doctor, probe
from moorage.runtime.doctor import GIB, MIB, UNLIMITED, Finding, criu_needed, findings, kernel_version, ready
from moorage.runtime.programs import Version
from moorage.worker.sandbox import limits
from moorage.worker.sandbox.oci import DEFAULT_RLIMITS

STATE = Path("/state")
ALL_CAPABILITIES = (1 << 41) - 1


class Healthy:
    """A machine that lacks nothing; the tests take one thing away."""

    def __init__(self) -> None:
        self.uid = 0
        self.mask = ALL_CAPABILITIES
        self.release = "6.18.0"
        self.programs: dict[str, tuple[str, Version | None]] = {
            "criu": ("/bin/criu", (4, 2, 1)),
            "runc": ("/bin/runc", (1, 3, 6)),
            "etcd": ("/bin/etcd", (3, 5, 30)),
            "nft": ("/bin/nft", (1, 1, 7)),
            "ip": ("/bin/ip", (6, 1, 0)),
            "tar": ("/bin/tar", (1, 34)),
        }
        self.namespaces = {"pid", "mount", "time"}
        self.said: dict[str, str] = {}  # what a trial answers when it fails
        self.absent: set[str] = set()
        self.hard = {"RLIMIT_NOFILE": 1048576, "RLIMIT_MEMLOCK": UNLIMITED}
        self.library = ("/lib/limits.so", "")
        self.free = 100 * GIB
        self.memory = 24 * GIB

    def user(self) -> int:
        return self.uid

    def capabilities(self) -> int:
        return self.mask

    def hard_limit(self, name: str) -> int:
        return self.hard[name]

    def limits_library(self) -> tuple[str, str]:
        return self.library

    def kernel(self) -> str:
        return self.release

    def program(self, name: str) -> tuple[str, Version | None]:
        return self.programs.get(name, ("", None))

    def criu_check(self) -> str:
        return self.said.get("criu check", "")

    def runc_namespaces(self) -> set[str]:
        return self.namespaces

    def link(self, kind: str) -> str:
        return self.said.get(kind, "")

    def nftables(self) -> str:
        return self.said.get("nftables", "")

    def plug(self) -> str:
        return self.said.get("plug", "")

    def overlay(self, folder: Path) -> str:
        assert folder == STATE
        return self.said.get("overlay", "")

    def diag(self, kind: str) -> str:
        return self.said.get(f"{kind} diag", "")

    def socket_destroy(self) -> str:
        return self.said.get("destroy", "")

    def exists(self, path: str) -> bool:
        return path not in self.absent

    def freezer(self) -> str:
        return self.said.get("freezer", "")

    def free_bytes(self, folder: Path) -> int:
        assert folder == STATE
        return self.free

    def memory_bytes(self) -> int:
        return self.memory


def look(machine: Healthy) -> dict[str, Finding]:
    found = findings(STATE, machine)
    assert len({finding.name for finding in found}) == len(found)
    return {finding.name: finding for finding in found}


def test_a_machine_that_lacks_nothing_is_ready_and_every_finding_is_ok() -> None:
    found = findings(STATE, Healthy())
    assert [finding for finding in found if finding.state != "ok" or finding.cure] == []
    assert ready(found)


def set_uid(machine: Healthy) -> None:
    machine.uid = 1000


def drop_net_admin(machine: Healthy) -> None:
    machine.mask &= ~(1 << 12)


def old_kernel(machine: Healthy) -> None:
    machine.release = "5.4.0-200-generic"


def program(name: str, version: Version | None) -> Callable[[Healthy], None]:
    def change(machine: Healthy) -> None:
        machine.programs[name] = (f"/bin/{name}", version)

    return change


def without(name: str) -> Callable[[Healthy], None]:
    return lambda machine: machine.programs.pop(name) and None


def says(trial: str, answer: str) -> Callable[[Healthy], None]:
    return lambda machine: machine.said.update({trial: answer})


def lacks(path: str) -> Callable[[Healthy], None]:
    return lambda machine: machine.absent.add(path)


def no_time_in_runc(machine: Healthy) -> None:
    machine.namespaces.discard("time")


def space(size: int) -> Callable[[Healthy], None]:
    def change(machine: Healthy) -> None:
        machine.free = size

    return change


def stale_library(machine: Healthy) -> None:
    machine.library = ("/lib/limits.so", "/lib/limits.so is of another version of moorage")


def no_library(machine: Healthy) -> None:
    machine.library = ("", "limits.so is not built")


def no_library_nor_capability(machine: Healthy) -> None:
    no_library(machine)
    machine.mask &= ~(1 << 24)


def little_memory(machine: Healthy) -> None:
    machine.memory = GIB


MISSING: list[tuple[Callable[[Healthy], None], str, str, str]] = [
    (set_uid, "root", "user 1000", "sudo"),
    (drop_net_admin, "root", "CAP_NET_ADMIN", "privileged"),
    (old_kernel, "kernel", "5.4.0", "5.6"),
    (without("criu"), "criu", "not installed", "runtime install"),
    (program("criu", (4, 1, 1)), "criu", "4.1.1", "runtime install"),
    (program("criu", None), "criu", "does not run", "runtime install"),
    (says("criu check", "no CONFIG_X"), "criu", "no CONFIG_X", "CHECKPOINT_RESTORE"),
    (stale_library, "criu library", "of another version", "install moorage anew"),
    (no_library_nor_capability, "criu library", "is not built", "install moorage anew"),
    (without("runc"), "runc", "not installed", "runtime install"),
    (program("runc", (1, 1, 15)), "runc", "1.1.15", "runtime install"),
    (program("runc", (1, 3, 2)), "runc", "fake /proc", "runtime install"),
    (no_time_in_runc, "runc", "without time namespaces", "runtime install"),
    (program("etcd", (3, 5, 0)), "etcd", "lose data", "runtime install"),
    (program("etcd", (3, 5, 2)), "etcd", "lose data", "runtime install"),
    (program("etcd", (3, 3, 25)), "etcd", "too old", "runtime install"),
    (without("nft"), "nft", "not installed", "runtime install"),
    (without("ip"), "ip", "not installed", "runtime install"),
    (without("tar"), "tar", "not installed", "tar"),
    (lacks("/proc/self/ns/time"), "time namespace", "none", "CONFIG_TIME_NS"),
    (says("vxlan", "Operation not supported"), "vxlan", "Operation not supported", "modprobe vxlan"),
    (says("veth", "Unknown device type"), "veth", "Unknown device type", "modprobe veth"),
    (says("bridge", "Unknown device type"), "bridge", "Unknown device type", "modprobe bridge"),
    (says("nftables", "cache initialization failed"), "nf_tables", "cache", "modprobe nf_tables"),
    (says("overlay", "wrong fs type"), "overlay", "wrong fs type", "ext4 or xfs"),
    (says("tcp diag", "No such file"), "tcp diag", "No such file", "modprobe tcp_diag"),
    (says("udp diag", "No such file"), "udp diag", "No such file", "modprobe udp_diag"),
    (says("unix diag", "No such file"), "unix diag", "No such file", "modprobe unix_diag"),
    (says("netlink diag", "No such file"), "netlink diag", "No such file", "modprobe netlink_diag"),
    (says("packet diag", "No such file"), "packet diag", "No such file", "modprobe af_packet_diag"),
    (says("freezer", "no cgroup hierarchy"), "cgroup freezer", "no cgroup hierarchy", "cgroup2"),
    (space(MIB), "space", "0.0 GiB free", "state folder"),
]


@pytest.mark.parametrize(("change", "name", "said", "cure"), MISSING)
def test_a_lack_without_which_no_pod_can_run_is_missing_with_a_cure(
    change: Callable[[Healthy], None], name: str, said: str, cure: str
) -> None:
    machine = Healthy()
    change(machine)
    finding = look(machine)[name]
    assert finding.state == "missing"
    assert said in finding.detail
    assert cure in finding.cure
    assert not ready(findings(STATE, machine))


WARNINGS: list[tuple[Callable[[Healthy], None], str, str]] = [
    (without("etcd"), "etcd", "not installed"),
    (says("destroy", "Operation not supported"), "socket destroy", "by timeout"),
    (space(GIB), "space", "only small jobs"),
    (no_library, "criu library", "is not built: pods that hold"),
    (little_memory, "memory", "1.0 GiB"),
]


@pytest.mark.parametrize(("change", "name", "said"), WARNINGS)
def test_a_lack_that_pods_can_live_with_is_a_warning(change: Callable[[Healthy], None], name: str, said: str) -> None:
    machine = Healthy()
    change(machine)
    finding = look(machine)[name]
    assert finding.state == "warning"
    assert said in finding.detail
    assert finding.cure
    assert ready(findings(STATE, machine))


def test_without_tcp_rto_max_ms_the_plug_is_enough_and_without_both_it_is_a_warning() -> None:
    machine = Healthy()
    machine.absent.add("/proc/sys/net/ipv4/tcp_rto_max_ms")
    assert look(machine)["tcp_rto_max_ms"].state == "ok"
    machine.said["plug"] = "unknown qdisc"
    assert look(machine)["tcp_rto_max_ms"].state == "warning"


def test_a_healthy_etcd_of_the_old_line_will_do() -> None:
    machine = Healthy()
    machine.programs["etcd"] = ("/bin/etcd", (3, 4, 23))
    assert look(machine)["etcd"].state == "ok"


def test_without_root_nothing_is_tried_that_needs_it() -> None:
    machine = Healthy()
    machine.uid = 1000
    machine.said = {"vxlan": "Operation not permitted", "overlay": "Operation not permitted"}
    found = look(machine)
    assert found["vxlan"].state == found["overlay"].state == "warning"
    assert "needs root" in found["vxlan"].detail


@pytest.mark.parametrize(
    ("release", "version", "criu"),
    [
        ("6.12.43+deb13-amd64", (6, 12), (4, 0)),
        ("6.13.0", (6, 13), (4, 1)),
        ("6.16-rc1", (6, 16), (4, 2)),
        ("7.0.1", (7, 0), (4, 2)),
        ("odd", (0, 0), (4, 0)),
    ],
)
def test_newer_kernels_need_a_newer_criu(release: str, version: Version, criu: Version) -> None:
    assert kernel_version(release) == version
    assert criu_needed(version) == criu


def test_the_freezer_is_found_on_old_and_new_cgroups() -> None:
    old = "30 20 0:26 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n"
    new = "31 20 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    other = "29 20 0:25 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    assert probe.freezer_folder(old + other + new) == Path("/sys/fs/cgroup/freezer")
    assert probe.freezer_folder(new) == Path("/sys/fs/cgroup")
    assert probe.freezer_folder(other) is None


@pytest.mark.root
def test_this_machine_is_looked_at_without_leaving_anything_behind(tmp_path: Path) -> None:
    state = tmp_path / "state"
    found = findings(state)
    assert ready(found), [finding for finding in found if finding.state == "missing"]
    assert list(tmp_path.iterdir()) == []
    freezer = probe.freezer_folder(Path("/proc/self/mountinfo").read_text())
    assert freezer is not None
    assert not list(freezer.glob("moorage-doctor-*"))


@pytest.mark.root
def test_a_folder_that_cannot_carry_an_upper_layer_is_told_from_one_that_can(tmp_path: Path) -> None:
    assert probe.Prober().overlay(tmp_path) == ""
    assert probe.Prober().overlay(Path("/proc")) != ""


def test_what_cannot_be_tried_for_lack_of_a_program_is_not_blamed_on_the_kernel() -> None:
    machine = Healthy()
    del machine.programs["ip"], machine.programs["nft"]
    machine.said = {"vxlan": "No such file", "nftables": "No such file"}
    found = look(machine)
    assert found["vxlan"].state == found["nf_tables"].state == "warning"
    assert "needs ip" in found["vxlan"].detail
    assert "needs nft" in found["nf_tables"].detail


def test_without_the_capability_for_limits_it_says_what_does_not_work() -> None:
    machine = Healthy()
    machine.mask &= ~(1 << 24)
    found = look(machine)["resource limits"]
    assert found.state == "warning"
    assert "CAP_SYS_RESOURCE" in found.detail and "at most" not in found.detail
    assert "SYS_RESOURCE" in found.cure and "Limit" not in found.cure
    machine.hard |= {"RLIMIT_NOFILE": 20000, "RLIMIT_MEMLOCK": 8 * MIB}
    found = look(machine)["resource limits"]
    assert (
        "at most 20000 open files (1048576 elsewhere) and 8 MiB of locked memory (no limit elsewhere)" in found.detail
    )
    assert "LimitMEMLOCK=" in found.cure
    assert "are saved all the same" in found.detail
    assert ready(findings(STATE, machine)), "pods can run all the same"


def test_the_limits_that_it_compares_with_are_those_of_the_pods() -> None:
    compared = {name: wanted for name, _, wanted, _ in doctor._POD_LIMITS}
    assert compared == {name: DEFAULT_RLIMITS[name][1] for name in compared}
    assert DEFAULT_RLIMITS.keys() - compared.keys() == {"RLIMIT_CORE"}, "no job fails for want of a core file"


def test_the_real_machine_is_asked_for_limits() -> None:
    prober = probe.Prober()
    granted = limits.permitted({"RLIMIT_NOFILE": (0, UNLIMITED)})["RLIMIT_NOFILE"][1]
    assert limits.has_capability(limits.CAP_SYS_RESOURCE) or prober.hard_limit("RLIMIT_NOFILE") == granted
    path, lack = prober.limits_library()
    assert path.endswith("moorage-criu-limits.so") and not lack
