"""Files for the output of each rank, as torchrun's ``--log-dir``, ``--redirects`` and ``--tee`` ask for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moorage.errors import UsageError

OUT, ERR = 1, 2


def outputs(text: str, per_pod: int, flag: str) -> dict[int, int]:
    """``3``, or ``0:1,1:2``: for each local rank a mask of 1 (stdout) and 2 (stderr). Raises `UsageError`."""
    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(per_pod), int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{flag} {text!r} is not 0, 1, 2, 3 or RANK:N,…")
    given = {int(rank): int(mask) for rank, mask in (part.split(":") for part in text.split(","))}
    return {rank: given.get(rank, 0) for rank in range(per_pod)}


class Destination(NamedTuple):
    """Where one stream of a rank goes: a file (empty: none), and whether it is shown as well."""

    path: str = ""
    shown: bool = True


class RankFiles:
    """Opens each file when the first byte for it comes. ``filters``: words of lines that go to a common file too."""

    def __init__(
        self,
        destinations: Mapping[tuple[int, bool], Destination],
        *,
        filters: tuple[Sequence[str], Sequence[str]] = ((), ()),
        filtered: tuple[str, str] = ("", ""),
    ) -> None:
        self._destinations = destinations
        self._filters = filters
        self._filtered = filtered
        self._open: dict[str, BinaryIO] = {}
        self._rest: dict[tuple[int, bool], bytes] = {}

    def shown(self, rank: int, stderr: bool) -> bool:
        """Whether this stream is printed."""
        return self._destinations.get((rank, stderr), Destination()).shown

    def write(self, rank: int, stderr: bool, data: bytes) -> None:
        """Take a piece of output."""
        if path := self._destinations.get((rank, stderr), Destination()).path:
            self._append(path, data)
        words, target = self._filters[stderr], self._filtered[stderr]
        if not (words and target):
            return
        whole, newline, rest = (self._rest.pop((rank, stderr), b"") + data).rpartition(b"\n")
        self._rest[rank, stderr] = rest
        for line in (whole + newline).splitlines(keepends=True):
            if any(word.encode() in line for word in words):
                self._append(target, line)

    def _append(self, path: str, data: bytes) -> None:
        if path not in self._open:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._open[path] = Path(path).open("ab")  # noqa: SIM115 - closed by `close`
        self._open[path].write(data)
        self._open[path].flush()

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def in_folder(
    folder: Path, *, pods: int, per_pod: int, redirects: Mapping[int, int], tee: Mapping[int, int]
) -> dict[tuple[int, bool], Destination]:
    """``<folder>/<rank>/stdout.log`` and ``stderr.log``, with ranks counted over all pods."""
    found: dict[tuple[int, bool], Destination] = {}
    for rank in range(pods * per_pod):
        local = rank % per_pod
        for stderr, bit, name in ((False, OUT, "stdout.log"), (True, ERR, "stderr.log")):
            if (redirects.get(local, 0) | tee.get(local, 0)) & bit:
                only = redirects.get(local, 0) & bit and not tee.get(local, 0) & bit
                found[rank, stderr] = Destination(str(folder / str(rank) / name), not only)
    return found


def plugged_in(
    name: str,
    log_dir: str,
    *,
    redirects: str,
    tee: str,
    only_local: Sequence[int],
    envs: Sequence[dict[int, dict[str, str]]],
) -> tuple[dict[tuple[int, bool], Destination], tuple[str, str]]:
    """What a plug-in of torchrun's (entry point ``torchrun.logs_specs``) says; ``envs``: of each pod, by local rank.

    Returns the destinations and the files for filtered lines. Raises `UsageError` if there is no such plug-in.
    """
    entries = metadata.entry_points(group="torchrun.logs_specs", name=name)
    if not entries:
        raise UsageError(f"--logs-specs {name}: no such plug-in", "install one with an entry point torchrun.logs_specs")
    from torch.distributed.elastic.multiprocessing.api import Std  # type: ignore[import-not-found, unused-ignore]

    specs: Any = next(iter(entries)).load()(
        log_dir=log_dir or None,
        redirects=Std.from_str(redirects),
        tee=Std.from_str(tee),
        local_ranks_filter=set(only_local) or None,
    )
    found: dict[tuple[int, bool], Destination] = {}
    filtered = ("", "")
    for pod, environment in enumerate(envs):
        told = specs.reify(environment)
        for local in environment:
            rank = pod * len(environment) + local
            for stderr, paths, tees in (
                (False, told.stdouts, told.tee_stdouts),
                (True, told.stderrs, told.tee_stderrs),
            ):
                if path := paths.get(local, ""):
                    found[rank, stderr] = Destination(path, local in tees)
        filtered = (getattr(told, "filtered_stdout", "") or "", getattr(told, "filtered_stderr", "") or "")
    return found, filtered
