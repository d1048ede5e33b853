"""`moorage run`: start a job, stream its output, end with its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moorage.cli import completing
from moorage.cli.job_file import read_job_file, spec_of
from moorage.cli.options import DryRun, Output, client, output_format
from moorage.cli.output import message_fields, remark, write
from moorage.cli.values import pairs


def _start(spec: Any, if_exists: str, *, detach: bool, dry_run: bool, output: str) -> int:
    if dry_run:
        write(message_fields(spec), output)
        return 0
    from moorage.cli.follow import Printer, follow

    with client() as api:
        job = api.submit(spec, if_exists=if_exists)
        if detach:
            info = job.status()
            if output == "table":
                print(info.name or info.id)
            else:
                write(info, output)
            return 0
        remark(f"job {spec.name or job.id} started; Ctrl-C asks before it stops the job")
        return follow(job, Printer(job.status().ranks))  # of the job: one that is resumed may have others than the line


def run(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What each pod runs.")] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="A job file; flags overrule it.")] = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Print the job's name and return.")] = False,
    name: Annotated[str | None, typer.Option(help="The job's name.")] = None,
    pods: Annotated[int | None, typer.Option(help="How many pods; each runs the command once.")] = None,
    gpus_per_pod: Annotated[int | None, typer.Option(help="GPUs for each pod.")] = None,
    checkpoint_every: Annotated[str | None, typer.Option(help="Heartbeat, such as 10m.")] = None,
    keep_last: Annotated[int | None, typer.Option(help="Committed checkpoints to keep (3).")] = None,
    on_failure: Annotated[str | None, typer.Option(help="restore or fail.")] = None,
    max_restarts: Annotated[int | None, typer.Option(help="Restores after failures, 0 for none (no limit).")] = None,
    if_exists: Annotated[str | None, typer.Option(help="fail, resume or replace a job of this name.")] = None,
    if_incompatible: Annotated[str | None, typer.Option(help="fail or cold-start.")] = None,
    hang_timeout: Annotated[str | None, typer.Option(help="Silence for so long counts as a failure.")] = None,
    attempt_deadline: Annotated[str | None, typer.Option(help="A longer checkpoint is aborted (2m).")] = None,
    durability: Annotated[str | None, typer.Option(help="When it counts: remote (in the store) or local.")] = None,
    mount: Annotated[list[str] | None, typer.Option(help="SRC:DST[:ro], live and never saved.")] = None,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, or NAME to pass it on.")] = None,
    user: Annotated[str | None, typer.Option(help="uid[:gid] or a name.")] = None,
    image: Annotated[str | None, typer.Option(help="Root file system on every node.")] = None,
    shm_size: Annotated[str | None, typer.Option(help="Size of /dev/shm.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU limit of each pod.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of each pod.")] = None,
    publish: Annotated[
        list[str] | None, typer.Option(help="POD@HOST_PORT:POD_PORT/udp; pod, inner port and /udp may be left out.")
    ] = None,
    hook: Annotated[
        list[str] | None, typer.Option(help="EVENT=SIGNAL for the ranks: before-checkpoint, after-restore, …")
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Only on these nodes: NODE,NODE.", autocompletion=completing.node_list)
    ] = None,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Run a command in one or several pods."""
    given = read_job_file(file) if file else {}
    flags: dict[str, Any] = {
        "command": command or None,
        "name": name,
        "pods": pods,
        "gpus_per_pod": gpus_per_pod,
        "checkpoint_every": checkpoint_every,
        "keep_last": keep_last,
        "on_failure": on_failure,
        "max_restarts": max_restarts,
        "if_exists": if_exists,
        "if_incompatible": if_incompatible,
        "hang_timeout": hang_timeout,
        "attempt_deadline": attempt_deadline,
        "durability": durability,
        "mounts": mount,
        "user": user,
        "image": image,
        "shm_size": shm_size,
        "cpus": cpus,
        "memory": memory,
        "publish": publish,
        "nodes": on.split(",") if on else None,
    }
    given |= {key: value for key, value in flags.items() if value is not None}
    spec = spec_of(given, env=pairs(env, "--env"), hooks=pairs(hook, "--hook"))
    code = _start(
        spec,
        given.get("if_exists", "fail"),
        detach=detach,
        dry_run=dry_run,
        output=output_format(output),
    )
    raise typer.Exit(code)
