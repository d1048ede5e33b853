"""What in a pod cannot be saved, told by name before anything is touched. Pure; `preflight_proc` looks at ``/proc``.

The list holds what CRIU refuses, or would save wrongly, and what would tie the images to this host. Whatever is missing
here makes the capture fail later, which costs the attempt, never the job.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple


class Objection(NamedTuple):
    """One thing that cannot be saved: process and descriptor, the reason, the way out. ``kind``: class in errors.py."""

    what: str
    why: str
    cure: str
    kind: str = "Refused"


@dataclass(frozen=True)
class OpenFile:
    """One descriptor. ``mode`` is st_mode, ``device`` (major, minor) of a device node, ``mount`` fdinfo's mnt_id.

    ``protocol`` is the kernel's name of a socket's protocol (``TCP``, ``UNIX-STREAM``), empty for anything else.
    """

    fd: int
    target: str
    mode: int = stat.S_IFREG
    device: tuple[int, int] = (0, 0)
    mount: int = 0
    protocol: str = ""


@dataclass(frozen=True)
class Process:
    """One process of the pod. ``mounts`` are the ids of its mount namespace, ``maps`` the names of its mappings."""

    pid: int  # inside the pod
    host_pid: int
    name: str
    tracer: int = 0
    files: tuple[OpenFile, ...] = ()
    maps: frozenset[str] = frozenset()
    mounts: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


_STANDARD_DEVICES: Final = frozenset({(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)})
_PTY_MAJORS: Final = range(136, 144)
_NVIDIA_MAJORS: Final = frozenset({195})
_PLAIN_PROTOCOLS: Final = ("TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "NETLINK")
_SAVED_ANONYMOUS: Final = ("[eventfd]", "[eventpoll]", "[timerfd]", "[signalfd]", "inotify", "[pidfd]", "[fanotify]")
_OWN_FILESYSTEMS: Final = ("/memfd:", "/SYSV", "/dev/zero (deleted)", "/[aio]")

_SOCKET_CURES: Final = {
    "PACKET": "close the capture of packets before the checkpoint",
    "RAW": "use TCP or UDP, or close the raw socket before the checkpoint",
    "RAWv6": "use TCP or UDP, or close the raw socket before the checkpoint",
    "PING": "close the ICMP socket before the checkpoint",
    "MPTCP": "use plain TCP (GODEBUG=multipathtcp=0 for Go programs)",
}
_ANONYMOUS_CURES: Final = {
    "[io_uring]": "let the program fall back to epoll (USE_LIBUV=0 for torch; UV_USE_IO_URING=0 for Node)",
    "[userfaultfd]": "close the userfaultfd before the checkpoint",
    "[perf_event]": "stop the profiler before the checkpoint",
}


def examine(processes: Iterable[Process]) -> list[Objection]:
    """Everything in these processes that cannot be saved, in their order; empty when the pod can be captured."""
    return [objection for process in processes for objection in _process(process)]


def _process(process: Process) -> Iterable[Objection]:
    if process.tracer:
        yield Objection(
            str(process),
            f"it is traced by process {process.tracer} of the host" if process.tracer > 0 else "it is traced",
            "end the debugger or strace first",
        )
    for name in sorted(process.maps):
        if name.startswith("anon_inode:[io_uring]"):
            yield Objection(f"{process}, mapping {name}", _ANONYMOUS_WHY, _ANONYMOUS_CURES["[io_uring]"])
    for file in process.files:
        yield from _file(process, file)


_ANONYMOUS_WHY: Final = "the kernel keeps state behind it that cannot be read out"


def _file(process: Process, file: OpenFile) -> Iterable[Objection]:
    what = f"{process}, descriptor {file.fd} ({file.target})"
    if file.protocol:
        yield from _socket(what, file.protocol)
    elif file.target.startswith("anon_inode:"):
        kind = file.target.removeprefix("anon_inode:")
        if kind not in _SAVED_ANONYMOUS:
            cure = _ANONYMOUS_CURES.get(kind, "close it before the checkpoint")
            yield Objection(what, _ANONYMOUS_WHY, cure)
    elif stat.S_ISBLK(file.mode):
        yield Objection(what, "it is a block device of this host", "use a file, or close it before the checkpoint")
    elif stat.S_ISCHR(file.mode) and not _standard(file.device):
        yield Objection(what, _device_why(file.device), "close it before the checkpoint")
    elif file.target.startswith("/secretmem"):
        yield Objection(what, "nobody else can read its memory (memfd_secret)", "close it, or use memfd_create")
    elif _outside(process, file) and file.target.count("/") == 1:  # as mq_open names them
        yield Objection(
            what,
            "it is a POSIX message queue, or was opened outside the pod",
            "close it before the checkpoint (mq_close), or open the file inside the pod",
        )
    elif _outside(process, file):
        yield Objection(
            what,
            "it was opened outside the pod and leads to a file that the pod does not see",
            "open the file inside the pod, or name its folder with --mount",
        )


def _socket(what: str, protocol: str) -> Iterable[Objection]:
    if protocol in _PLAIN_PROTOCOLS or protocol.startswith("UNIX"):
        return
    cure = _SOCKET_CURES.get(protocol, "use TCP, UDP or unix sockets, or close it before the checkpoint")
    yield Objection(what, f"sockets of the protocol {protocol} cannot be saved", cure)


def _standard(device: tuple[int, int]) -> bool:
    return device in _STANDARD_DEVICES or device[0] in _PTY_MAJORS


def _device_why(device: tuple[int, int]) -> str:
    if device[0] in _NVIDIA_MAJORS:
        return "it is a GPU's device node; checkpoints of jobs that use GPUs are not supported yet"
    return f"it is device {device[0]}:{device[1]} of this host"


def _outside(process: Process, file: OpenFile) -> bool:
    if not file.target.startswith("/") or file.target.startswith(_OWN_FILESYSTEMS):
        return False
    return bool(file.mount and process.mounts) and file.mount not in process.mounts


def space(needed: int, free: int, where: str) -> list[Objection]:
    """An objection when ``needed`` bytes do not fit in ``free`` bytes of ``where``."""
    if needed <= free:
        return []
    return [
        Objection(
            where,
            f"the checkpoint needs about {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free",
            "free space there, or `moorage prune`",
            "NoCapacity",
        )
    ]


def exec_sessions(commands: Sequence[str]) -> list[Objection]:
    """An objection for each command that ``moorage exec`` runs in the pod: its pipes lead out of the pod."""
    return [
        Objection(f"exec session `{command}`", "its pipes lead out of the pod", "end the session first")
        for command in commands
    ]
