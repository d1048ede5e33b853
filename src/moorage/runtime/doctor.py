"""What this machine can and cannot do as a node, and the way out of each lack.

`findings` asks a `Prober` and judges; it changes nothing. A worker registers as ready only if `ready` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from moorage.config import DEFAULT_STATE
from moorage.runtime import programs
from moorage.runtime.probe import Prober
from moorage.runtime.programs import Version

State = Literal["ok", "warning", "missing"]

MIB = 1 << 20
GIB = 1 << 30
#: Below the first no checkpoint of any job finds room; below the second only small ones do.
LEAST_SPACE, ENOUGH_SPACE = 512 * MIB, 10 * GIB
LEAST_MEMORY = 2 * GIB
#: Time namespaces came with 5.6.
OLDEST_KERNEL = (5, 6)

INSTALL = "run `moorage runtime install` as root"
_NEEDED_CAPABILITIES = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETPCAP": 8,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_CHROOT": 18,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_MKNOD": 27,
}
_CAP_SYS_RESOURCE = 24
#: The hard limits of a pod: name in `resource`, what it limits, number, unit (see `moorage.worker.sandbox.oci`).
UNLIMITED = 2**64 - 1
_POD_LIMITS = (("RLIMIT_NOFILE", "open files", 1048576, 1), ("RLIMIT_MEMLOCK", "MiB of locked memory", UNLIMITED, MIB))


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at. ``missing``: no pod can run here; ``cure`` says what to do (empty when ok)."""

    name: str
    state: State
    detail: str
    cure: str = ""


class Machine(Protocol):
    """What `findings` asks: see `moorage.runtime.probe.Prober`, the real one."""

    def user(self) -> int: ...
    def capabilities(self) -> int: ...
    def hard_limit(self, name: str) -> int: ...
    def limits_library(self) -> tuple[str, str]: ...
    def kernel(self) -> str: ...
    def program(self, name: str) -> tuple[str, Version | None]: ...
    def criu_check(self) -> str: ...
    def runc_namespaces(self) -> set[str]: ...
    def link(self, kind: str) -> str: ...
    def nftables(self) -> str: ...
    def plug(self) -> str: ...
    def overlay(self, folder: Path) -> str: ...
    def diag(self, kind: str) -> str: ...
    def socket_destroy(self) -> str: ...
    def exists(self, path: str) -> bool: ...
    def freezer(self) -> str: ...
    def free_bytes(self, folder: Path) -> int: ...
    def memory_bytes(self) -> int: ...


def kernel_version(release: str) -> Version:
    """The numbers of a kernel release: ``6.12.0-1-amd64`` is (6, 12)."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def criu_needed(kernel: Version) -> Version:
    """The oldest CRIU that works on a kernel: 6.13 changed the vDSO, 6.16 a socket option."""
    if kernel >= (6, 16):
        return (4, 2)
    return (4, 1) if kernel >= (6, 13) else (4, 0)


def _root(machine: Machine) -> Finding:
    if machine.user() != 0:
        return Finding("root", "missing", f"this runs as user {machine.user()}", "run it as root (sudo)")
    mask = machine.capabilities()
    lacking = [name for name, bit in _NEEDED_CAPABILITIES.items() if not mask >> bit & 1]
    if lacking:
        cure = "start the container or service with these capabilities (docker run --privileged)"
        return Finding("root", "missing", f"root without {', '.join(lacking)}", cure)
    return Finding("root", "ok", "root, with all capabilities that are needed")


def _kernel(machine: Machine) -> Finding:
    release = machine.kernel()
    if kernel_version(release) < OLDEST_KERNEL:
        return Finding("kernel", "missing", f"{release} has no time namespaces", "boot a kernel from 5.6 on")
    return Finding("kernel", "ok", release)


def _program(machine: Machine, name: str, what: str) -> Finding:
    path, version = machine.program(name)
    if not path:
        return Finding(name, "missing", "not installed", INSTALL)
    if version is None:
        return Finding(name, "missing", f"{path} does not run", INSTALL)
    if not programs.new_enough(name, version):
        return Finding(name, "missing", f"{path} is {programs.text(version)}; {what}", INSTALL)
    return Finding(name, "ok", f"{programs.text(version)} ({path})")


def _criu(machine: Machine) -> Finding:
    release = machine.kernel()
    found = _program(machine, "criu", "kernels from 6.16 need 4.2, and moorage is tried with no older one")
    if found.state != "ok":
        return found
    version = machine.program("criu")[1] or ()
    if version < (needed := criu_needed(kernel_version(release))):
        detail = f"{programs.text(version)} cannot work on kernel {release}, which needs {programs.text(needed)}"
        return Finding("criu", "missing", detail, INSTALL)
    if machine.user() != 0:
        return found
    if said := machine.criu_check():
        return Finding("criu", "missing", f"criu check: {said}", "boot a kernel with CONFIG_CHECKPOINT_RESTORE=y")
    return Finding("criu", "ok", f"{found.detail}; criu check passes")


def _criu_library(machine: Machine) -> Finding:
    path, lack = machine.limits_library()
    if lack and not path and machine.capabilities() >> _CAP_SYS_RESOURCE & 1:
        detail = f"{lack}: pods that hold some kinds of eventfds, or exit codes above 127, cannot be saved"
        return Finding("criu library", "warning", detail, "install moorage anew (from its sources: `make setup`)")
    if lack:
        return Finding("criu library", "missing", lack, "install moorage anew (from its sources: `make setup`)")
    return Finding("criu library", "ok", path)


def _runc(machine: Machine) -> Finding:
    found = _program(machine, "runc", "it takes 1.2.8, or 1.3.3: older ones take a fake /proc or /dev/null")
    if found.state == "ok" and "time" not in machine.runc_namespaces():
        return Finding("runc", "missing", f"{found.detail} was built without time namespaces", INSTALL)
    return found


def _etcd(machine: Machine) -> Finding:
    path, version = machine.program("etcd")
    if not path:
        cure = f"{INSTALL}, if this machine is to run etcd (`dev up` does)"
        return Finding("etcd", "warning", "not installed; a node by itself needs none", cure)
    if version and (3, 5, 0) <= version < (3, 5, 3):
        return Finding("etcd", "missing", f"{path} is {programs.text(version)}, which can lose data", INSTALL)
    if version is None or not programs.new_enough("etcd", version):
        return Finding("etcd", "missing", f"{path} is {programs.text(version)}, which is too old", INSTALL)
    return Finding("etcd", "ok", f"{programs.text(version)} ({path})")


def _tar(machine: Machine) -> Finding:
    path, _ = machine.program("tar")
    if not path:
        return Finding("tar", "missing", "not installed; CRIU saves tmpfs with it", "apt-get install tar")
    return Finding("tar", "ok", path)


def _time_namespace(machine: Machine) -> Finding:
    if not machine.exists("/proc/self/ns/time"):
        cure = "boot a kernel with CONFIG_TIME_NS=y"
        return Finding("time namespace", "missing", "the kernel has none: clocks would jump at a restore", cure)
    return Finding("time namespace", "ok", "in the kernel")


_LINK_USES = {
    "vxlan": "the network between a job's pods",
    "veth": "every pod's network",
    "bridge": "the network between a job's pods",
}


def _link(machine: Machine, kind: str) -> Finding:
    if not machine.program("ip")[0]:
        return Finding(kind, "warning", "not looked at: needs ip", INSTALL)
    if said := machine.link(kind):
        cure = f"modprobe {kind}, or install the package with the kernel's extra modules"
        return Finding(kind, "missing", f"{said} ({_LINK_USES[kind]} needs it)", cure)
    return Finding(kind, "ok", "can be made")


def _nftables(machine: Machine) -> Finding:
    if not machine.program("nft")[0]:
        return Finding("nf_tables", "warning", "not looked at: needs nft", INSTALL)
    if said := machine.nftables():
        cure = "modprobe nf_tables nft_chain_nat nft_masq nft_ct, or install the kernel's extra modules"
        return Finding("nf_tables", "missing", f"{said} (pods are sealed and reach the world with it)", cure)
    return Finding("nf_tables", "ok", "rules with address translation can be loaded")


def _diag(machine: Machine, kind: str) -> Finding:
    name = f"{kind} diag"
    if said := machine.diag(kind):
        module = {"packet": "af_packet_diag"}.get(kind, f"{kind}_diag")
        cure = f"modprobe {module}, or install the kernel's extra modules"
        return Finding(name, "missing", f"{said}: CRIU cannot see {kind} sockets", cure)
    return Finding(name, "ok", f"{kind} sockets can be listed")


def _socket_destroy(machine: Machine) -> Finding:
    if said := machine.socket_destroy():
        detail = f"{said}: after a move, connections to the world end by timeout and not at once"
        return Finding("socket destroy", "warning", detail, "boot a kernel with CONFIG_INET_DIAG_DESTROY=y")
    return Finding("socket destroy", "ok", "connections can be reset")


def _freezer(machine: Machine) -> Finding:
    if said := machine.freezer():
        cure = "mount cgroup2 at /sys/fs/cgroup, or the freezer of version 1; in a container: --privileged"
        return Finding("cgroup freezer", "missing", said, cure)
    return Finding("cgroup freezer", "ok", "cgroups can be made and frozen")


def _overlay(machine: Machine, state: Path) -> Finding:
    if said := machine.overlay(state):
        cure = "modprobe overlay; let the state folder stand on ext4 or xfs, not on an overlay (`state` in worker.toml)"
        return Finding("overlay", "missing", f"no upper layer can stand in {state}: {said}", cure)
    return Finding("overlay", "ok", f"upper layers can stand in {state}")


def _space(machine: Machine, state: Path) -> Finding:
    free = machine.free_bytes(state)
    detail = f"{free / GIB:.1f} GiB free in {state}"
    if free < LEAST_SPACE:
        return Finding("space", "missing", detail, "free some, or name a state folder elsewhere")
    if free < ENOUGH_SPACE:
        return Finding("space", "warning", f"{detail}: only small jobs can be saved", "free some")
    return Finding("space", "ok", detail)


def _memory(machine: Machine) -> Finding:
    size = machine.memory_bytes()
    if size < LEAST_MEMORY:
        return Finding("memory", "warning", f"{size / GIB:.1f} GiB", "pods may be killed for lack of memory")
    return Finding("memory", "ok", f"{size / GIB:.1f} GiB")


def _limits(machine: Machine) -> Finding:
    """What a root without CAP_SYS_RESOURCE, as in many containers, cannot do for pods."""
    if machine.capabilities() >> _CAP_SYS_RESOURCE & 1:
        return Finding("resource limits", "ok", "pods get the limits that they ask for")
    short = []
    for name, what, wanted, unit in _POD_LIMITS:
        if (most := machine.hard_limit(name)) < wanted:
            short.append(f"{most // unit} {what} ({'no limit' if wanted == UNLIMITED else wanted // unit} elsewhere)")
    told = ["root lacks CAP_SYS_RESOURCE"]
    if short:
        told.append(
            f"pods get at most {' and '.join(short)}, and what was saved with higher limits is not restored here"
        )
    told.append("guards are not spared when memory runs out")
    told.append("jobs of other users than root are saved all the same (moorage-criu-limits.so)")
    cure = "start the worker with it (docker run --cap-add SYS_RESOURCE; CapabilityBoundingSet= in its unit)"
    cure += ", or with higher limits (LimitNOFILE=, LimitMEMLOCK=)" if short else ""
    return Finding("resource limits", "warning", "; ".join(told), cure)


def _backoff(machine: Machine) -> Finding:
    """What keeps the standstill after a seal short if data was under way when it came."""
    if machine.exists("/proc/sys/net/ipv4/tcp_rto_max_ms"):
        return Finding("tcp_rto_max_ms", "ok", "in the kernel: connections go on within a second after a seal")
    detail = "not in this kernel (6.15 has it)"
    if not machine.plug():
        return Finding("tcp_rto_max_ms", "ok", f"{detail}; sch_plug is there")
    detail += ", nor is sch_plug: a connection with data under way at a seal may stand still for seconds afterwards"
    return Finding("tcp_rto_max_ms", "warning", detail, "nothing has to be done; results are the same")


#: Checks that need root: without it they would only say so once more.
_PRIVILEGED: dict[str, Callable[[Machine, Path], Finding]] = {
    "vxlan": lambda machine, _: _link(machine, "vxlan"),
    "veth": lambda machine, _: _link(machine, "veth"),
    "bridge": lambda machine, _: _link(machine, "bridge"),
    "nf_tables": lambda machine, _: _nftables(machine),
    "overlay": _overlay,
    "cgroup freezer": lambda machine, _: _freezer(machine),
    "socket destroy": lambda machine, _: _socket_destroy(machine),
    "resource limits": lambda machine, _: _limits(machine),
    "tcp_rto_max_ms": lambda machine, _: _backoff(machine),
}


def findings(state: Path | str = DEFAULT_STATE, machine: Machine | None = None) -> list[Finding]:
    """Look at everything that a node needs; ``state`` is the worker's state folder (need not exist yet). Takes about a
    second and blocks."""
    machine = machine or Prober()
    state = Path(state)
    found = [
        _root(machine),
        _kernel(machine),
        _criu(machine),
        _criu_library(machine),
        _runc(machine),
        _etcd(machine),
        _program(machine, "nft", ""),
        _program(machine, "ip", ""),
        _tar(machine),
        _time_namespace(machine),
        *(_diag(machine, kind) for kind in ("tcp", "udp", "unix", "netlink", "packet")),
        _space(machine, state),
        _memory(machine),
    ]
    if found[0].state == "ok":
        found += [check(machine, state) for check in _PRIVILEGED.values()]
    else:
        found += [Finding(name, "warning", "not looked at: needs root", "run as root") for name in _PRIVILEGED]
    return found


def ready(found: Iterable[Finding]) -> bool:
    """Whether pods can run: nothing is missing."""
    return all(finding.state != "missing" for finding in found)
