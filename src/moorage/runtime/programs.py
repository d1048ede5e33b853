"""Find the programs that moorage starts, and read their versions.

A program is taken from the first of: ``$MOORAGE_RUNTIME/bin``, ``/opt/moorage/runtime/bin`` (laid by
``moorage runtime install``), the machine's own ``PATH`` if its version is new enough.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from moorage.config import DEFAULT_RUNTIME
from moorage.errors import EnvironmentLacking

Version = tuple[int, ...]

HINT = "run `moorage runtime install` as root"

#: How a program is asked for its version, and where the version stands in the answer.
_ASK: dict[str, tuple[list[str], str]] = {
    "criu": (["--version"], r"Version:\s*([\d.]+)"),
    "runc": (["--version"], r"runc version\s+([\d.]+)"),
    "etcd": (["--version"], r"etcd Version:\s*([\d.]+)"),
    "etcdctl": (["version"], r"etcdctl version:\s*([\d.]+)"),
    "etcdutl": (["version"], r"etcdutl version:\s*([\d.]+)"),
    "nft": (["--version"], r"v([\d.]+)"),
    "ip": (["-V"], r"iproute2-([\d.]+)"),
    "ss": (["-V"], r"iproute2-([\d.]+)"),
}

# Where a machine keeps system programs although the caller's PATH may lack the folder.
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def new_enough(name: str, version: Version) -> bool:
    """Whether moorage can work with this version of the program.

    CRIU: 4.2, because kernels from 6.16 need it. runc: 1.2, for time namespaces, and of each series the release that
    refuses a /dev/null or a /proc that is none (CVE-2025-31133, CVE-2025-52881). etcd: 3.4, or 3.5.3 and later (3.5.0
    to 3.5.2 can lose data). Other programs: any.
    """
    if name == "criu":
        return version >= (4, 2)
    if name == "runc":
        return (1, 2, 8) <= version < (1, 3) or version >= (1, 3, 3)
    if name in ("etcd", "etcdctl", "etcdutl"):
        return (3, 4) <= version < (3, 5) or version >= (3, 5, 3)
    return True


def parse_version(name: str, text: str) -> Version | None:
    """The version in a program's answer, as numbers; None if there is none."""
    found = re.search(_ASK.get(name, ([], r"(\d+(?:\.\d+)+)"))[1], text)
    return tuple(int(part) for part in found.group(1).strip(".").split(".")) if found else None


@functools.cache
def _version(name: str, path: str, stamp: tuple[int, int]) -> Version | None:
    arguments = _ASK.get(name, (["--version"], ""))[0]
    try:
        answer = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(name, answer.stdout + answer.stderr)


def version(name: str, path: Path) -> Version | None:
    """The version of the program at ``path``; None if it does not run or does not say. Asked once for each file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _version(name, str(path), (status.st_mtime_ns, status.st_ino))


def text(version: Version | None) -> str:
    """A version for people."""
    return ".".join(map(str, version)) if version else "unknown"


def use(prefix: str) -> None:
    """Look into the runtime folder ``prefix`` first, in this process and those that it starts.

    The environment goes before the configuration: where ``MOORAGE_RUNTIME`` is set, nothing changes.
    """
    os.environ.setdefault("MOORAGE_RUNTIME", prefix)


def prefixes() -> list[Path]:
    """The runtime folders that are looked into, in order."""
    explicit = os.environ.get("MOORAGE_RUNTIME")
    return [Path(explicit), Path(DEFAULT_RUNTIME)] if explicit else [Path(DEFAULT_RUNTIME)]


def on_path(name: str) -> Path | None:
    """The machine's own program of that name, whatever its version."""
    folders = os.pathsep.join([os.environ.get("PATH", os.defpath), *_SYSTEM_FOLDERS])
    found = shutil.which(name, path=folders)
    return Path(found) if found else None


def find(name: str, *, ask: Callable[[str, Path], Version | None] = version) -> Path:
    """The program's path. Raises `EnvironmentLacking` if there is none, or only one that is too old.

    ``ask`` reads a version; tests replace it.
    """
    for prefix in prefixes():
        candidate = prefix / "bin" / name
        if os.access(candidate, os.X_OK):
            return candidate
    own = on_path(name)
    if own is None:
        raise EnvironmentLacking(f"{name} is not installed", HINT)
    found = ask(name, own)
    if name not in _ASK or (found is not None and new_enough(name, found)):
        return own
    raise EnvironmentLacking(f"{own} is version {text(found)}, which moorage cannot use", HINT)


def require(name: str) -> Path:
    """`find` it and see that it runs and is new enough, wherever it lies. Raises `EnvironmentLacking`.

    For whoever can still refuse: `find` believes a runtime folder, for pods that live there must not end with it.
    """
    path = find(name)
    found = version(name, path)
    if found is None:
        raise EnvironmentLacking(f"{path} does not run", HINT)
    if not new_enough(name, found):
        raise EnvironmentLacking(f"{path} is version {text(found)}, which moorage cannot use", HINT)
    return path
