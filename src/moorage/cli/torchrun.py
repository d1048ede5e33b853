"""`moorage torchrun`: a drop-in for torchrun."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moorage.cli.options import client, output_format
from moorage.cli.output import message_fields, remark, when, write
from moorage.cli.torchrun_flags import Launch, parse, processes
from moorage.cli.values import pairs, seconds, size
from moorage.errors import Conflict, DeadlineExceeded, MoorageError, NotFound
from moorage.v1 import types_pb2

if TYPE_CHECKING:
    from moorage.coordinator.client import Client, Job

#: Binds a rank's process as torch binds the ones that it starts, then becomes the rank.
_BIND = """import os,sys
from torch.numa import binding as b
b._maybe_apply_numa_binding_to_current_process(gpu_index=int(sys.argv[2]),numa_options=b.NumaOptions(affinity_mode=b.AffinityMode(sys.argv[1])))
os.execvp(sys.argv[3],sys.argv[3:])"""
_JOIN_SECONDS = 600.0


def torchrun(context: typer.Context) -> None:
    """Run a script as torchrun does, with checkpoints: a drop-in for torchrun."""
    launch = parse(context.args)
    options = launch.options
    form = output_format(options["output"])
    if options["dry_run"] and options["gpus_per_pod"] is None and launch.nproc_per_node not in ("gpu", "auto"):
        write(message_fields(make_spec(launch, gpus=0)), form)
        return
    with client() as api:
        gpus = options["gpus_per_pod"]
        found = gpus_of_nodes(api) if gpus is None else gpus
        per_node = processes(launch.nproc_per_node, found)
        spec = make_spec(launch, gpus=min(per_node, found) if gpus is None else gpus)
        if options["dry_run"]:
            write(message_fields(spec), form)
            return
        job = _job(api, launch, spec)
        if options["detach"]:
            info = job.status()
            print(info.name or info.id) if form == "table" else write(info, form)
            return
        code = _attached(launch, spec, job)
    raise typer.Exit(code)


def gpus_of_nodes(api: Client) -> int:
    """GPUs of the node that has most: what a pod of this cluster can have."""
    return max((len(node.gpus) for node in api.nodes() if node.live), default=0)


def make_spec(launch: Launch, *, gpus: int) -> types_pb2.JobSpec:
    """The job that a line stands for. Raises `UsageError`."""
    from moorage.coordinator.client import torchrun_spec

    options = launch.options
    rank_env = {
        "TORCHELASTIC_RUN_ID": launch.run_id,
        "TORCHELASTIC_MAX_RESTARTS": str(launch.max_restarts or 0),
        "ROLE_NAME": launch.role,
    }
    if options["virtual_local_rank"]:
        rank_env["LOCAL_RANK"] = "0"
        if gpus:
            rank_env["CUDA_VISIBLE_DEVICES"] = "${local_rank}"
    spec = torchrun_spec(
        launch.script,
        launch.arguments,
        nnodes=launch.nnodes,
        nproc_per_node=processes(launch.nproc_per_node, gpus),
        module=launch.module,
        no_python=launch.no_python,
        name=options["name"] or _meeting_name(launch),
        env=pairs(options["env"], "--env"),
        gpus_per_pod=gpus,
        user=options["user"],
        image=options["image"],
        mounts=options["mount"],
        publish_ports=options["publish"],
        hooks=pairs(options["hook"], "--hook"),
        shm_bytes=size(options["shm_size"], "--shm-size"),
        cpus=options["cpus"],
        memory_bytes=size(options["memory"], "--memory"),
        checkpoint_every=seconds(options["checkpoint_every"], "--checkpoint-every"),
        keep_last=options["keep_last"],
        on_failure=options["on_failure"],
        max_restarts=launch.max_restarts,
        elastic=bool(launch.max_restarts),
        if_incompatible=options["if_incompatible"],
        hang_timeout=seconds(options["hang_timeout"], "--hang-timeout"),
        attempt_deadline=seconds(options["attempt_deadline"], "--attempt-deadline"),
        durability=options["durability"],
        master_port=launch.master_port,
        nodes=[node for node in options["on"].split(",") if node],
        rank_env=rank_env,
    )
    if launch.numa_binding:
        python = os.environ.get("PYTHON_EXEC", sys.executable)
        command = [python, "-c", _BIND, launch.numa_binding, "${local_rank}", *spec.command]
        del spec.command[:]
        spec.command.extend(command)
    return spec


def _meeting_name(launch: Launch) -> str:
    """The name under which lines of several nodes find the job that they are all of."""
    if not launch.rendezvous:
        return ""
    return "rdzv-" + hashlib.blake2b(launch.rendezvous.encode(), digest_size=6).hexdigest()


def _job(api: Client, launch: Launch, spec: types_pb2.JobSpec) -> Job:
    """Start the job, or join the one that the line of another node has started."""
    if not launch.rendezvous:
        return api.submit(spec, if_exists=launch.options["if_exists"])
    if launch.node_rank == 0:
        try:
            return api.submit(spec, if_exists=launch.options["if_exists"])
        except Conflict:
            if launch.options["if_exists"] != "fail" or launch.options["name"]:
                raise
            found = api.job(spec.name)
            if found.status().over:
                raise
            remark(f"joins job {found.id}: another line for {launch.rendezvous} has started it")
            return found
    return _join(api, launch, spec.name)


def _join(api: Client, launch: Launch, name: str) -> Job:
    """Wait for the line with node rank 0. Raises `DeadlineExceeded`."""
    limit = launch.join_seconds or _JOIN_SECONDS
    waiting = threading.Event()  # nobody sets it: the coordinator has no stream of jobs to come
    remark(f"node {launch.node_rank} waits for the line with --node-rank 0")
    for _ in range(max(1, int(limit / 0.5))):
        try:
            found = api.job(name)
            if not found.status().over:
                return found
        except NotFound:
            pass
        waiting.wait(0.5)
    raise DeadlineExceeded(f"no line with --node-rank 0 for {launch.rendezvous} within {limit:g} s", "start it too")


def _attached(launch: Launch, spec: types_pb2.JobSpec, job: Job) -> int:
    from moorage.cli.follow import Printer, follow

    _await_nodes(launch, job)
    remark(f"job {spec.name or job.id} started; Ctrl-C asks before it stops the job")
    per_pod = spec.ranks_per_pod
    only = range(launch.node_rank * per_pod, (launch.node_rank + 1) * per_pod) if launch.node_rank else range(0)
    printer = Printer(
        job.status().ranks,  # one that is resumed may have others than the line
        per_pod=per_pod,
        files=_files(launch, spec),
        only_local=launch.local_ranks_filter,
        only=only,
        prefix=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        role=launch.role,
    )
    if launch.console_events:
        threading.Thread(target=_tell_events, args=(job.id,), daemon=True).start()
    return follow(job, printer, signals=launch.signals, grace=launch.shutdown_seconds)


def _await_nodes(launch: Launch, job: Job) -> None:
    if not launch.join_seconds:
        return
    try:
        job.until(lambda info: info.phase != "pending", timeout=launch.join_seconds)
    except TimeoutError:
        reason = job.status().reason
        job.stop(grace=0)
        raise DeadlineExceeded(f"no nodes within {launch.join_seconds:g} s: {reason}", "raise join_timeout") from None


def _files(launch: Launch, spec: types_pb2.JobSpec) -> Any:
    from moorage.cli.rank_files import RankFiles, in_folder, outputs, plugged_in

    per_pod, pods = spec.ranks_per_pod, spec.pods
    redirects = outputs(launch.redirects, per_pod, "--redirects")
    tee = outputs(launch.tee, per_pod, "--tee")
    if launch.logs_specs:
        envs = [
            {
                local: {"TORCHELASTIC_RUN_ID": launch.run_id, "TORCHELASTIC_RESTART_COUNT": "0"}
                for local in range(per_pod)
            }
            for _ in range(pods)
        ]
        where, filtered = plugged_in(
            launch.logs_specs,
            launch.log_dir,
            redirects=launch.redirects,
            tee=launch.tee,
            only_local=launch.local_ranks_filter,
            envs=envs,
        )
        return RankFiles(where, filters=launch.filters, filtered=filtered)
    if not (any(redirects.values()) or any(tee.values()) or any(launch.filters)):
        return None
    if not launch.log_dir:
        import tempfile

        folder = Path(tempfile.mkdtemp(prefix="torchelastic_"))
        remark(f"log directory: {folder}")
    else:
        folder = Path(launch.log_dir)
    folder = folder / launch.run_id / "attempt_0"
    where = in_folder(folder, pods=pods, per_pod=per_pod, redirects=redirects, tee=tee)
    filtered = (str(folder / "filtered_stdout.log"), str(folder / "filtered_stderr.log"))
    return RankFiles(where, filters=launch.filters, filtered=filtered)


def _tell_events(job: str, write_line: Callable[[str], object] = sys.stderr.write) -> None:
    try:
        with client() as api:
            for event in api.job(job).events(follow=True):
                write_line(f"{when(event.time)}  {event.sentence}\n")
    except MoorageError as error:
        write_line(f"events are not shown any more: {error}\n")
