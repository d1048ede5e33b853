"""The programs of ``tests/programs/state``: their names, what each is about, how they are built, what was found."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "programs" / "state"
#: What the tests have found, for `tools/what_is_saved.py`.
RESULTS = ROOT / "build" / "what-is-saved"
DRIVER = FOLDER / "driver.py"
#: The rows of what is refused, each with a test in tests/multinode/test_refusals.py.
REFUSED = (
    "FIFO with a process outside", "aio", "device from outside", "disk from outside", "file from outside",
    "io_uring", "lock with a process outside", "nested", "network from outside", "packet_socket",
    "pipe from outside", "process that moorage did not start", "raw_socket", "shared_client", "stopped",
    "sysv_outside", "traced", "unix socket to the outside", "unlinked_listener", "user_timeout",
)  # fmt: skip
#: Programs that need another pod, or the world outside, as their other end.
IN_TWO_PODS = ("outside", "pods_tcp", "pods_udp")
_APART = frozenset({"kit.py", "driver.py", "__init__.py", "kit.h"})
_HUGE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")


@functools.cache
def titles() -> dict[str, str]:
    """Name → what the program is about, from its first lines; sorted by name."""
    found = {}
    for path in FOLDER.iterdir():
        if path.name in _APART or not path.is_file():
            continue
        if path.suffix == ".py":
            found[path.stem] = ast.get_docstring(ast.parse(path.read_text())) or ""
        else:
            found[path.stem] = path.read_text().splitlines()[0].removeprefix("// ")
    return dict(sorted(found.items()))


def build() -> Path:
    """Compile what has to be compiled, once for each content; the folder that holds it.

    Fails the test when a compiler is missing: `make test` installs them (tools/language-packages.sh).
    """
    if built := os.environ.get("MOORAGE_STATE_BUILT"):
        return Path(built)  # on a machine without compilers
    sources = [path for path in sorted(FOLDER.iterdir()) if path.suffix in (".c", ".h", ".java", ".go")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    target = ROOT / "build" / "state-programs" / digest
    if target.exists():
        return target
    made = target.with_name(f"{digest}.{os.getpid()}")
    made.mkdir(parents=True)
    for path in sources:
        if path.suffix == ".c":
            _call("gcc", "-O1", "-pthread", "-o", str(made / path.stem), str(path))
        elif path.suffix == ".java":
            _call("javac", "-d", str(made), str(path))
        elif path.suffix == ".go":
            cache = {"GOCACHE": str(target.parent / "go-cache"), "GO111MODULE": "off", "GOFLAGS": "", "HOME": str(made)}
            _call("go", "build", "-o", str(made / path.stem), str(path), **cache)
    if shutil.which("node") is None:
        pytest.fail("node is missing: run tools/language-packages.sh, as `make test` does")
    try:
        made.rename(target)
    except OSError:  # another run was faster
        shutil.rmtree(made)
    return target


def _call(program: str, *arguments: str, **environment: str) -> None:
    if shutil.which(program) is None:
        pytest.fail(f"{program} is missing: run tools/language-packages.sh, as `make test` does")
    done = subprocess.run(
        [program, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.fail(f"{program} {' '.join(arguments)}: {done.stderr}")


@contextmanager
def huge_pages(wanted: int) -> Iterator[None]:
    """Reserve huge pages where the machine has them to give, and give them back."""
    try:
        before = int(_HUGE.read_text())
        _HUGE.write_text(str(before + wanted))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        _HUGE.write_text(str(before))


def record(table: str, rows: dict[str, dict[str, str]]) -> None:
    """Keep what a test has found. ``rows``: name → ``what``, ``result`` and ``note``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{table}.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
