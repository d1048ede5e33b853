"""The actor on each bundle: it finds this machine's worker, and tells when that is gone. It runs nothing of the job."""

from __future__ import annotations

import asyncio
import getpass
import os
from pathlib import Path
from typing import Any

import msgspec

from moorage import localsocket
from moorage.errors import EnvironmentLacking, MoorageError, UsageError

#: Says what moorage calls this machine, where neither a label nor the only socket does.
VARIABLE = "MOORAGE_NODE"
_PERIOD_SECONDS = 2.0
_HOW = (
    "on that machine: pip install moorage, then `moorage worker` as root (docs/install.md has the service); "
    "`moorage doctor` says what it lacks"
)


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle's machine. ``node``: its name in moorage; ``pid``: of the supervisor."""

    node: str
    cluster: str
    ray_node: str
    pid: int


def find_worker(cluster: str, label: str, *, folder: Path = localsocket.FOLDER) -> Path:
    """The socket of this machine's worker. ``label``: what the Ray node calls it, may be empty.

    Raises `EnvironmentLacking` (none is there), `UsageError` (there are several, and nothing says which).
    """
    name = label or os.environ.get(VARIABLE, "")
    if name:
        path = folder / f"{cluster}-{name}.sock"
        if not path.exists():
            raise EnvironmentLacking(f"node {name} of cluster {cluster} has no worker here: {path} is not there", _HOW)
        return path
    found = sorted(folder.glob(f"{cluster}-*.sock"))
    if not found:
        raise EnvironmentLacking(f"no worker of cluster {cluster} runs here: nothing in {folder}", _HOW)
    if len(found) > 1:
        names = ", ".join(path.stem.removeprefix(f"{cluster}-") for path in found)
        raise UsageError(
            f"several workers of cluster {cluster} run here: {names}",
            "say which this Ray node is: ray start --labels moorage-node=NODE",
        )
    return found[0]


class Supervisor:
    """One for each bundle."""

    def __init__(self, cluster: str, label: str, ray_node: str) -> None:
        self._cluster = cluster
        self._label = label
        self._ray_node = ray_node
        self._path: Path | None = None

    async def join(self, files: dict[str, bytes], folder: str) -> Joined:
        """Find the worker, and lay ``files`` (path → content, 0600) and the working directory on this machine.

        Raises `EnvironmentLacking`, `UsageError`, `Unavailable`, `Forbidden`.
        """
        try:
            return await asyncio.to_thread(self._join, files, folder)
        except MoorageError as error:
            where = f"Ray node {self._ray_node[:8]} ({os.uname().nodename})"
            raise type(error)(f"{where}: {error.message}", error.hint) from None

    def _join(self, files: dict[str, bytes], folder: str) -> Joined:
        self._path = find_worker(self._cluster, self._label)
        answer = self._ask()
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            _write(Path(name), content)
        return Joined(node=answer["node"], cluster=answer["cluster"], ray_node=self._ray_node, pid=os.getpid())

    def _ask(self) -> dict[str, Any]:
        assert self._path is not None
        for answer in localsocket.ask(self._path, {"do": "node"}):
            if not answer.get("registered"):
                raise EnvironmentLacking(
                    f"the worker of node {answer['node']} is not registered with its cluster", "is etcd reachable?"
                )
            return answer
        raise EnvironmentLacking(f"the worker at {self._path} says nothing to {getpass.getuser()}", _HOW)

    async def watch(self) -> str:
        """Returns, with the reason, when the worker does not answer any more; until then never."""
        silent = 0
        while silent < 2:
            await asyncio.sleep(_PERIOD_SECONDS)
            try:
                await asyncio.to_thread(self._ask)
                silent = 0
            except MoorageError as error:
                silent += 1
                why = error.message
        return why

    async def pods(self) -> list[dict[str, Any]]:
        """The pods of this user on this machine, as its worker tells."""
        path = self._path
        return [] if path is None else await asyncio.to_thread(lambda: list(localsocket.ask(path, {"do": "pods"})))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    new.rename(path)
