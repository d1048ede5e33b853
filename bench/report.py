"""What every bench reports: the machine, versions, commit and date beside the figures, and targets that can be failed.

A figure alone says little, so each bench measures the machine's own limit in the same run and sets targets as shares of
it where it can. `Report.write` lays ``bench/results/<bench>.json``; `Report.show` prints a table.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

import moorage

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


class Target(msgspec.Struct, frozen=True):
    """``value op target``, such as 0.93 >= 0.8; `met` says whether that holds."""

    name: str
    value: float
    unit: str
    op: Literal["<=", ">="]
    target: float

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.op == "<=" else self.value >= self.target


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def spread(values: Iterable[float]) -> dict[str, float]:
    """``median``, ``min`` and ``max`` of repeated measurements: on a shared machine one number alone misleads."""
    found = sorted(values)
    return {"median": statistics.median(found), "min": found[0], "max": found[-1]}


def machine() -> dict[str, Any]:
    """Facts about this machine that figures depend on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = next((int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "kernel": platform.release(),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def gpu() -> dict[str, str]:
    """The first NVIDIA GPU and its driver, as ``nvidia-smi`` names them; empty without one."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return {}
    name, _, driver = done.stdout.splitlines()[0].partition(", ")
    return {"gpu": name, "driver": driver}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def versions(*packages: str) -> dict[str, str]:
    """Versions of python, moorage and ``packages`` (distribution names)."""
    found = {"python": platform.python_version(), "moorage": moorage.__version__}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def commit() -> str:
    """The commit of the source tree, with ``+`` when tracked files differ from it; empty outside a checkout."""
    try:
        run = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a bench. ``figures`` maps a name to a number or to a mapping of numbers; units stand in the names."""

    bench: str
    figures: dict[str, Any]
    targets: list[Target]
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    machine: dict[str, Any] = msgspec.field(default_factory=machine)
    commit: str = msgspec.field(default_factory=commit)
    date: str = msgspec.field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def write(self, folder: Path = RESULTS) -> Path:
        """Write ``<folder>/<bench>.json`` and return its path. A report without targets is an error."""
        assert self.targets, "a bench without a target cannot fail"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.bench}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
        return path

    def show(self, console: Console | None = None) -> None:
        """Print figures and targets."""
        # Here, since a machine that only measures need not have it.
        from rich.console import Console
        from rich.table import Table

        console = console or Console()
        table = Table(title=f"{self.bench} · {self.machine.get('cpu', '')} x {self.machine.get('cpus', '')}")
        table.add_column("figure")
        table.add_column("value", justify="right")
        for name, value in _flat(self.figures):
            table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else str(value))
        console.print(table)
        table = Table(title="targets")
        for column in ("target", "value", "wanted", "met"):
            table.add_column(column, justify="left" if column == "target" else "right")
        for target in self.targets:
            met = "[green]yes[/green]" if target.met else "[red]no[/red]"
            value, wanted = f"{target.value:,.3f} {target.unit}", f"{target.op} {target.target:g} {target.unit}"
            table.add_row(target.name, value, wanted, met)
        console.print(table)

    def met(self) -> bool:
        """Whether every target is met."""
        return all(target.met for target in self.targets)
