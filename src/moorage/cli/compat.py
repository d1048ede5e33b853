"""`moorage compat`: would this checkpoint run on that node? And `moorage doctor --job`: what of it cannot be saved?"""

from __future__ import annotations

from typing import Annotated

import typer

from moorage.cli import completing
from moorage.cli.options import Output, client, local_output_format, output_format
from moorage.cli.output import progress, write
from moorage.errors import Incompatible, Refused, UsageError

_COLUMNS = [
    ("rule", lambda line: line.rule),
    ("verdict", lambda line: line.state),
    ("checkpoint", lambda line: line.wanted),
    ("node", lambda line: line.found),
    ("", lambda line: line.message),
]
_RULE_COLUMNS = [
    ("rule", lambda rule: rule.name),
    ("kind", lambda rule: "rule of four" if rule.group == "four" else "technical"),
    ("what must hold", lambda rule: rule.demand),
    ("why", lambda rule: rule.reason),
    ("the way out", lambda rule: rule.cure),
]
_FINDING_COLUMNS = [
    ("pod", lambda finding: str(finding.pod)),
    ("node", lambda finding: finding.node),
    ("what", lambda finding: finding.what),
    ("why", lambda finding: finding.why),
    ("the way out", lambda finding: finding.cure),
]


def compat(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's id.", autocompletion=completing.checkpoint_ids)
    ] = "",
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="A node's name.", autocompletion=completing.node_names)
    ] = "",
    rules: Annotated[bool, typer.Option("--rules", help="Print the table of rules instead.")] = False,
    output: Output = None,
) -> None:
    """Say rule by rule whether a checkpoint can be restored on a node; exit code 211 if not."""
    if rules:
        from moorage.compat import RULES

        return write(list(RULES), local_output_format(output), columns=_RULE_COLUMNS)
    if not checkpoint or not node:
        raise UsageError("a checkpoint and a node are needed", "moorage compat CHECKPOINT NODE, or --rules")
    form = output_format(output)
    with client() as api, progress(f"comparing {checkpoint} with {node}"):
        found = api.compat(checkpoint, node)
    write(found if form != "table" else found.lines, form, columns=_COLUMNS)
    if not found.fits:
        first, *more = found.misfits
        others = f", and {len(more)} more" if more else ""
        raise Incompatible(
            f"checkpoint {found.checkpoint} does not fit node {node}: {first.message}{others}",
            "`moorage compat --rules` says why each rule is there, and the way out",
        )


def examine(job: str, form: str) -> None:
    """What of a job cannot be saved, in the given output format. Raises `Refused` if there is anything."""
    with client() as api, progress(f"looking at {job}"):
        findings = api.job(job).examine()
    write(findings, form, columns=_FINDING_COLUMNS, empty=f"all of job {job} can be saved")
    if findings:
        first, *more = findings
        others = f", and {len(more)} more" if more else ""
        raise Refused(f"job {job} cannot be saved now: {first.what}: {first.why}{others}", first.cure)
