"""The verbs on checkpoints and the store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from moorage.cli import completing
from moorage.cli.options import CheckpointArgument, DryRun, Output, client, output_format
from moorage.cli.output import bytes_text, progress, remark, when, write
from moorage.cli.values import human_seconds
from moorage.errors import CorruptData

if TYPE_CHECKING:
    from moorage.coordinator.client.models import CheckInfo

_SHOWN = 20  # errors of a check

COLUMNS = [
    ("checkpoint", lambda c: c.id),
    ("job", lambda c: c.job_name or c.job),
    ("created", lambda c: when(c.created)),
    ("size", lambda c: bytes_text(c.bytes_total)),
    ("new", lambda c: bytes_text(c.bytes_new)),
    ("pause", lambda c: human_seconds(c.pause_seconds)),
    ("", lambda c: " ".join(word for word, true in (("latest", c.latest), ("pinned", c.pinned)) if true)),
]


def checkpoints(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Only this job's.", autocompletion=completing.all_job_names)
    ] = "",
    output: Output = None,
) -> None:
    """List committed checkpoints, oldest first."""
    form = output_format(output)
    with client() as api:
        write(api.checkpoints(job), form, columns=COLUMNS, empty="no checkpoints")


def inspect(checkpoint: CheckpointArgument, output: Output = None) -> None:
    """What is inside a checkpoint, by pod and kind."""
    form = output_format(output)
    with client() as api:
        found = api.inspect(checkpoint)
    if form != "table":
        return write(found, form)
    whose = found.checkpoint.job_name or found.checkpoint.job
    remark(f"{found.checkpoint.id} of {whose}, {when(found.checkpoint.created)}")
    write(
        found.parts,
        form,
        columns=[
            ("pod", lambda p: str(p.pod)),
            ("kind", lambda p: p.kind),
            ("items", lambda p: str(p.items)),
            ("size", lambda p: bytes_text(p.bytes)),
            ("stored", lambda p: bytes_text(p.stored_bytes)),
        ],
    )


def check(
    checkpoint: CheckpointArgument,
    read_data: Annotated[bool, typer.Option("--read-data", help="Read and verify every chunk.")] = False,
    output: Output = None,
) -> None:
    """Verify that a checkpoint can be read; exit code 209 if not."""
    form = output_format(output)
    with client() as api, progress(f"check of {checkpoint}") as update:

        def show(state: CheckInfo) -> None:
            update("reading", state.bytes_done / state.bytes_total if state.bytes_total else None)

        result = api.check(checkpoint, read_data=read_data, progress=show)
    if form == "table":
        write({**msgspec.structs.asdict(result), "errors": len(result.errors)}, form)
        for error in result.errors[:_SHOWN]:
            remark(error)
        if len(result.errors) > _SHOWN:
            remark(f"and {len(result.errors) - _SHOWN} more: --output json shows them all")
    else:
        write(result, form)
    if result.errors:
        hint = "restore another one: `moorage checkpoints`"
        if any("index" in error for error in result.errors):
            hint = "`moorage store rebuild-index` mends an index; " + hint
        raise CorruptData(f"checkpoint {checkpoint}: {result.errors[0]}", hint)


def prune(dry_run: DryRun = False, output: Output = None) -> None:
    """Remove from the store what no checkpoint needs."""
    form = output_format(output)
    with client() as api, progress("prune"):
        write(api.prune(dry_run=dry_run), form)


def pin(
    checkpoint: CheckpointArgument,
    unpin: Annotated[bool, typer.Option("--unpin", help="No longer keep it.")] = False,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Keep a checkpoint, whatever --keep-last says."""
    form = output_format(output)
    with client() as api:
        found = api.inspect(checkpoint).checkpoint if dry_run else api.pin(checkpoint, unpin=unpin)
        if dry_run:
            return write({"checkpoint": found.id, "pinned": found.pinned, "would": "unpin" if unpin else "pin"}, form)
        write(found, form) if form != "table" else write([found], form, columns=COLUMNS)


def unpin(checkpoint: CheckpointArgument, dry_run: DryRun = False, output: Output = None) -> None:
    """No longer keep a checkpoint that was pinned."""
    pin(checkpoint, unpin=True, dry_run=dry_run, output=output)
