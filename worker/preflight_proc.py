"""Read the processes of a pod from ``/proc``, for `preflight` and for the capture of mapped files.

A process that ends meanwhile is left out; one that cannot be read is an error of this machine, not of the job.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from moorage.worker.preflight import OpenFile, Process

_PROC = Path("/proc")
_ENDING = 0x4  # PF_EXITING
_WATCH = re.compile(r"^inotify wd:\w+ ino:(\w+) sdev:(\w+)", re.MULTILINE)
_MAP_LINE = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (....) [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) (\d+) +(.*)$", re.MULTILINE)


def read_processes(host_pids: Iterable[int], *, proc: Path = _PROC) -> list[Process]:
    """The processes with these ids of the host, those that ended meanwhile left out."""
    found = []
    for pid in host_pids:
        try:
            found.append(_read(proc / str(pid), pid))
        except OSError:
            # Some files of a process that is just ending answer with another error (mountinfo: EINVAL).
            if lives(proc / str(pid)):
                raise
    return found


def lives(folder: Path) -> bool:
    """Whether the process of this folder of ``/proc`` is there and neither ending nor a zombie."""
    try:
        fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] not in b"ZXx" and not int(fields[6]) & _ENDING
    except (OSError, IndexError, ValueError):
        return False


def _read(folder: Path, pid: int) -> Process:
    status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
    return Process(
        pid=int(status.get("NSpid", str(pid)).split()[-1]),
        host_pid=pid,
        name=status.get("Name", "?"),
        tracer=int(status.get("TracerPid", "0")),
        files=tuple(_files(folder)),
        maps=frozenset(name for _, name in mappings((folder / "maps").read_text()) if name.startswith("anon_inode:")),
        mounts=frozenset(int(line.split(" ", 1)[0]) for line in (folder / "mountinfo").read_text().splitlines()),
    )


def _files(folder: Path) -> Iterable[OpenFile]:
    for path in sorted((folder / "fd").iterdir(), key=lambda entry: int(entry.name)):
        try:
            target = str(path.readlink())
            status = path.stat()
            mount = _mount_id((folder / "fdinfo" / path.name).read_text()) if target.startswith("/") else 0
            protocol = _protocol(path) if stat.S_ISSOCK(status.st_mode) and target.startswith("socket:") else ""
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed meanwhile
        device = (os.major(status.st_rdev), os.minor(status.st_rdev))
        yield OpenFile(int(path.name), target, status.st_mode, device, mount, protocol)


def _protocol(path: Path) -> str:
    try:
        return os.getxattr(path, "system.sockprotoname").rstrip(b"\0").decode()
    except FileNotFoundError:
        raise
    except OSError:
        return ""  # a kernel without the attribute: leave the socket to CRIU's own verdict


def _mount_id(fdinfo: str) -> int:
    for line in fdinfo.splitlines():
        if line.startswith("mnt_id:"):
            return int(line.split()[1])
    return 0


def mappings(maps: str) -> list[tuple[str, str]]:
    """Pairs ``(permissions, name)`` of the named mappings in the text of ``/proc/<pid>/maps``."""
    return [(found[1], found[4]) for found in _MAP_LINE.finditer(maps) if found[4]]


def watched(fdinfo: str) -> list[tuple[int, int]]:
    """``(st_dev, st_ino)`` of what an inotify descriptor with this text in ``/proc/<pid>/fdinfo`` watches."""
    found = []
    for inode, device in _WATCH.findall(fdinfo):
        number = int(device, 16)
        found.append((os.makedev(number >> 20, number & 0xFFFFF), int(inode, 16)))
    return found


def mapped_writable(host_pids: Iterable[int], *, proc: Path = _PROC) -> set[str]:
    """Paths, as the pod sees them, of files that its processes have mapped shared and writable.

    Their content may change without their times changing, so a capture never trusts the times of these.
    """
    found: set[str] = set()
    for pid in host_pids:
        try:
            text = (proc / str(pid) / "maps").read_text()
        except OSError:
            if lives(proc / str(pid)):
                raise
            continue
        found.update(name for permissions, name in mappings(text) if permissions[1] == "w" and permissions[3] == "s")
    return {name for name in found if name.startswith("/")}
