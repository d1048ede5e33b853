"""Find and remove what a node of an embedded cluster leaves on the machine: processes, mounts, cgroups."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from moorage.dev import network
from moorage.dev.layout import Cluster, Node
from moorage.dev.processes import descendants, in_namespace, naming, unescape
from moorage.errors import MoorageError

KILL = signal.SIGKILL
CGROUPS = Path("/sys/fs/cgroup")
_MNT_DETACH = 2


def processes_of(cluster: Cluster, node: Node) -> set[int]:
    """Everything that runs on a node: its worker and guards (by namespace and folder), its pods (by cgroup and
    namespace), and all their children."""
    found = in_namespace(network.namespace_path(cluster, node)) | naming(cluster.node_folder(node.name))
    for group in cgroups_of(cluster, node):
        found |= _members(group)
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


def cgroups_of(cluster: Cluster, node: Node) -> list[Path]:
    """The node's cgroup in each hierarchy where it exists; those of its pods stand in it."""
    folders = [root / f"moorage-{cluster.name}" / node.name for root in hierarchies()]
    return [folder for folder in folders if folder.is_dir()]


def tree(group: Path) -> list[Path]:
    """A cgroup and all in it, the innermost first. One that is removed meanwhile is no error, as it is to glob."""
    return [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]


def _members(group: Path) -> set[int]:
    found: set[int] = set()
    for folder in tree(group):
        with contextlib.suppress(OSError):  # removed meanwhile, or a threaded one of version 2
            found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
    return found


def hierarchies() -> list[Path]:
    """Where cgroup hierarchies are mounted: one each for the controllers of version 1, one for version 2."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    fields = [line.split(" ") for line in lines]
    return [Path(unescape(f[4])) for f in fields if f[f.index("-") + 1] in ("cgroup", "cgroup2")]


def remove_cgroups(groups: Iterable[Path]) -> None:
    """Remove cgroups in which nothing runs any more, with those in them, and the cluster's after its last node."""
    for group in groups:
        for folder in tree(group):
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()
        with contextlib.suppress(OSError):  # another node has one there
            group.parent.rmdir()
