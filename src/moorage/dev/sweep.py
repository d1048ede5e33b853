"""Find and remove what a node of an embedded cluster leaves on the machine: processes, mounts, cgroups."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moorage.dev import network
from moorage.dev.layout import Cluster, Node
from moorage.dev.processes import descendants, in_namespace, naming, rooted_in, unescape
from moorage.errors import MoorageError

KILL = signal.SIGKILL
CGROUPS = Path("/sys/fs/cgroup")
_MNT_DETACH = 2


def processes_of(cluster: Cluster, node: Node) -> set[int]:
    """Everything that runs on a node: its worker and guards (by namespace), its pods (by root file system and network
    namespace), and all their children."""
    folder = cluster.node_folder(node.name)
    found = in_namespace(network.namespace_path(cluster, node)) | rooted_in(folder) | naming(folder)
    for namespace in network.pod_namespaces(cluster, node):
        found |= in_namespace(Path("/run/netns") / namespace)
    return descendants(found)


def mounts_below(folder: Path) -> list[str]:
    """Mount points in ``folder``, in the order in which they were mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [unescape(line.split(" ")[4]) for line in lines]
    return [point for point in points if point == str(folder) or point.startswith(f"{folder}/")]


def unmount_below(folder: Path) -> None:
    """Unmount everything in ``folder``, the newest first. Raises `MoorageError` if something stays."""
    library = ctypes.CDLL(None, use_errno=True)
    for point in reversed(mounts_below(folder)):
        if library.umount2(os.fsencode(point), _MNT_DETACH) and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):
            raise MoorageError(f"{point} cannot be unmounted: {os.strerror(ctypes.get_errno())}")


class _Linux(msgspec.Struct):
    cgroupsPath: str = ""  # as the OCI specification spells it


class _Bundle(msgspec.Struct):
    linux: _Linux = msgspec.field(default_factory=_Linux)


def cgroups_of(folder: Path) -> set[Path]:
    """Folders below /sys/fs/cgroup of the pods whose bundles lie in ``folder``."""
    found: set[Path] = set()
    for bundle in folder.glob("pods/*/*/*/**/config.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            path = msgspec.json.decode(bundle.read_bytes(), type=_Bundle).linux.cgroupsPath.strip("/")
            if path:
                found |= {root / path for root in hierarchies() if (root / path).is_dir()}
    return found


def hierarchies() -> list[Path]:
    """Where cgroup hierarchies are mounted: one each for the controllers of version 1, one for version 2."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    fields = [line.split(" ") for line in lines]
    return [Path(unescape(f[4])) for f in fields if f[f.index("-") + 1] in ("cgroup", "cgroup2")]


def remove_cgroups(groups: Iterable[Path]) -> None:
    """Remove cgroups in which nothing runs any more, with those in them, and emptied parents that moorage made."""
    for group in groups:
        for folder in sorted([group, *(p for p in group.rglob("*") if p.is_dir())], key=lambda p: -len(p.parts)):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
        parent = group.parent
        while parent.name.startswith("moorage"):
            try:
                parent.rmdir()
            except OSError:
                break  # others have cgroups there
            parent = parent.parent
