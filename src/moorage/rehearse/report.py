"""What a rehearsal found, as JSON and for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from moorage.rehearse.compare import Compared, Difference, number_of, step_of
from moorage.rehearse.plot import Mark, Series
from moorage.rehearse.spec import Output


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One disturbance as it was: ``at`` seconds after the job ran. ``reached``: step of each rank when it was ordered.

    ``resumed``: the step of each rank right after it ran again; -1 where that is not known.
    """

    action: str
    at: float
    checkpoint: str = ""
    nodes: tuple[str, ...] = ()
    reached: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    pause_seconds: float = 0.0
    restore_seconds: float = 0.0
    note: str = ""  # why it did not come about


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole. ``proved``: it was restored at least once, and no rank began anew."""

    job: str
    equal: bool
    proved: bool
    seed: int
    ranks: int
    reference_seconds: float
    rehearsed_seconds: float
    disturbances: tuple[Done, ...]
    outputs: tuple[Compared, ...]
    first: Difference | None = None
    when: str = ""
    environment: dict[str, Any] = {}
    plot: str = ""


def when(first: Difference | None, done: Sequence[Done]) -> str:
    """Where in the run's story the first difference lies."""
    if first is None:
        return ""
    if first.step < 0:
        return "the file has no steps that could say when"
    before = "before anything was done to the job"
    saved: dict[str, int] = {}  # at which step the rank was when the checkpoint was asked for
    for one in done:
        if one.note:
            continue
        reached = one.reached[first.rank] if first.rank < len(one.reached) else -1
        begun = saved.get(one.checkpoint, reached)
        saved.setdefault(one.checkpoint, reached)
        if first.step >= begun:
            what = {"checkpoint": "the checkpoint", "back": "going back to", "move": "the move by"}[one.action]
            before = f"{first.step - begun} steps after {what} {one.checkpoint}, at {one.at:.1f} s"
            if begun < 0:
                before = f"after {what} {one.checkpoint}, at {one.at:.1f} s, when no step of rank {first.rank} was seen"
    return before


def series(outputs: Sequence[Output], found: Sequence[Compared], ranks: int, read: Any) -> list[Series]:
    """What can be plotted: of each rank's lines the first column with numbers that is not the step's."""
    plots: list[Series] = []
    for output in outputs:
        if output.kind != "lines":
            continue
        for rank in range(ranks if "{rank}" in output.path else 1):
            path = output.path.replace("{rank}", str(rank))
            sides = [(read(side, output.path, rank) or b"").decode(errors="replace").splitlines() for side in (0, 1)]
            steps, expected, got = _numbers(output, sides[0], sides[1])
            first = next((one.first for one in found if one.output == path and one.rank == rank and one.first), None)
            plots.append(
                Series(
                    title=path,
                    steps=steps,
                    expected=expected,
                    found=got,
                    differs=first.step if first is not None else -1,
                )
            )
    return plots


def _numbers(
    output: Output, left: Sequence[str], right: Sequence[str]
) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    nan = float("nan")
    steps: list[int] = []
    values: tuple[list[float], list[float]] = ([], [])
    for number, pair in enumerate(zip(left, right, strict=False), 1):
        steps.append(step_of(output, pair[0], number))
        for side, line in zip(values, pair, strict=True):
            fields = [text for column, text in enumerate(line.split()) if column != output.step]
            found = [value for text in fields if (value := number_of(text)) is not None]
            side.append(found[0] if found else nan)
    return tuple(steps), tuple(values[0]), tuple(values[1])


def marks(done: Sequence[Done]) -> list[Mark]:
    """Where in the steps the job was disturbed."""
    return [Mark(action=one.action, step=max(one.reached)) for one in done if one.reached and max(one.reached) >= 0]


def table(report: Report) -> str:
    """For a person at a terminal; the last line says ``equal: yes`` or ``equal: no``."""
    rows = [
        ("job", f"{report.job}, {report.ranks} rank{'s' * (report.ranks != 1)}, seed {report.seed}"),
        ("undisturbed", f"{report.reference_seconds:.1f} s"),
        ("rehearsed", f"{report.rehearsed_seconds:.1f} s"),
    ]
    for one in report.disturbances:
        rows.append((f"at {one.at:.1f} s", _told(one)))
    for compared in report.outputs:
        whose = "all ranks" if compared.rank < 0 else f"rank {compared.rank}"
        text = "equal" if compared.equal else f"DIFFERS: {compared.first}"
        if compared.worst:
            text += f" (largest distance {compared.worst:.3g})"
        rows.append((f"{compared.output}, {whose}", text))
    if report.first is not None:
        rows += [("first difference", str(report.first)), ("when", report.when)]
    if not report.proved:
        rows.append(("nothing is proved", "the job was not restored, or a rank began anew"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, f"equal: {'yes' if report.equal else 'no'}"])


def _told(one: Done) -> str:
    if one.note:
        return f"{one.action}: {one.note}"
    reached = f"step {', '.join(map(str, one.reached))}" if one.reached else "an unknown step"
    if one.action == "checkpoint":
        return f"checkpoint {one.checkpoint} at {reached}, the job stood still for {one.pause_seconds:.2f} s"
    resumed = f", on from step {', '.join(map(str, one.resumed))}" if any(step >= 0 for step in one.resumed) else ""
    verb = "back to" if one.action == "back" else "moved by"
    where = ", ".join(dict.fromkeys(one.nodes))
    return f"{verb} {one.checkpoint} at {reached}, to {where} in {one.restore_seconds:.2f} s{resumed}"


Say = Callable[[str], None]
