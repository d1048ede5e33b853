"""The mounts of this host, and which of them a pod needs an overlay of. `needed` is pure."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from moorage.errors import Forbidden, UsageError

_ESCAPE = re.compile(r"\\([0-7]{3})")

# Mounts that a pod gets its own of, or that hold no files.
_NO_FILES: Final = frozenset(
    {"proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "debugfs", "tracefs", "securityfs", "pstore"}
    | {"bpf", "configfs", "fusectl", "hugetlbfs", "autofs", "binfmt_misc", "efivarfs", "nsfs", "rpc_pipefs"}
)
_OWN_OF_POD: Final = ("/proc", "/sys", "/dev")


class HostMount(NamedTuple):
    """A mount. ``kind`` is the file system's type."""

    mountpoint: str
    kind: str


def read_mounts() -> list[HostMount]:
    """The mounts of this process's namespace, later ones over earlier ones."""
    return parse_mounts(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))


def parse_mounts(text: str) -> list[HostMount]:
    """The lines of a ``mountinfo`` file."""
    mounts = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), left.split(" ")[4])
        mounts.append(HostMount(point, right.split(" ")[0]))
    return mounts


def below(path: str, top: str) -> bool:
    """Whether ``path`` is ``top`` or lies in it."""
    return path == top or top == "/" or path.startswith(top + "/")


def mount_of(path: str, mounts: Iterable[HostMount]) -> HostMount:
    """The mount on which an absolute path without symlinks lies."""
    best = HostMount("/", "")
    for mount in mounts:
        if below(path, mount.mountpoint) and len(mount.mountpoint) >= len(best.mountpoint):
            best = mount
    return best


def needed(paths: Iterable[str], mounts: Sequence[HostMount], live: Iterable[str]) -> list[str]:
    """Mount points below ``/`` on which ``paths`` lie, parents first; those that ``live`` mounts cover are left out."""
    live = [mount.rstrip("/") or "/" for mount in live]
    points = set()
    for path in paths:
        mount = mount_of(path, mounts)
        if mount.mountpoint == "/" or mount.kind in _NO_FILES or any(below(path, top) for top in live):
            continue
        if not any(below(mount.mountpoint, own) for own in _OWN_OF_POD):
            points.add(mount.mountpoint)
    return sorted(points, key=lambda point: (point.count("/"), point))


def check_working_directory(path: str, hidden: Iterable[str]) -> None:
    """Raises `UsageError` for a working directory that a pod cannot have."""
    if not path.startswith("/"):
        raise UsageError(f"the working directory {path!r} is not an absolute path")
    if any(below(path, own) for own in _OWN_OF_POD):
        raise UsageError(
            f"the working directory {path} lies where each pod has a file system of its own",
            "start the job from a folder outside /dev, /proc and /sys",
        )
    for folder in hidden:
        if below(path, folder):
            raise UsageError(
                f"the working directory {path} lies in {folder}, which moorage hides from pods",
                "start the job from another folder",
            )


def chain(path: str) -> list[str]:
    """Every real path on the way from ``path`` to the file that it leads to: each link of its last part, resolved."""
    found: list[str] = []
    for _ in range(40):
        place = Path(os.path.realpath(Path(path).parent)) / Path(path).name
        found.append(str(place))
        if not place.is_symlink():
            break
        path = str(place.parent / place.readlink())
    return found


def points_of(
    image: Path | None, working_directory: str, interpreters: Sequence[str], live: Sequence[str], secret: Sequence[str]
) -> list[str]:
    """Mount points of the host that a pod needs besides the root. Looks with the rights of this thread.

    Arguments as of `PodLayers.plan`; ``secret``: real paths. Raises `UsageError`, `Forbidden` for a working directory
    that cannot be had.
    """
    points: list[str] = []
    if image is None:
        real = os.path.realpath(working_directory)
        check_working_directory(real, secret)
        places = [real]
        for path in interpreters:
            for place in chain(path):
                places += [place, str(Path(place).parent.parent)]
        points = needed(places, read_mounts(), live)
    else:
        check_working_directory(working_directory, ())
    if any(below(working_directory, mount) for mount in live):
        return points
    on_host = Path(working_directory) if image is None else image / working_directory.lstrip("/")
    where = "on this node" if image is None else f"in the image {image}"
    try:
        if stat.S_ISDIR(on_host.stat().st_mode):
            return points
    except PermissionError:
        raise Forbidden(
            f"the job's user may not reach the working directory {working_directory} {where}",
            "start the job from a folder that this user may enter",
        ) from None
    except OSError:
        pass
    raise UsageError(f"the working directory {working_directory} does not exist {where}")
