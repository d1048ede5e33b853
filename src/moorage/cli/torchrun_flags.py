"""torchrun's command line, as moorage understands it. Pure: from an argument list to what is to be run.

Every flag of torchrun is taken. What a flag asks of torchrun's own agent (how often it looks at its workers, how it
starts them) has no meaning where moorage is the agent, and is accepted without effect, as the help says.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from moorage.errors import UsageError


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a torchrun line asks for."""

    script: str
    arguments: list[str]
    nnodes: int
    nproc_per_node: int
    module: bool
    no_python: bool
    max_restarts: int | None
    master_port: int
    run_id: str
    role: str
    log_dir: str
    redirects: str
    tee: str
    local_ranks_filter: list[int]
    remarks: list[str]
    options: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"moorage torchrun: {message}", "`moorage torchrun --help` lists the flags")


_RUN_PATH = "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
_OWN = frozenset(
    (
        "detach",
        "dry_run",
        "name",
        "checkpoint_every",
        "keep_last",
        "on_failure",
        "if_exists",
        "if_incompatible",
        "hang_timeout",
        "attempt_deadline",
        "mount",
        "env",
        "user",
        "image",
        "shm_size",
        "cpus",
        "memory",
        "publish",
        "on",
        "gpus_per_pod",
        "output",
        "virtual_local_rank",
    )
)
_NO_EFFECT = "accepted; has no effect under moorage"


def parser() -> argparse.ArgumentParser:
    """The parser: torchrun's flags, then moorage's own."""
    made = _Parser(
        prog="moorage torchrun",
        description="Run a script on several pods as torchrun runs it on several nodes, with checkpoints.",
        allow_abbrev=False,
    )
    add = made.add_argument_group("torchrun's flags").add_argument
    add("--nnodes", default="1", help="number of nodes (pods), N or N:N")
    add("--nproc-per-node", "--nproc_per_node", default="1", help="ranks in each pod: a number, auto, cpu or gpu")
    add("--rdzv-backend", "--rdzv_backend", default="static", help="static or c10d")
    add("--rdzv-endpoint", "--rdzv_endpoint", default="", help="only its port is used: the pods have their own network")
    add("--rdzv-id", "--rdzv_id", default="none", help="TORCHELASTIC_RUN_ID")
    add("--rdzv-conf", "--rdzv_conf", default="", help=_NO_EFFECT)
    add("--standalone", action="store_true", help="one node")
    add(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=None,
        help="restores after failures, 0 for none (no limit)",
    )
    add("--monitor-interval", "--monitor_interval", type=float, default=0.1, help=_NO_EFFECT)
    add("--start-method", "--start_method", default="spawn", choices=["spawn", "fork", "forkserver"], help=_NO_EFFECT)
    add("--event-log-handler", "--event_log_handler", default="null", help=_NO_EFFECT)
    add("--role", default="default", help="TORCHELASTIC role of the ranks")
    add("-m", "--module", action="store_true", help="the script is a Python module")
    add("--no-python", "--no_python", action="store_true", help="the script is a program")
    add("--run-path", "--run_path", action="store_true", help="run the script with runpy.run_path")
    add("--log-dir", "--log_dir", default="", help="also write each rank's output below this folder")
    add("-r", "--redirects", default="0", help="which outputs go to the log folder only: 0, 1, 2, 3 or RANK:N,…")
    add("-t", "--tee", default="0", help="which outputs go to the log folder too: 0, 1, 2, 3 or RANK:N,…")
    add("--local-ranks-filter", "--local_ranks_filter", default="", help="show only these local ranks")
    add("--duplicate-stdout-filters", "--duplicate_stdout_filters", default="", help=_NO_EFFECT)
    add("--duplicate-stderr-filters", "--duplicate_stderr_filters", default="", help=_NO_EFFECT)
    add("--node-rank", "--node_rank", type=int, default=0, help="moorage starts all nodes from one call")
    add("--master-addr", "--master_addr", default="127.0.0.1", help="the pods have addresses of their own")
    add("--master-port", "--master_port", type=int, default=29500, help="port of rank 0's store inside the job")
    add("--local-addr", "--local_addr", default=None, help=_NO_EFFECT)
    add("--logs-specs", "--logs_specs", default=None, help=_NO_EFFECT)
    add("--numa-binding", "--numa_binding", default=None, help=_NO_EFFECT)
    add("--signals-to-handle", "--signals_to_handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", help=_NO_EFFECT)
    add("--virtual-local-rank", "--virtual_local_rank", action="store_true", help="LOCAL_RANK 0 for every rank")
    own = made.add_argument_group("moorage's flags").add_argument
    own("-d", "--detach", action="store_true", help="print the job's id and return")
    own("--dry-run", action="store_true", help="print the job that would start, and start nothing")
    own("--name", default="", help="the job's name")
    own("--checkpoint-every", default="0", help="heartbeat, such as 10m (default: only when asked)")
    own("--keep-last", type=int, default=3, help="committed checkpoints to keep")
    own("--on-failure", default="restore", help="restore or fail")
    own("--if-exists", default="fail", help="fail, resume or replace")
    own("--if-incompatible", default="fail", help="fail or cold-start")
    own("--hang-timeout", default="0", help="no output and no CPU time for so long counts as a failure")
    own("--attempt-deadline", default="0", help="a checkpoint that takes longer is aborted (default 2m)")
    own("--mount", action="append", default=[], help="SRC:DST[:ro], live and never saved")
    own("--env", action="append", default=[], help="NAME=VALUE")
    own("--user", default="", help="uid[:gid] or name")
    own("--image", default="", help="root file system on every node")
    own("--shm-size", default="0")
    own("--cpus", type=float, default=0.0)
    own("--memory", default="0")
    own("--publish", action="append", default=[], help="[POD@]HOST_PORT[:POD_PORT][/udp]")
    own("--on", default="", help="only on these nodes: NODE,NODE")
    own("--gpus-per-pod", type=int, default=0)
    own("--output", "-o", default=None, help="table, json or yaml")
    made.add_argument("script", help="the script, module or program")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made


def _environment_defaults(made: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """torchrun reads ``PET_<FLAG>`` for each flag that is not given."""
    defaults: dict[str, Any] = {}
    for action in made._actions:
        value = environ.get(f"PET_{action.dest.upper()}")
        own = action.dest in _OWN and action.dest != "virtual_local_rank"
        if value is None or own or action.dest in ("script", "arguments", "help"):
            continue
        if isinstance(action.const, bool):
            defaults[action.dest] = value.lower() in ("1", "true", "yes")
        else:
            try:
                defaults[action.dest] = action.type(value) if callable(action.type) else value
            except ValueError:
                raise UsageError(f"PET_{action.dest.upper()}={value}: not a number") from None
    made.set_defaults(**defaults)


def nodes(text: str) -> int:
    """``N`` or ``N:N``. Raises `UsageError` for an elastic range whose ends differ: a checkpoint has a fixed world."""
    low, _, high = text.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--nnodes {text!r} is not a number or N:N") from None
    if least != most:
        raise UsageError(
            f"--nnodes {text}: a job that is checkpointed has one size",
            f"write --nnodes {most} (restores replace elastic)",
        )
    if least < 1:
        raise UsageError(f"--nnodes {text} is too small")
    return least


def processes(text: str, gpus: int) -> int:
    """``--nproc-per-node``: a number, ``cpu``, ``gpu`` or ``auto``. Raises `UsageError`."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu" or (text == "auto" and not gpus):
        return os.cpu_count() or 1
    if text in ("gpu", "auto"):
        if not gpus:
            raise UsageError("--nproc-per-node gpu: the pods have no GPU", "add --gpus-per-pod N")
        return gpus
    raise UsageError(f"--nproc-per-node {text!r} is not a number, auto, cpu or gpu")


def parse(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Launch:
    """Parse what follows ``moorage torchrun``. Raises `UsageError`; ``--help`` exits as argparse does."""
    environ = os.environ if environ is None else environ
    made = parser()
    _environment_defaults(made, environ)
    found = vars(made.parse_args(list(arguments)))
    if found["rdzv_backend"] not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {found['rdzv_backend']} is not supported",
            "moorage finds the ranks itself: use static or c10d",
        )
    nnodes = nodes(found["nnodes"])
    if found["standalone"] and nnodes > 1:
        raise UsageError(f"--standalone means one node, --nnodes says {nnodes}", "leave one of them out")
    if found["run_path"] and (found["module"] or found["no_python"]):
        raise UsageError("--run-path excludes --module and --no-python")
    remarks = []
    if found["node_rank"]:
        remarks.append("--node-rank is not needed: one call starts the ranks of all nodes")
    port = found["master_port"]
    endpoint_port = found["rdzv_endpoint"].rpartition(":")[2]
    if found["rdzv_endpoint"] and endpoint_port.isdigit() and int(endpoint_port):
        port = int(endpoint_port)
    own = [name for name in found if name in _OWN]
    script, rest = found["script"], list(found["arguments"])
    if found["run_path"]:
        rest = [
            "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
            script,
            *rest,
        ]
        script = "-c"
    return Launch(
        script=script,
        arguments=rest,
        nnodes=nnodes,
        nproc_per_node=processes(found["nproc_per_node"], found["gpus_per_pod"]),
        module=found["module"],
        no_python=found["no_python"],
        max_restarts=found["max_restarts"],
        master_port=port,
        run_id=found["rdzv_id"],
        role=found["role"],
        log_dir=found["log_dir"],
        redirects=found["redirects"],
        tee=found["tee"],
        local_ranks_filter=[int(part) for part in found["local_ranks_filter"].split(",") if part.strip()],
        remarks=remarks,
        options={name: found[name] for name in own},
    )
