"""Which NCCL libraries a job could open: those of Python packages, of the loader's cache, of paths in variables.

Reads the file system, runs `ldconfig -p`; starts nothing of the job's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

NAME: Final = "libnccl.so.2"
_PACKAGES: Final = (
    f"nvidia/*/lib/{NAME}*",  # nvidia-nccl-cu11, -cu12, -cu13
    f"*/lib/{NAME}*",  # torch with all of CUDA inside
    f"*/.data/lib/{NAME}*",  # cupy
    "*.libs/libnccl*.so*",  # what auditwheel has moved in
)
_SITES: Final = ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages")
#: Lists of folders, and names of files.
_FOLDER_VARIABLES: Final = ("LD_LIBRARY_PATH",)
_FILE_VARIABLES: Final = ("LD_PRELOAD", "VLLM_NCCL_SO_PATH", "SGLANG_NCCL_SO_PATH", "NCCL_SO_PATH")
_PREFIX_VARIABLES: Final = ("VIRTUAL_ENV", "CONDA_PREFIX")
_HOST_PREFIXES: Final = ("/usr", "/usr/local")


def find(
    paths: Sequence[str], environment: Mapping[str, str], *, root: Path = Path("/"), seen: Sequence[str] = ()
) -> list[str]:
    """Absolute real paths, as the pod has them, sorted; each file once, by each path that is no link.

    ``paths``: absolute paths of the command and what it needs (`pod_user.command_paths`). ``environment``: of the
    ranks. ``root``: the image, or the host's root. ``seen``: further files that are known.
    """
    candidates = [*_packages(paths, environment, root), *_cache(root), *_named(environment, root)]
    found = {real for path in candidates if (real := _real(path, root)) is not None}
    return sorted(found | set(seen))


def uncovered(pids: Iterable[int], files: Iterable[str], *, real: str) -> list[tuple[int, str]]:
    """Processes, by host pid, that have mapped an NCCL other than ``files``. ``real``: below it lie those that the
    proxy itself opens."""
    covered = set(files)
    found: dict[tuple[int, str], None] = {}
    for pid in pids:
        try:
            maps = Path("/proc", str(pid), "maps").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        for line in maps.splitlines():
            path = line.split(None, 5)[5:]
            if path and "/libnccl.so" in path[0] and path[0] not in covered and not path[0].startswith(real):
                found[pid, path[0]] = None
    return list(found)


def _packages(paths: Iterable[str], environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    prefixes = {Path(prefix) for prefix in _HOST_PREFIXES}
    for path in map(Path, paths):
        prefixes |= {path, path.parent.parent}  # a prefix itself, or a program in its bin
    prefixes |= {Path(environment[name]) for name in _PREFIX_VARIABLES if environment.get(name)}
    if home := environment.get("HOME"):
        prefixes.add(Path(home, ".local"))
    sites = [Path(entry) for entry in environment.get("PYTHONPATH", "").split(":") if entry.startswith("/")]
    for prefix in sorted(prefixes):
        if prefix == Path("/"):
            continue
        for pattern in _SITES:
            sites += [Path("/", site.relative_to(root)) for site in _inside(root, prefix).glob(pattern)]
    for site in dict.fromkeys(sites):
        for pattern in _PACKAGES:
            yield from _inside(root, site).glob(pattern)


def _cache(root: Path) -> Iterator[Path]:
    command = ["/sbin/ldconfig", "-p", *(["-r", str(root)] if root != Path("/") else [])]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return
    for line in listing.splitlines():
        name, _, path = line.partition(" => ")
        if name.split()[:1] == [NAME]:
            yield _inside(root, Path(path.strip()))


def _named(environment: Mapping[str, str], root: Path) -> Iterator[Path]:
    for name in _FOLDER_VARIABLES:
        for folder in environment.get(name, "").split(":"):
            if folder.startswith("/"):
                yield from _inside(root, Path(folder)).glob(f"{NAME}*")
    for name in _FILE_VARIABLES:
        for path in environment.get(name, "").replace(":", " ").split():
            if path.startswith("/") and Path(path).name.startswith("libnccl"):
                yield _inside(root, Path(path))


def _inside(root: Path, path: Path) -> Path:
    return root / str(path).lstrip("/")


def _real(path: Path, root: Path) -> str | None:
    """The file that a path leads to, as the pod has it; None when there is none, or it lies outside of the image."""
    try:
        real = path.resolve(strict=True)
        # Whoever names a file chooses what is mounted over: nothing that is no NCCL by its name.
        if real.name.startswith("libnccl") and real.is_file() and real.is_relative_to(root.resolve()):
            return str(Path("/", real.relative_to(root.resolve())))
    except OSError:
        pass
    return None
