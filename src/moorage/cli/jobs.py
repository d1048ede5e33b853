"""The verbs on a job."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moorage.cli import completing
from moorage.cli.options import AnyJobArgument, DryRun, JobArgument, Output, client, confirm, output_format
from moorage.cli.output import age, bytes_text, line, progress, remark, when, write
from moorage.cli.values import human_seconds, seconds
from moorage.errors import DeadlineExceeded, NotFound, UsageError

if TYPE_CHECKING:
    from moorage.coordinator.client import AttemptInfo, CheckpointInfo, JobInfo

#: Without a terminal, a pull says so often how far it is.
_TELL_SECONDS = 5.0
JOB_COLUMNS = [
    ("job", lambda j: j.name or j.id),
    ("phase", lambda j: j.phase),
    ("pods", lambda j: str(len(j.pods))),
    ("nodes", lambda j: ",".join(dict.fromkeys(p.node for p in j.pods if p.node))),
    ("incarnation", lambda j: str(j.incarnation)),
    ("restarts", lambda j: str(j.restarts)),
    ("checkpoint", lambda j: j.latest_checkpoint),
    ("age", lambda j: age(j.created)),
    ("exit", lambda j: "" if j.exit_code is None else str(j.exit_code)),
    ("reason", lambda j: j.reason),
]


def _steps(update: Any) -> Any:
    order = ["preparing", "freezing", "sealing", "capturing", "persisting", "committed"]

    def show(attempt: AttemptInfo) -> None:
        fraction = (order.index(attempt.phase) + 1) / len(order) if attempt.phase in order else None
        update(attempt.phase, fraction)

    return show


def _report(checkpoint: CheckpointInfo, output: str) -> None:
    write(checkpoint, output) if output != "table" else print(checkpoint.id)
    remark(
        f"{bytes_text(checkpoint.bytes_total)}, {bytes_text(checkpoint.bytes_new)} of it new; "
        f"the job stood still for {human_seconds(checkpoint.pause_seconds)}"
    )


def _plan(verb: str, info: JobInfo, output: str, **more: object) -> None:
    write({"job": info.id, "phase": info.phase, "would": verb, **more}, output)


def checkpoint(job: JobArgument, dry_run: DryRun = False, output: Output = None) -> None:
    """Checkpoint a job; it runs on."""
    form = output_format(output)
    with client() as api, progress(f"checkpoint of {job}") as update:
        found = api.job(job)
        if dry_run:
            return _plan("checkpoint", found.status(), form)
        _report(found.checkpoint(progress=_steps(update)), form)


def park(
    job: JobArgument,
    keep: Annotated[
        str,
        typer.Option(metavar="gpu|host", help="Where its nodes keep the device memory for a faster restore there."),
    ] = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Checkpoint a job and take it off its nodes."""
    if keep not in ("", "gpu", "host"):
        raise UsageError(f"device memory cannot be kept on {keep!r}", "say --keep gpu or --keep host")
    form = output_format(output)
    with client() as api, progress(f"parking {job}") as update:
        found = api.job(job)
        if dry_run:
            return _plan("park", found.status(), form)
        _report(found.park(keep=keep, progress=_steps(update)), form)


def move(
    job: JobArgument,
    to: Annotated[
        str, typer.Option("--to", metavar="NODE,...", help="Where to.", autocompletion=completing.node_list)
    ] = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Checkpoint a job and restore it on other nodes."""
    form = output_format(output)
    nodes = [node for node in to.split(",") if node]
    if not nodes:
        raise UsageError("no node is named to move to", "moorage move JOB --to NODE,...")
    with client() as api, progress(f"moving {job}") as update:
        found = api.job(job)
        if dry_run:
            return _plan("move", found.status(), form, to=nodes)
        _moved(found.move(nodes, progress=_steps(update)), form)


def restore(
    job: AnyJobArgument,
    checkpoint: Annotated[
        str, typer.Option(help="Which checkpoint (default: the newest).", autocompletion=completing.checkpoint_ids)
    ] = "",
    on: Annotated[
        str,
        typer.Option(
            "--on", metavar="NODE,...", help="Where (default: moorage chooses).", autocompletion=completing.node_list
        ),
    ] = "",
    if_incompatible: Annotated[
        str, typer.Option(help="fail or cold-start, where it fits no node (default: as the job was submitted).")
    ] = "",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Bring a job back from a checkpoint."""
    form = output_format(output)
    nodes = [node for node in on.split(",") if node]
    with client() as api, progress(f"restoring {job}") as update:
        found = api.job(job)
        if dry_run:
            return _plan("restore", found.status(), form, checkpoint=checkpoint, on=nodes)
        update("restoring", None)
        _moved(found.restore(checkpoint or None, on=nodes, if_incompatible=if_incompatible or None), form)


def _moved(info: JobInfo, form: str) -> None:
    write(info, form) if form != "table" else write([info], form, columns=JOB_COLUMNS)
    if info.last_restore_seconds:
        remark(f"restored in {human_seconds(info.last_restore_seconds)}")


def stop(
    job: JobArgument,
    checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Take a last checkpoint first.")] = False,
    grace: Annotated[str, typer.Option(help="Time between SIGTERM and SIGKILL.")] = "10s",
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Stop a job for good."""
    form = output_format(output)
    with client() as api, progress(f"stopping {job}"):
        found = api.job(job)
        if dry_run:
            return _plan("stop", found.status(), form, checkpoint=checkpoint)
        info = found.stop(checkpoint=checkpoint, grace=seconds(grace, "--grace"))
        write(info, form) if form != "table" else write([info], form, columns=JOB_COLUMNS)


def delete(
    jobs: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB...", help="Names or ids of jobs that are over.", autocompletion=completing.all_job_names
        ),
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Forget jobs that are over, with their logs and checkpoints. One with a pinned checkpoint stays."""
    form = output_format(output)
    with client() as api:
        # By id: of a name that was used again it is the newest job that is meant, now and after the question.
        found = [api.job(job) for job in dict.fromkeys(jobs)]
        names = {job.id: job.status().name or job.id for job in found}
        planned = {job.id: job.delete(dry_run=True) for job in found}
        if not dry_run:
            many = sum(map(len, planned.values()))
            confirm(f"Delete {', '.join(names.values())}" + (f" and {many} checkpoints" if many else ""), yes=yes)
            planned = {job.id: job.delete() for job in found}
    done = [
        {"job": job, "name": names[job], "checkpoints": went, "would" if dry_run else "done": "delete"}
        for job, went in planned.items()
    ]
    if form != "table":
        write(done, form)
        return
    for row in done:
        went = f" and its checkpoints {', '.join(row['checkpoints'])}" if row["checkpoints"] else ""
        print(f"{'would delete' if dry_run else 'deleted'} {row['name']}{went}")


def wait(
    job: AnyJobArgument,
    timeout: Annotated[str, typer.Option(help="Give up after so long.")] = "",
    output: Output = None,
) -> None:
    """Wait until a job is over; ends with its exit code."""
    from moorage.cli.follow import exit_code

    form = output_format(output)
    limit = seconds(timeout, "--timeout") if timeout else None
    with client() as api:
        try:
            info = api.job(job).wait(timeout=limit)
        except TimeoutError:
            raise DeadlineExceeded(f"job {job} is not over after {timeout}", "it runs on") from None
    if form != "table":
        write(info, form)
    raise typer.Exit(exit_code(info))


def jobs(
    all: Annotated[bool, typer.Option("-a", "--all", help="Also those that are over.")] = False,
    output: Output = None,
) -> None:
    """List jobs."""
    form = output_format(output)
    with client() as api:
        write(api.jobs(all=all), form, columns=JOB_COLUMNS, empty="no jobs")


def show(
    thing: Annotated[
        str, typer.Argument(metavar="THING", help="A job, node or checkpoint.", autocompletion=completing.things)
    ],
    output: Output = None,
) -> None:
    """Show one job, node or checkpoint in full."""
    form = output_format(output)
    with client() as api:
        try:
            return write(api.job(thing).status(), form)
        except NotFound:
            pass
        for found in (*api.nodes(), *api.checkpoints()):
            if thing == (getattr(found, "node", None) or getattr(found, "id", None)):
                return write(found, form)
    raise NotFound(
        f"{thing} is no job, node or checkpoint", "see `moorage jobs -a`, `moorage nodes`, `moorage checkpoints`"
    )


def events(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="A job's name or id.", autocompletion=completing.all_job_names)
    ] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    audit: Annotated[bool, typer.Option("--audit", help="Who asked for what, allowed or refused.")] = False,
    output: Output = None,
) -> None:
    """What happened to a job, in plain sentences; with --audit who asked for what, of one job or of all."""
    if not job and not audit:
        raise UsageError("no job is named", "moorage events JOB, or --audit")
    form = output_format(output)
    with client() as api:
        for event in api.audit(job, follow=follow) if audit else api.job(job).events(follow=follow):
            line(event, form, f"{when(event.time)}  {event.sentence}")


def logs(
    job: AnyJobArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job is over.")] = False,
    rank: Annotated[int, typer.Option(help="Only this rank.")] = -1,
    output: Output = None,
) -> None:
    """What the ranks wrote."""
    from moorage.cli.follow import Printer, tell_gap

    form = output_format(output)
    with client() as api:
        found = api.job(job)
        ranks = found.status().ranks
        if rank >= ranks:
            raise UsageError(f"job {job} has no rank {rank}", f"its ranks are 0 to {ranks - 1}")
        printer = Printer(ranks if rank < 0 else 1)
        try:
            for piece in found.logs(rank=rank, follow=follow):
                if form == "table":
                    printer.take(piece)
                else:
                    tell_gap(piece)
                    text = piece.data.decode(errors="replace")
                    line({"rank": piece.rank, "stderr": piece.stderr, "time": piece.time, "text": text}, form, "")
        finally:
            printer.finish()


def pull(
    job: AnyJobArgument,
    path: Annotated[str, typer.Argument(help="Path in the job (default: what changed in its folder).")] = "",
    to: Annotated[Path, typer.Option("--to", help="Folder to write into.")] = Path(),
    output: Output = None,
) -> None:
    """Copy files out of a job."""
    form = output_format(output)
    with client() as api, progress(f"pulling from {job}") as update:
        files = api.job(job).pull(path, to=to, progress=_told(update))
    if form == "table":
        print("\n".join(files)) if files else remark("nothing changed")
    else:
        write({"to": str(to), "files": files}, form)


def _told(update: Callable[[str, float | None], None]) -> Callable[[int, int], None]:
    """Shows how far a pull has come: in the bar of a terminal, else in a line now and then."""
    began = told = time.monotonic()

    def show(files: int, size: int) -> None:
        nonlocal told
        now = time.monotonic()
        so_far = f"{files} files, {bytes_text(size)}"
        if sys.stderr.isatty() and now - told >= 0.1:
            told = now
            update(so_far, None)
        elif not sys.stderr.isatty() and now - told >= _TELL_SECONDS:
            told = now
            remark(f"{so_far} after {human_seconds(now - began)}")

    return show


def exec_(
    job: JobArgument,
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What to run.")],
    rank: Annotated[int, typer.Option(help="In the pod and environment of this rank.")] = 0,
    output: Output = None,
) -> None:
    """Run a command beside a rank; ends with its exit code. As JSON or YAML, what it wrote is printed at its end."""
    form = output_format(output)
    kept: dict[bool, list[bytes]] = {False: [], True: []}

    def take(data: bytes, is_stderr: bool) -> None:
        if form != "table":
            kept[is_stderr].append(data)
            return
        stream = sys.stderr if is_stderr else sys.stdout
        stream.buffer.write(data)
        stream.flush()

    async def typed() -> AsyncIterator[bytes]:
        while data := await asyncio.to_thread(os.read, sys.stdin.fileno(), 65536):
            yield data

    with client() as api:
        stdin = None if sys.stdin.isatty() else typed()
        code = api.job(job).exec(command, rank=rank, stdin=stdin, output=take)
    if form != "table":
        wrote = {is_stderr: b"".join(pieces).decode(errors="replace") for is_stderr, pieces in kept.items()}
        write({"exit_code": code, "stdout": wrote[False], "stderr": wrote[True]}, form)
    raise typer.Exit(code)
