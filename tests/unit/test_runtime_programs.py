"""Which program is taken, and which versions are new enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from moorage.errors import EnvironmentLacking
from moorage.runtime import programs
from moorage.runtime.install import install
from moorage.runtime.programs import Version, find, new_enough, parse_version


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("criu", "Version: 4.2.1\nGitID: 0\n", (4, 2, 1)),
        ("criu", "Version: 4.2\n", (4, 2)),
        ("runc", "runc version 1.3.6+ds1\ncommit: 1.3.6\nspec: 1.2.1\n", (1, 3, 6)),
        ("runc", "runc version 1.2.0-rc.1\n", (1, 2, 0)),
        ("etcd", "etcd Version: 3.5.30\nGit SHA: x\nGo Version: go1.26.2\n", (3, 5, 30)),
        ("etcdctl", "etcdctl version: 3.5.30\nAPI version: 3.5\n", (3, 5, 30)),
        ("etcdutl", "etcdutl version: 3.5.30\nAPI version: 3.5\n", (3, 5, 30)),
        ("nft", "nftables v1.1.7 (Commodore Bullmoose #8)", (1, 1, 7)),
        ("ip", "ip utility, iproute2-6.1.0, libbpf 1.1.0", (6, 1, 0)),
        ("ss", "ss utility, iproute2-7.3.0", (7, 3, 0)),
        ("tar", "tar (GNU tar) 1.34\nCopyright (C) 2021\n", (1, 34)),
        ("runc", "segmentation fault", None),
    ],
)
def test_versions_are_read_from_what_the_programs_print(name: str, text: str, version: Version | None) -> None:
    assert parse_version(name, text) == version


@pytest.mark.parametrize(
    ("name", "version", "enough"),
    [
        ("criu", (4, 1, 1), False),
        ("criu", (4, 2), True),
        ("criu", (5, 0), True),
        ("runc", (1, 1, 15), False),
        ("runc", (1, 2, 7), False),
        ("runc", (1, 2, 8), True),
        ("runc", (1, 3, 2), False),
        ("runc", (1, 3, 3), True),
        ("runc", (1, 4), True),
        ("etcd", (3, 3, 25), False),
        ("etcd", (3, 4, 23), True),
        ("etcd", (3, 5, 0), False),
        ("etcd", (3, 5, 2), False),
        ("etcd", (3, 5, 3), True),
        ("etcd", (3, 6, 1), True),
        ("nft", (0, 9), True),
    ],
)
def test_old_and_unsafe_versions_are_told_from_good_ones(name: str, version: Version, enough: bool) -> None:
    assert new_enough(name, version) is enough


def program(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing installed: folders for the explicit runtime, the default one and PATH."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(programs, "_SYSTEM_FOLDERS", ())
    monkeypatch.setattr(programs, "DEFAULT_RUNTIME", str(tmp_path / "default"))
    monkeypatch.delenv("MOORAGE_RUNTIME", raising=False)
    return tmp_path


def test_the_explicit_runtime_comes_first_then_the_default_then_path(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = program(machine / "path", "criu", "Version: 4.2")
    assert find("criu") == own
    default = program(machine / "default/bin", "criu", "Version: 4.2")
    assert find("criu") == default
    monkeypatch.setenv("MOORAGE_RUNTIME", str(machine / "explicit"))
    assert find("criu") == default  # the explicit one lacks it
    explicit = program(machine / "explicit/bin", "criu", "Version: 4.2")
    assert find("criu") == explicit


def test_a_configured_runtime_gives_way_to_the_environment(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOORAGE_RUNTIME", "/elsewhere")
    programs.use(str(machine / "configured"))
    assert programs.prefixes()[0] == Path("/elsewhere")
    monkeypatch.delenv("MOORAGE_RUNTIME")
    programs.use(str(machine / "configured"))
    configured = program(machine / "configured/bin", "criu", "Version: 4.2")
    assert find("criu") == configured


def test_a_program_that_is_nowhere_is_named_with_the_way_out(machine: Path) -> None:
    with pytest.raises(EnvironmentLacking, match="runc is not installed") as caught:
        find("runc")
    assert "moorage runtime install" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "says", "said"),
    [
        ("criu", "Version: 3.17", "3.17"),
        ("etcd", "etcd Version: 3.5.1", "3.5.1"),
        ("runc", "no version at all", "unknown"),
    ],
)
def test_a_program_on_path_that_is_too_old_is_not_used(machine: Path, name: str, says: str, said: str) -> None:
    program(machine / "path", name, says)
    with pytest.raises(EnvironmentLacking, match=f"version {said}"):
        find(name)


@pytest.mark.parametrize(
    ("name", "says", "said"),
    [("criu", "Version: 3.17", "is version 3.17"), ("nft", "Exec format error", "does not run")],
)
def test_what_is_required_is_looked_at_in_a_runtime_folder_too(machine: Path, name: str, says: str, said: str) -> None:
    path = program(machine / "default/bin", name, says)
    assert find(name) == path
    with pytest.raises(EnvironmentLacking, match=f"{path} {said}") as caught:
        programs.require(name)
    assert "moorage runtime install" in caught.value.hint
    path.unlink()
    sound = program(machine / "default/bin", "criu", "Version: 4.2")
    assert programs.require("criu") == sound


def test_a_version_is_asked_anew_when_the_program_was_replaced(machine: Path) -> None:
    path = program(machine / "path", "criu", "Version: 4.1")
    assert programs.version("criu", path) == (4, 1)
    path.unlink()
    program(machine / "path", "criu", "Version: 4.2")
    assert programs.version("criu", path) == (4, 2)
    assert programs.version("criu", machine / "nothing") is None


def test_an_installation_that_fails_says_why_in_the_scripts_own_words(tmp_path: Path) -> None:
    sources = tmp_path / "broken.sources"
    sources.write_text("Types: deb\nURIs: file:/nowhere\nSuites: sid\nComponents: main\n")
    (tmp_path / "a-file").touch()
    with pytest.raises(EnvironmentLacking, match="cannot be written"):
        install(prefix=tmp_path / "a-file" / "runtime", sources=sources)
    assert not (tmp_path / "runtime").exists()
