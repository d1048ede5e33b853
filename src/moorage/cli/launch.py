"""`moorage run`: start a job, stream its output, end with its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moorage.cli.options import DryRun, Output, client, output_format
from moorage.cli.output import message_fields, remark, write
from moorage.cli.values import pairs, seconds, size
from moorage.errors import NotFound, UsageError

SPEC_FIELDS = {
    "command": list,
    "name": str,
    "pods": int,
    "ranks_per_pod": int,
    "torchrun": bool,
    "env": dict,
    "working_directory": str,
    "gpus_per_pod": int,
    "user": str,
    "image": str,
    "mounts": list,
    "publish": list,
    "shm_size": str,
    "cpus": float,
    "memory": str,
    "checkpoint_every": str,
    "keep_last": int,
    "on_failure": str,
    "max_restarts": int,
    "if_incompatible": str,
    "if_exists": str,
    "hang_timeout": str,
    "attempt_deadline": str,
    "durability": str,
    "nodes": list,
    "labels": dict,
}


def read_job_file(path: Path) -> dict[str, Any]:
    """Read ``job.yaml``. Raises `NotFound`, `UsageError` naming the field."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise NotFound(f"job file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"job file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"job file {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"job file {path} is not a mapping", "write `command: [python, train.py]` and the like")
    for name, value in content.items():
        if name not in SPEC_FIELDS:
            raise UsageError(f"job file {path}: no field {name!r}", f"fields: {', '.join(SPEC_FIELDS)}")
        kind = SPEC_FIELDS[name]
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            content[name] = str(value)
        elif not isinstance(value, (int, float) if kind is float else kind):
            raise UsageError(f"job file {path}: {name} must be a {kind.__name__}, not {type(value).__name__}")
    return content


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
        ranks = max(1, spec.pods) * max(1, spec.ranks_per_pod)
        return follow(job, Printer(ranks, per_pod=max(1, spec.ranks_per_pod)))


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
    on: Annotated[str | None, typer.Option(help="Only on these nodes: NODE,NODE.")] = None,
    dry_run: DryRun = False,
    output: Output = None,
) -> None:
    """Run a command in one or several pods."""
    from moorage.coordinator.client import job_spec

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
    variables = {str(key): str(value) for key, value in given.get("env", {}).items()} | pairs(env, "--env")
    spec = job_spec(
        [str(part) for part in given.get("command", [])],
        name=given.get("name", ""),
        pods=given.get("pods", 1),
        ranks_per_pod=given.get("ranks_per_pod", 1),
        rendezvous=given.get("torchrun", False),
        env=variables,
        working_directory=given.get("working_directory"),
        gpus_per_pod=given.get("gpus_per_pod", 0),
        user=given.get("user", ""),
        image=given.get("image", ""),
        mounts=[str(item) for item in given.get("mounts", [])],
        publish_ports=[str(item) for item in given.get("publish", [])],
        shm_bytes=size(given.get("shm_size", "0"), "--shm-size"),
        cpus=given.get("cpus", 0.0),
        memory_bytes=size(given.get("memory", "0"), "--memory"),
        checkpoint_every=seconds(given.get("checkpoint_every", "0"), "--checkpoint-every"),
        keep_last=given.get("keep_last", 3),
        on_failure=given.get("on_failure", "restore"),
        max_restarts=given.get("max_restarts"),
        if_incompatible=given.get("if_incompatible", "fail"),
        hang_timeout=seconds(given.get("hang_timeout", "0"), "--hang-timeout"),
        attempt_deadline=seconds(given.get("attempt_deadline", "0"), "--attempt-deadline"),
        durability=given.get("durability", ""),
        nodes=[str(node) for node in given.get("nodes", [])],
        labels={str(key): str(value) for key, value in given.get("labels", {}).items()},
    )
    code = _start(
        spec,
        given.get("if_exists", "fail"),
        detach=detach,
        dry_run=dry_run,
        output=output_format(output),
    )
    raise typer.Exit(code)
