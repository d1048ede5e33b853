"""The OCI configuration of a pod. Pure: paths are written down, not looked at.

Decisions that someone may question later:

* network is a namespace given by path, because one that runc makes comes back from a restore with ``lo`` down;
* the time namespace keeps the monotonic clock from jumping when the pod moves to another host;
* ``io_uring_*`` answers ENOSYS, because CRIU cannot save a ring, and programs then fall back to epoll;
* ``/tmp`` is part of the root's overlay; only ``/dev`` and ``/dev/shm`` are memory of the pod's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moorage.worker.sandbox import limits

OCI_VERSION: Final = "1.2.0"
CONFIG_FILE: Final = "config.json"

#: What a job of root may do inside its pod: enough for package managers and servers, nothing that reaches the host.
ROOT_CAPABILITIES: Final = (
    "CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_IPC_LOCK", "CAP_KILL",
    "CAP_MKNOD", "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID",
    "CAP_SYS_CHROOT",
)  # fmt: skip
#: What pid 1 needs for a job of another user: to become that user for good (SETPCAP: with an empty bounding set) and to
#: signal its processes. The ranks have none.
INIT_CAPABILITIES: Final = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID",
)  # fmt: skip

_ENOSYS: Final = 38
_UNLIMITED: Final = 2**64 - 1
_MASKED: Final = (
    "/proc/acpi", "/proc/asound", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
    "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
_READ_ONLY: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
DEFAULT_RLIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "RLIMIT_CORE": (0, _UNLIMITED),
    "RLIMIT_NOFILE": (65536, 1048576),
    "RLIMIT_MEMLOCK": (_UNLIMITED, _UNLIMITED),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bind:
    """A host path that the pod sees at ``destination``. ``device``: a device node, opened for reading and writing."""

    source: Path
    destination: str
    read_only: bool = False
    device: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRule:
    """A device that the pod may use, by number; None stands for all."""

    kind: str  # "c" or "b"
    major: int | None
    minor: int | None
    node: str = ""  # where the pod's ``/dev`` has it as a node of its own; only with both numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodConfig:
    """All that makes a pod's container. ``uid`` is the ranks' user; pid 1 is root inside the pod and drops to it."""

    root: Path  # the mounted root file system (overlay)
    netns: Path
    hostname: str
    cgroup: str  # absolute; relative to the mount of each cgroup hierarchy
    argv: Sequence[str]  # of pid 1: podinit.argv()
    criu_config: Path  # criu.CONFIG_FILE in the pod's folder; the guard writes it
    uid: int = 0
    shm_bytes: int = 0  # 0: half of memory, the kernel's default
    binds: Sequence[Bind] = ()
    init: Bind | None = None  # what pid 1 is made of; mounted last, so that no mount of a user covers it
    devices: Sequence[DeviceRule] = ()
    cpus: float = 0.0  # 0: no limit
    memory_bytes: int = 0  # 0: no limit
    pids: int = 0  # 0: no limit
    rlimits: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=lambda: dict(DEFAULT_RLIMITS))
    time_namespace: bool = True
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)


def build(pod: PodConfig) -> dict[str, Any]:
    """The content of ``config.json``."""
    capabilities = list(ROOT_CAPABILITIES if pod.uid == 0 else INIT_CAPABILITIES)
    return {
        "ociVersion": OCI_VERSION,
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(pod.argv),
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            # A job of root keeps setuid programs working as it would on the host; another user gains nothing.
            "noNewPrivileges": pod.uid != 0,
            # The guard, an ancestor, is protected from the kernel's memory killer; the pod is not.
            "oomScoreAdj": 0,
            "rlimits": [
                {"type": name, "soft": soft, "hard": hard} for name, (soft, hard) in sorted(pod.rlimits.items())
            ],
        },
        "root": {"path": str(pod.root), "readonly": False},
        "hostname": pod.hostname,
        "mounts": _mounts(pod),
        "annotations": {**pod.annotations, "org.criu.config": str(pod.criu_config)},
        "linux": {
            "namespaces": _namespaces(pod),
            "cgroupsPath": pod.cgroup,
            "devices": [
                {"path": rule.node, "type": rule.kind, "major": rule.major, "minor": rule.minor, "fileMode": 0o666}
                for rule in pod.devices
                if rule.node
            ],
            "resources": _resources(pod),
            "seccomp": _seccomp(),
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def write_bundle(folder: Path, pod: PodConfig) -> Path:
    """Write ``config.json`` (0600) into ``folder``, with the rlimits that this process may grant; returns its path."""
    pod = dataclasses.replace(pod, rlimits=limits.permitted(pod.rlimits))
    path = folder / CONFIG_FILE
    path.touch(0o600)
    path.write_text(json.dumps(build(pod), indent=1))
    return path


def build_exec(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    uid: int,
    gid: int,
    groups: Sequence[int] = (),
    terminal: bool = False,
) -> dict[str, Any]:
    """The process of a ``runc exec`` in a pod, with the rights that the pod's ranks have. Pure."""
    capabilities = list(ROOT_CAPABILITIES) if uid == 0 else []
    return {
        "terminal": terminal,
        "user": {"uid": uid, "gid": gid, "additionalGids": list(groups)},
        "args": list(argv),
        "env": [f"{name}={value}" for name, value in env.items()],
        "cwd": cwd,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        "noNewPrivileges": uid != 0,
        "oomScoreAdj": 0,
    }


def write_exec(path: Path, process: Mapping[str, Any]) -> None:
    """Write what `build_exec` made for `runc.Runc.exec_command`: a file (0600), because the environment may hold
    secrets, and a command line is there for all to read."""
    path.touch(0o600)
    path.write_text(json.dumps(process))


def _namespaces(pod: PodConfig) -> list[dict[str, str]]:
    kinds = ["pid", "mount", "ipc", "uts"] + (["time"] if pod.time_namespace else [])
    return [{"type": kind} for kind in kinds] + [{"type": "network", "path": str(pod.netns)}]


def _mounts(pod: PodConfig) -> list[dict[str, Any]]:
    shm = ["nosuid", "nodev", "mode=1777"] + ([f"size={pod.shm_bytes}"] if pod.shm_bytes else [])
    mounts: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "strictatime", "mode=755"]},
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        },
        {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": shm},
        {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]},
    ]
    # A mount must come after the ones that lie above it, or it would be hidden.
    binds = sorted(pod.binds, key=lambda bind: bind.destination.rstrip("/").count("/"))
    for bind in [*binds, *([pod.init] if pod.init else [])]:
        options = ["rbind", "rprivate"] if not bind.device else ["bind", "rprivate"]
        options.append("ro" if bind.read_only else "rw")
        mounts.append({"destination": bind.destination, "type": "bind", "source": str(bind.source), "options": options})
    return mounts


def _resources(pod: PodConfig) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [{"allow": False, "access": "rwm"}]
    for device in pod.devices:
        rule: dict[str, Any] = {"allow": True, "type": device.kind, "access": "rw"}
        rule |= {} if device.major is None else {"major": device.major}
        rule |= {} if device.minor is None else {"minor": device.minor}
        rules.append(rule)
    resources: dict[str, Any] = {"devices": rules}
    if pod.cpus:
        resources["cpu"] = {"period": 100_000, "quota": max(1000, round(pod.cpus * 100_000))}
    if pod.memory_bytes:
        # No swap on top: a pod that swaps stands still for minutes when it is saved.
        resources["memory"] = {"limit": pod.memory_bytes, "swap": pod.memory_bytes}
    if pod.pids:
        resources["pids"] = {"limit": pod.pids}
    return resources


def _seccomp() -> dict[str, Any]:
    names = ["io_uring_setup", "io_uring_enter", "io_uring_register"]
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS}],
    }
