"""What a package of the runtime's programs must bring: nothing may be looked for outside of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PREFIX = Path("/opt/moorage/runtime-1")


@pytest.fixture(scope="module")
def packages() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "packages.py"
    spec = importlib.util.spec_from_file_location("moorage_tools_packages", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_closed_set_is_whole(packages: ModuleType) -> None:
    program = packages.Program
    files = {
        "bin/criu": program(f"{PREFIX}/lib/ld.so.2", f"{PREFIX}/lib", ("libc.so.6", "libnet.so.9")),
        "bin/runc": program(f"{PREFIX}/lib/ld.so.2", f"{PREFIX}/lib", ("libc.so.6",)),
        "lib/libnet.so.9": program("", "", ("libc.so.6",)),
        "lib/libc.so.6": program("", "", ("ld.so.2",)),
        "lib/ld.so.2": program("", "", ()),
    }
    assert packages.check(files, PREFIX) == []


def test_every_open_end_is_named(packages: ModuleType) -> None:
    program = packages.Program
    files = {
        "bin/host": program("/lib64/ld.so.2", "", ("libc.so.6",)),
        "bin/far": program(f"{PREFIX}/lib/ld.so.9", f"{PREFIX}/lib", ("libmissing.so.1",)),
        "lib/libc.so.6": program("", "", ("libgone.so",)),
    }
    wrong = packages.check(files, PREFIX)
    assert wrong == [
        "bin/far: its interpreter ld.so.9 is not in the package",
        "bin/far: it needs libmissing.so.1, which is not in the package",
        "bin/host: its interpreter is /lib64/ld.so.2",
        "bin/host: it looks for libraries in the places of the host",
        "lib/libc.so.6: it needs libgone.so, which is not in the package",
    ]


def test_the_control_file_names_what_the_host_must_bring(packages: ModuleType) -> None:
    text = packages.control("4.2.1+moorage1", "amd64", 1000, ["runc", "criu"])
    assert "Depends: iproute2, tar\n" in text
    assert text.endswith(" criu, runc.\n")


@pytest.mark.root
def test_the_installed_programs_make_a_whole_tree_that_runs_elsewhere(packages: ModuleType, tmp_path: Path) -> None:
    prefix = tmp_path / "elsewhere"
    files = packages.lay(packages.DEFAULT_PREFIX, prefix, prefix)
    assert {"bin/criu", "bin/runc"} <= set(files)
    assert packages.version_of(prefix).startswith("4.")
