"""What the tests leave on the machine: processes, mounts, namespaces, links, cgroups, tables.

Two ways to look. *Own*: what can be traced to this run, by a variable that all its processes inherit and by the names
of the clusters that it made; right on a machine where others work too. *All*: everything that was not there when the
run began; for a machine on which nothing else runs (``CI`` or ``MOORAGE_TEST_ALONE`` is set).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

from moorage.dev import layout, sweep
from moorage.dev.processes import arguments, everyone
from moorage.errors import MoorageError
from moorage.runtime import programs
from moorage.worker.network.names import cluster_prefix, table_name

#: Names this run in the environment of every process that it starts.
TOKEN_VARIABLE = "MOORAGE_TEST_RUN"
WAIT_SECONDS = 10.0

#: Clusters that this run made: their names appear in what they leave.
clusters: set[str] = set()


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


def _own_processes(token: str) -> set[str]:
    found = set()
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
            found.add(f"process {pid} {words[:150]}")
    return found


def machine() -> set[str]:
    """Everything of the kinds above that is on this machine, but processes."""
    return _links() | _namespaces() | _tables() | _mounts() | _cgroups()


def _of_own_clusters(entries: set[str]) -> set[str]:
    """Those of ``entries`` that carry the name of a cluster of this run."""
    marks: list[str] = []
    for name in clusters:
        marks += [layout.cluster_id(name), f"moorage-{name}/", table_name(name)]
        marks += [rf"(?<=^link ){cluster_prefix(name)}", rf"(?<=^namespace ){cluster_prefix(name)}"]
    pattern = re.compile("|".join(marks)) if marks else None
    return {entry for entry in entries if pattern and pattern.search(entry)}


class Watch:
    """Looks at the machine now, and tells later what was left behind."""

    def __init__(self, token: str, folder: Path) -> None:
        self._token = token
        self._folder = folder  # where the run's own files lie: mounts in it are its own
        self._alone = bool(os.environ.get("CI") or os.environ.get("MOORAGE_TEST_ALONE"))
        self._before = machine()

    def _left(self) -> set[str]:
        new = machine() - self._before
        if not self._alone:
            own_mounts = {entry for entry in new if entry.startswith(f"mount {self._folder}")}
            new = _of_own_clusters(new) | own_mounts
        return new | _own_processes(self._token)

    def leftovers(self) -> list[str]:
        """What is left behind, after what is about to end was given the time to."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return sorted(left)
