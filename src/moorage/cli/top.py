"""`moorage top`: nodes and jobs as they are now, anew every second."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from moorage.cli.cluster import node_state
from moorage.cli.options import Output, client, output_format
from moorage.cli.output import age, bytes_text, line
from moorage.cli.values import seconds
from moorage.errors import DeadlineExceeded, Unavailable, UsageError

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


#: A picture that stands still says so after this.
_LIVE_PATIENCE_SECONDS = 3.0
#: Phases in which a job needs nobody's eye.
_STEADY = ("running", "checkpointing", "finished", "stopped")
#: The columns of the jobs, and which go first where the terminal is narrow; job, phase and reason always stay.
_JOB_TITLES = ("job", "phase", "nodes", "cores", "output/s", "restarts", "checkpoint", "age")
_LEAVE_FIRST = ("output/s", "checkpoint", "age", "cores", "restarts", "nodes")
_REASON_LEAST = 24
_NODES_SHOWN = 2


def render(view: View, width: int = 0, height: int = 0, note: str = "") -> RenderableType:
    """The picture as tables. ``width`` and ``height`` in characters, 0: no limit. ``note``: beside it.

    Where it is too small, columns are left out rather than names cut, and what needs an eye stays on top.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(titles: list[str]) -> Table:
        made = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for title in titles:
            made.add_column(title.upper(), overflow="ellipsis", no_wrap=True)
        return made

    jobs, more_jobs, nodes, more_nodes = _shown(view, height)
    node_table = table(["node", "state", "pods", "cores", "gpus", "memory"])
    for node in nodes:
        node_table.add_row(
            node.node,
            Text(node.state, style={"ready": "green", "lost": "bold red"}.get(node.state, "yellow")),
            f"{node.pods} of {node.slots}" if node.slots else str(node.pods),
            f"{node.cores:.2f} of {node.cpus}",
            str(node.gpus),
            bytes_text(node.memory_bytes),
        )
    titles, rows, room = _columns([_cells(job) for job in jobs], width)
    job_table = table([*titles, "reason"])
    for job, row in zip(jobs, rows, strict=True):
        row[1] = Text(str(row[1]), style=_COLOURS.get(job.phase, ""))
        why = job.reason.removeprefix(f"Job {job.job} ")
        job_table.add_row(*row, why if not room or len(why) <= room else f"{why[: room - 1]}…")
    clock = time.strftime("%H:%M:%S", time.localtime(view.time))
    head = Text(f"moorage {clock}   {len(view.nodes)} nodes, {len(view.jobs)} jobs")
    if note:
        head.append(f"   {note}", style="bold red")
    parts: list[RenderableType] = [head, node_table]
    if more_nodes:
        parts.append(Text(f"… and {more_nodes} more nodes: moorage nodes"))
    parts.append(job_table)
    if more_jobs:
        parts.append(Text(f"… and {more_jobs} more jobs: moorage jobs"))
    return Group(*parts)


def _shown(view: View, height: int) -> tuple[list[JobRow], int, list[NodeRow], int]:
    """The jobs and nodes for which there is room, what needs an eye first, and how many are left out."""
    jobs = sorted(view.jobs, key=lambda job: job.phase in _STEADY)
    nodes = view.nodes
    room = height - 12 if height else len(jobs) + len(nodes)  # heads, rules, blank lines and the two remarks
    if len(jobs) + len(nodes) > room:
        for_nodes = max(3, room // 2, room - len(jobs))
        if len(nodes) > for_nodes:
            nodes = sorted(nodes, key=lambda node: node.state == "ready")[:for_nodes]
        jobs = jobs[: max(3, room - len(nodes))]
    return jobs, len(view.jobs) - len(jobs), nodes, len(view.nodes) - len(nodes)


def _cells(job: JobRow) -> dict[str, str]:
    where = job.nodes[:_NODES_SHOWN] + ([f"+{len(job.nodes) - _NODES_SHOWN}"] if len(job.nodes) > _NODES_SHOWN else [])
    return {
        "job": job.job,
        "phase": job.phase,
        "nodes": ",".join(where),
        "cores": f"{job.cores:.2f}",
        "output/s": bytes_text(job.output_bytes_per_second),
        "restarts": str(job.restarts),
        "checkpoint": job.checkpoint,
        "age": age(job.created),
    }


def _columns(cells: list[dict[str, str]], width: int) -> tuple[list[str], list[list[Any]], int]:
    """The columns that fit beside a reason of readable width, their cells, and the width of the reason (0: any)."""
    titles = list(_JOB_TITLES)

    def room() -> int:
        wide = [max([len(title), *(len(row[title]) for row in cells)]) for title in titles]
        return width - sum(wide) - 3 * len(wide) - 2  # as rich lays them out

    for title in _LEAVE_FIRST:
        if not width or room() >= _REASON_LEAST:
            break
        titles.remove(title)
    return titles, [[row[title] for title in titles] for row in cells], max(1, room()) if width else 0


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    interval: Annotated[str, typer.Option("--interval", "-n", help="Time between two looks.")] = "1s",
    output: Output = None,
) -> None:
    """A live view of nodes and jobs; q or Ctrl-C ends it. In a pipe, or as JSON, one line for each look."""
    form = output_format(output)
    pause = seconds(interval, "--interval")
    if pause < 0.1:
        raise UsageError(f"--interval {interval} is too short", "the least is 100ms")
    live = form == "table" and not once and sys.stdout.isatty()
    with client(patience=_LIVE_PATIENCE_SECONDS) if live else client() as api:
        rates = Rates()
        if once:
            _look(api, rates)
            time.sleep(min(pause, 1.0))  # rates need two looks
            _print(_look(api, rates), form)
        elif live:
            with contextlib.suppress(KeyboardInterrupt):  # that is how it ends
                _live(api, rates, pause)
        else:
            while True:
                _print(_look(api, rates), form)
                time.sleep(pause)


def _look(api: Client, rates: Rates) -> View:
    return picture(api.nodes(), api.jobs(), rates, time.time())


def _print(view: View, form: str) -> None:
    if form != "table":
        line(view, form, "")
        return
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=10_000)
    console.print(render(view, console.width if sys.stdout.isatty() else 0))


def _live(api: Client, rates: Rates, pause: float) -> None:
    """Until Ctrl-C or q. A coordinator that does not answer for a while, as when another one takes over, is only noted:
    the picture stays as it was."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    view, note = _look(api, rates), ""
    with _keys() as quits, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(render(view, console.width, console.height, note), refresh=True)
            if quits(pause):
                return
            try:
                view, note = _look(api, rates), ""
            except (Unavailable, DeadlineExceeded) as error:
                note = f"as it was: {error.message}"


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """``quits(seconds)`` waits so long for the key q; whether it came. The terminal is put back as it was."""
    if not sys.stdin.isatty():
        over = threading.Event()  # nobody sets it
        yield over.wait
        return
    import select
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def quits(pause: float) -> bool:
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0 and select.select([descriptor], [], [], left)[0]:
            pressed = os.read(descriptor, 64)
            if b"q" in pressed.lower() or not pressed:
                return True
        return False

    tty.setcbreak(descriptor)
    try:
        yield quits
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
