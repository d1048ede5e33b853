"""`moorage top`: nodes and jobs as they are now, anew every second."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from moorage.cli.cluster import node_state
from moorage.cli.options import Output, client, output_format
from moorage.cli.output import age, bytes_text, line
from moorage.cli.values import seconds
from moorage.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from moorage.coordinator.client import Client, JobInfo, NodeInfo

_COLOURS = {"running": "green", "checkpointing": "cyan", "restoring": "yellow", "parked": "blue", "failed": "red"}


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job: processor use in cores over the last interval, output in bytes a second."""

    job: str
    phase: str
    nodes: list[str]
    pods: int
    cores: float
    output_bytes_per_second: float
    restarts: int
    checkpoint: str
    reason: str
    created: float


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node and what pods use of it."""

    node: str
    state: str
    pods: int
    slots: int
    cpus: int
    cores: float
    gpus: int
    memory_bytes: int


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One picture. ``time``: seconds since the epoch."""

    time: float
    nodes: list[NodeRow]
    jobs: list[JobRow]


class Rates:
    """Differences of counters between two looks."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, int], tuple[float, float, int]] = {}

    def take(self, jobs: list[JobInfo], now: float) -> dict[tuple[str, int], tuple[float, float]]:
        """Cores and bytes a second of each (job, pod); 0 where nothing was known before."""
        found: dict[tuple[str, int], tuple[float, float]] = {}
        new: dict[tuple[str, int, int], tuple[float, float, int]] = {}
        for job in jobs:
            for pod in job.pods:
                key = (job.id, pod.pod, pod.incarnation)
                new[key] = (now, pod.cpu_seconds, pod.output_bytes)
                then, cpu, output = self._last.get(key, new[key])
                span = now - then
                rates = ((pod.cpu_seconds - cpu) / span, (pod.output_bytes - output) / span) if span > 0 else (0.0, 0.0)
                found[job.id, pod.pod] = (max(0.0, rates[0]), max(0.0, rates[1]))
        self._last = new
        return found


def picture(nodes: list[NodeInfo], jobs: list[JobInfo], rates: Rates, now: float) -> View:
    """Put a view together. Pure but for what ``rates`` remembers."""
    of = rates.take(jobs, now)
    on_node: dict[str, float] = {}
    rows = []
    for job in jobs:
        for pod in job.pods:
            on_node[pod.node] = on_node.get(pod.node, 0.0) + of[job.id, pod.pod][0]
        mine = [of[job.id, pod.pod] for pod in job.pods]
        rows.append(
            JobRow(
                job=job.name or job.id,
                phase=job.phase,
                nodes=list(dict.fromkeys(pod.node for pod in job.pods if pod.node)),
                pods=len(job.pods),
                cores=round(sum(cores for cores, _ in mine), 3),
                output_bytes_per_second=round(sum(output for _, output in mine), 1),
                restarts=job.restarts,
                checkpoint=job.latest_checkpoint,
                reason=job.reason,
                created=job.created,
            )
        )
    return View(
        time=now,
        nodes=[
            NodeRow(
                node=node.node,
                state=node_state(node),
                pods=node.pods,
                slots=node.slots,
                cpus=node.cpus,
                cores=round(on_node.get(node.node, 0.0), 3),
                gpus=len(node.gpus),
                memory_bytes=node.memory_bytes,
            )
            for node in nodes
        ],
        jobs=rows,
    )


def render(view: View) -> RenderableType:
    """The picture as tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(*titles: str) -> Table:
        made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", expand=True)
        for title in titles:
            made.add_column(title.upper(), overflow="ellipsis", no_wrap=True)
        return made

    nodes = table("node", "state", "pods", "cores", "gpus", "memory")
    for node in view.nodes:
        nodes.add_row(
            node.node,
            Text(node.state, style="green" if node.state == "ready" else "yellow"),
            f"{node.pods} of {node.slots}" if node.slots else str(node.pods),
            f"{node.cores:.2f} of {node.cpus}",
            str(node.gpus),
            bytes_text(node.memory_bytes),
        )
    jobs = table("job", "phase", "nodes", "cores", "output/s", "restarts", "checkpoint", "age", "reason")
    for job in view.jobs:
        jobs.add_row(
            job.job,
            Text(job.phase, style=_COLOURS.get(job.phase, "")),
            ",".join(job.nodes),
            f"{job.cores:.2f}",
            bytes_text(job.output_bytes_per_second),
            str(job.restarts),
            job.checkpoint,
            age(job.created),
            job.reason,
        )
    clock = time.strftime("%H:%M:%S", time.localtime(view.time))
    return Group(Text(f"moorage {clock}   {len(view.nodes)} nodes, {len(view.jobs)} jobs"), nodes, jobs)


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval: Annotated[str, typer.Option("--interval", "-n", help="Time between two looks.")] = "1s",
    output: Output = None,
) -> None:
    """A live view of nodes and jobs; Ctrl-C ends it. In a pipe, or as JSON, one line for each look."""
    form = output_format(output)
    pause = seconds(interval, "--interval")
    if pause < 0.1:
        raise UsageError(f"--interval {interval} is too short", "the least is 100ms")
    with client() as api:
        rates = Rates()
        if once:
            _look(api, rates)
            time.sleep(min(pause, 1.0))  # rates need two looks
            _print(_look(api, rates), form)
        elif form != "table" or not sys.stdout.isatty():
            while True:
                _print(_look(api, rates), form)
                time.sleep(pause)
        else:
            with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
                _live(api, rates, pause)


def _look(api: Client, rates: Rates) -> View:
    return picture(api.nodes(), api.jobs(), rates, time.time())


def _print(view: View, form: str) -> None:
    if form != "table":
        line(view, form, "")
        return
    from rich.console import Console

    (Console() if sys.stdout.isatty() else Console(width=160)).print(render(view))


def _live(api: Client, rates: Rates, pause: float) -> None:
    from rich.live import Live

    live: Any
    with Live(render(_look(api, rates)), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(pause)
            live.update(render(_look(api, rates)), refresh=True)
