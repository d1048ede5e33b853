"""What the tests leave on the machine: processes, mounts, namespaces, links, cgroups, tables, captures in memory.

Two ways to look. *Own*: what can be traced to this run, by a variable that all its processes inherit and by the names
of what it made (`made`); right on a machine where others work too. *All*: everything that was not there when the
run began; for a machine on which nothing else runs (``CI`` or ``MOORAGE_TEST_ALONE`` is set).

The run is judged once, when all of its processes have ended: while one of several still tests, what it has there is no
leftover. What a run that was broken off left is removed (`tests.support.removal`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import msgspec

from moorage.dev import layout, sweep
from moorage.dev.processes import arguments, everyone
from moorage.errors import MoorageError
from moorage.runtime import programs
from moorage.worker.network.names import cluster_prefix, table_name

#: Names this run in the environment of every process that it starts.
TOKEN_VARIABLE = "MOORAGE_TEST_RUN"
#: A file to which every process of the run writes what it makes, a line of JSON each.
MADE_VARIABLE = "MOORAGE_TEST_MADE"
WAIT_SECONDS = 10.0


class Made(msgspec.Struct, frozen=True):
    """Something of a name of its own. ``folder``: where all its files lie."""

    name: str
    folder: str = ""

    def patterns(self) -> list[str]:
        """Regular expressions that find its name in the entries of `machine`."""
        return [
            layout.cluster_id(self.name),
            rf"moorage-(test-)?{self.name}/",
            rf"moorage-(test-)?{self.name}$",
            table_name(self.name),
            rf"(?<=^link ){cluster_prefix(self.name)}",
            rf"(?<=^namespace ){cluster_prefix(self.name)}",
            rf"(?<=^namespace ){self.name}",
            rf"(?<=^memory moorage-){self.name}-",
        ]


#: What this process made.
own: set[Made] = set()


def made(name: str, folder: Path | None = None) -> None:
    """Write down what is about to be made."""
    entry = Made(name, str(folder or ""))
    own.add(entry)
    if path := os.environ.get(MADE_VARIABLE):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(entry) + b"\n")
        finally:
            os.close(descriptor)


def made_by_run() -> set[Made]:
    """What all processes of the run made."""
    path = Path(os.environ.get(MADE_VARIABLE, "/nowhere"))
    lines = path.read_bytes().splitlines() if path.exists() else []
    return own | {msgspec.json.decode(line, type=Made) for line in lines}


def _links() -> set[str]:
    return {f"link {path.name}" for path in Path("/sys/class/net").iterdir()}


def _namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {f"namespace {path.name}" for path in folder.iterdir()} if folder.exists() else set()


def _tables() -> set[str]:
    try:
        nft = programs.find("nft")
    except MoorageError:
        return set()
    answer = subprocess.run([str(nft), "-j", "list", "tables"], capture_output=True, text=True, check=True)
    tables = [entry["table"] for entry in json.loads(answer.stdout)["nftables"] if "table" in entry]
    return {f"table {table['family']} {table['name']}" for table in tables}


def _mounts() -> set[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = {line.split(" ")[4] for line in lines}
    # A namespace is counted as such.
    return {f"mount {point}" for point in points if not point.startswith("/run/netns")}


def _cgroups() -> set[str]:
    found = set()
    for root in sweep.hierarchies():
        for group in root.iterdir():
            if group.name.startswith("moorage"):
                found |= {f"cgroup {path}" for path in sweep.tree(group)}
    return found


def _memory() -> set[str]:
    return {f"memory {path.name}" for path in Path("/dev/shm").iterdir() if path.name.startswith("moorage")}


def processes(token: str) -> dict[int, str]:
    """The processes of a run but this one, by pid, with their command lines."""
    found = {}
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    for pid in everyone():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        words = " ".join(arguments(pid))
        # Python's own tracker of shared memory ends with the test run itself.
        tracker = "multiprocessing.resource_tracker" in words
        if wanted in environment and pid != os.getpid() and state not in "ZX" and not tracker:
            found[pid] = words[:150]
    return found


def machine() -> set[str]:
    """Everything of the kinds above that is on this machine, but processes."""
    return _links() | _namespaces() | _tables() | _mounts() | _cgroups() | _memory()


def of(things: set[Made], entries: set[str]) -> set[str]:
    """Those of ``entries`` that carry the name, or lie in the folder, of one of ``things``."""
    marks = [mark for thing in things for mark in thing.patterns()]
    marks += [rf"^mount {re.escape(thing.folder)}(/|$)" for thing in things if thing.folder]
    pattern = re.compile("|".join(marks)) if marks else None
    return {entry for entry in entries if pattern and pattern.search(entry)}


class Watch:
    """Looks at the machine now, and tells later what was left behind."""

    def __init__(self, token: str, folder: Path) -> None:
        self.token = token
        self.folder = folder  # where the run's own files lie: mounts in it are its own
        self._alone = bool(os.environ.get("CI") or os.environ.get("MOORAGE_TEST_ALONE"))
        self._before = machine()

    def _left(self) -> set[str]:
        new = machine() - self._before
        if not self._alone:
            own_mounts = {entry for entry in new if entry.startswith(f"mount {self.folder}")}
            new = of(made_by_run(), new) | own_mounts
        return new | {f"process {pid} {words}" for pid, words in processes(self.token).items()}

    def leftovers(self) -> list[str]:
        """What is left behind, after what is about to end was given the time to."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return sorted(left)
