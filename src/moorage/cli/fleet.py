"""Taking nodes out of service and back: cordon, uncordon, drain."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moorage.cli import completing
from moorage.cli.cluster import NODE_COLUMNS
from moorage.cli.options import DryRun, Output, client, confirm, output_format
from moorage.cli.output import line, progress, remark, write
from moorage.cli.values import human_seconds, seconds
from moorage.errors import AttemptAborted, DeadlineExceeded, NoCapacity

if TYPE_CHECKING:
    from moorage.coordinator.client import Client, DrainInfo, MoveInfo

Nodes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NODE...]", help="Nodes, by name.", autocompletion=completing.node_names),
]
Selector = Annotated[
    str, typer.Option("-l", "--selector", metavar="SELECTOR", help="Nodes with these labels: rack=7,zone in (a,b),!x.")
]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]


def cordon(
    nodes: Nodes = None,
    selector: Selector = "",
    reason: Annotated[str, typer.Option(help="Shown by `moorage show NODE`.")] = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Place nothing new on nodes; what runs there stays."""
    form = output_format(output)
    with client() as api:
        found = api.cordon(nodes or [], selector=selector, reason=reason, dry_run=dry_run)
        write(found, form, columns=NODE_COLUMNS)
    remark(_done([node.node for node in found], "cordoned", dry_run))


def uncordon(nodes: Nodes = None, selector: Selector = "", dry_run: DryRun = False, output: Output = None) -> None:
    """Take nodes into service again (also: undrain); calls off a drain that is at work there."""
    form = output_format(output)
    with client() as api:
        found = api.uncordon(nodes or [], selector=selector, dry_run=dry_run)
        write(found, form, columns=NODE_COLUMNS)
    remark(_done([node.node for node in found], "uncordoned", dry_run))


def _done(nodes: list[str], what: str, dry_run: bool) -> str:
    return f"{', '.join(nodes)} {'would be ' if dry_run else ''}{what}"


def drain(
    nodes: Nodes = None,
    selector: Selector = "",
    on_driver: Annotated[
        str, typer.Option("--on-driver", metavar="VERSION", help="Only nodes with this GPU driver (570: any 570.x).")
    ] = "",
    parallel: Annotated[int, typer.Option("--parallel", metavar="N", help="How many nodes at a time.")] = 1,
    timeout: Annotated[
        str,
        typer.Option("--timeout", "--deadline", metavar="DURATION", help="Begin no move after that (0: no end)."),
    ] = "0",
    homeless: Annotated[
        str,
        typer.Option(
            "--homeless",
            metavar="refuse|park|leave",
            help="Jobs with no other place: touch nothing, park, or leave.",
        ),
    ] = "refuse",
    yes: Yes = False,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Move every job off nodes, wave by wave; they stay cordoned until `moorage uncordon`.

    The plan is shown first, and nothing is touched if a job has no other place. Ctrl-C calls the drain off: moves that
    are under way end, none begins. The same command again goes on.
    """
    form = output_format(output)
    chosen: dict[str, Any] = {
        "nodes": nodes or [],
        "selector": selector,
        "on_driver": on_driver,
        "parallel": parallel,
        "timeout": seconds(timeout, "--timeout"),
        "homeless": homeless,
    }
    with client() as api:
        planned = api.drain(**chosen, dry_run=True)
        show_plan(planned, form, final=dry_run or (bool(planned.homeless) and homeless == "refuse"))
        if planned.homeless and homeless == "refuse":
            raise _homeless(planned)
        if dry_run:
            return
        confirm(f"Drain {', '.join(planned.nodes)}", yes=yes)
        started = api.drain(**chosen)
        if started.phase == "planned":  # somebody took the room meanwhile
            show_plan(started, form, final=True)
            raise _homeless(started)
        if _assignment(started) != _assignment(planned):
            remark("the fleet has changed meanwhile; this is what is done now:")
            show_plan(started, form, final=False)
        ended = _follow(api, started)
        cordoned = {node.node for node in api.nodes() if node.cordoned}  # `moorage uncordon` may have called it off
    _report(ended, [node for node in ended.nodes if node in cordoned], form)


def _assignment(plan: DrainInfo) -> dict[str, list[str]]:
    return {move.job: move.target for move in plan.moves}


def _homeless(plan: DrainInfo) -> NoCapacity:
    names = ", ".join(move.name for move in plan.homeless)
    return NoCapacity(
        f"no other place for {names}; nothing was touched",
        "the plan says why; or say --homeless park (they wait in the store) or --homeless leave",
    )


def show_plan(plan: DrainInfo, form: str, *, final: bool) -> None:
    """The plan as text; as data only when it is all that the command prints."""
    if form != "table":
        if final:
            write(plan, form)
        return
    out = sys.stdout if final else sys.stderr
    for number, wave in enumerate(plan.waves, 1):
        out.write(f"wave {number}: {', '.join(wave.nodes)}\n")
        for move in wave.moves:
            out.write(f"  {move.name}: {_where(move)}\n")
        if not wave.moves:
            out.write("  no job moves\n")
    for move in plan.homeless:
        out.write(f"no other place: {move.name} ({', '.join(dict.fromkeys(move.source))}): {move.reason}\n")
        for choice in move.choices:
            out.write(f"    {choice}\n")
    out.flush()


def _where(move: MoveInfo) -> str:
    if move.target:
        pairs = zip(move.source, move.target, strict=True)
        return ", ".join(f"{here} -> {there}" for here, there in pairs if here != there)
    return f"{', '.join(dict.fromkeys(move.source))}: {move.reason or 'is parked'}"


def _follow(api: Client, started: DrainInfo) -> DrainInfo:
    """Follow to the end; Ctrl-C calls it off, a second one leaves it to the coordinator."""
    told: dict[str, str] = {}
    with progress(f"drain {started.id}") as update:

        def show(drain: DrainInfo) -> None:
            done = sum(move.state not in ("waiting", "moving") for move in drain.moves)
            update(f"wave {drain.wave} of {len(drain.waves)}", done / len(drain.moves) if drain.moves else None)
            for move in [*drain.moves, *drain.homeless]:
                if told.get(move.job, "waiting") != move.state:
                    told[move.job] = move.state
                    remark(_sentence(move))

        try:
            return api.follow_drain(started.id, progress=show)
        except KeyboardInterrupt:
            remark("calling the drain off: moves that are under way end, none begins")
            api.cancel_drain(started.id)
        try:
            return api.follow_drain(started.id, progress=show)
        except KeyboardInterrupt:
            remark("the coordinator brings the moves that are under way to their end; the nodes stay cordoned")
            raise


def _sentence(move: MoveInfo) -> str:
    where = ", ".join(dict.fromkeys(move.placed))
    target = ", ".join(dict.fromkeys(move.target))
    why = f": {move.reason}" if move.reason else ""
    if move.state == "moved":
        return f"{move.name} runs on {where}" + (f", after {human_seconds(move.seconds)}" if move.seconds else "")
    words = {
        "waiting": "waits",
        "moving": f"is being checkpointed and {f'moved to {target}' if move.target else 'parked'}",
        "parked": "is parked",
        "ended": "has ended",
        "failed": "could not be moved and runs where it was",
        "left": "stays where it is",
    }
    return f"{move.name} {words[move.state]}{why}"


def _report(drain: DrainInfo, cordoned: list[str], form: str) -> None:
    if form != "table":
        line(drain, "json", "") if form == "json" else write(drain, form)
    else:
        moves = [*drain.moves, *drain.homeless]
        counts = {state: sum(move.state == state for move in moves) for state in dict.fromkeys(m.state for m in moves)}
        told = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no job was there"
        print(f"drain of {', '.join(drain.nodes)}: {drain.phase}; {told}")
        for move in moves:
            if move.state in ("failed", "left", "parked", "waiting"):
                print(f"  {_sentence(move)}")
                for choice in move.choices:
                    print(f"    {choice}")
    if cordoned:
        stay = "stays" if len(cordoned) == 1 else "stay"
        remark(f"{', '.join(cordoned)} {stay} cordoned until `moorage uncordon`")
    again = f"moorage drain {' '.join(drain.nodes)} goes on"
    if drain.phase == "cancelled":
        remark(f"{drain.reason}; {again}")
        raise typer.Exit(130)
    if drain.phase == "timed-out":
        raise DeadlineExceeded(drain.reason, again)
    if drain.phase == "incomplete":
        raise AttemptAborted(drain.reason, f"the summary says why and what can be done; {again}")
