"""Takes away what a test run left: one that was broken off, or whose processes were killed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

from moorage.dev import cluster as dev
from moorage.dev import sweep
from moorage.dev.processes import Identity, end, end_all, in_namespace
from moorage.errors import MoorageError
from moorage.runtime import programs
from tests.support import leftovers


def remove(token: str, folder: Path) -> None:
    """End all processes of the run, then remove what it made, and what is mounted in its folder. Idempotent."""
    end(found for pid in leftovers.processes(token) if (found := Identity.of(pid)))
    things = leftovers.made_by_run()
    for thing in things:
        if thing.folder and (Path(thing.folder) / "state" / "cluster.json").exists():
            with contextlib.suppress(MoorageError):
                dev.down(thing.name)
    left = leftovers.of(things, leftovers.machine())
    groups = [Path(entry.partition(" ")[2]) for entry in left if entry.startswith("cgroup ")]
    end_all(lambda: {pid for group in groups for pid in _members(group)})
    for group in sorted(groups, reverse=True):
        with contextlib.suppress(OSError):
            group.rmdir()
    for kind, _, name in sorted(entry.partition(" ") for entry in left):
        _remove(kind, name)
    for thing in things:
        if thing.folder:
            sweep.unmount_below(Path(thing.folder))
            shutil.rmtree(thing.folder, ignore_errors=True)
    sweep.unmount_below(folder)


def _members(group: Path) -> set[int]:
    try:
        return {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
    except OSError:
        return set()


def _remove(kind: str, name: str) -> None:
    if kind == "namespace":
        end_all(lambda: in_namespace(Path("/run/netns") / name))
        _call("ip", "netns", "delete", name)
    elif kind == "link":
        _call("ip", "link", "delete", name)
    elif kind == "table":
        family, _, table = name.partition(" ")
        _call("nft", "delete", "table", family, table)
    elif kind == "memory":
        shutil.rmtree(Path("/dev/shm") / name, ignore_errors=True)


def _call(program: str, *arguments: str) -> None:
    # What goes with something else that is removed is gone already.
    subprocess.run([str(programs.find(program)), *arguments], check=False, capture_output=True)
