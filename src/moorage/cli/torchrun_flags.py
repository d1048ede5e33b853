"""torchrun's command line, as moorage understands it. Pure: from an argument list to what is to be run.

Every flag of torchrun is taken and does what it is for; the help says how where moorage does it in another way. What
moorage refuses is in `REFUSED`, with the reason.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from moorage.errors import UsageError


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a torchrun line asks for."""

    script: str
    arguments: list[str]
    nnodes: int
    nproc_per_node: str
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
    node_rank: int
    rendezvous: str  # what torchrun's agents meet by; empty: this call is alone
    join_seconds: float  # 0: wait for nodes as long as it takes
    console_events: bool
    filters: tuple[list[str], list[str]]  # lines of stdout and of stderr that go to a file of their own
    logs_specs: str
    numa_binding: str
    signals: list[signal.Signals]
    shutdown_seconds: float
    options: dict[str, Any]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"moorage torchrun: {message}", "`moorage torchrun --help` lists the flags")


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
        "durability",
        "mount",
        "env",
        "user",
        "image",
        "shm_size",
        "cpus",
        "memory",
        "publish",
        "hook",
        "on",
        "gpus_per_pod",
        "output",
        "virtual_local_rank",
    )
)
DEFAULT_PORT = 29500
#: What moorage refuses of torchrun's words, and why.
REFUSED = {
    "--rdzv-backend other than static and c10d": "moorage finds the ranks itself, so no other store is asked",
    "--standalone with --nnodes above 1": "it means one node",
    "--nnodes MIN:MAX with two different ends": "what is checkpointed has one size; restores replace elastic sizes",
}
_TOLD_AT_ONCE = "accepted: the node's worker is told of an exit at once, so nobody looks at intervals"
_FILTER_HELP = "also write lines with one of these words to filtered_{}.log: WORD,WORD (two commas for one)"


_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class _Untold(int):
    """The default of a number, told from the same number in a line."""


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
    add(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default="",
        help="HOST:PORT where lines of several nodes meet",
    )
    add("--rdzv-id", "--rdzv_id", default="none", help="TORCHELASTIC_RUN_ID; lines with the same id are one job")
    add(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        help="KEY=VALUE,…: join_timeout bounds the wait for nodes",
    )
    add("--standalone", action="store_true", help="one node")
    add(
        "--max-restarts",
        "--max_restarts",
        type=int,
        default=None,
        help="restarts after failures (0: none): from the last checkpoint, else from nothing",
    )
    add("--monitor-interval", "--monitor_interval", type=float, default=0.1, help=_TOLD_AT_ONCE)
    add(
        "--start-method",
        "--start_method",
        default="spawn",
        choices=["spawn", "fork", "forkserver"],
        help="accepted: a script is always a process of its own, as with torchrun",
    )
    add(
        "--event-log-handler",
        "--event_log_handler",
        default="null",
        help="null; console: events on stderr",
    )
    add("--role", default="default", help="TORCHELASTIC role of the ranks")
    add("-m", "--module", action="store_true", help="the script is a Python module")
    add("--no-python", "--no_python", action="store_true", help="the script is a program")
    add("--run-path", "--run_path", action="store_true", help="run the script with runpy.run_path")
    add("--log-dir", "--log_dir", default="", help="also write each rank's output below this folder")
    add("-r", "--redirects", default="0", help="which outputs go to the log folder only: 0, 1, 2, 3 or RANK:N,…")
    add("-t", "--tee", default="0", help="which outputs go to the log folder too: 0, 1, 2, 3 or RANK:N,…")
    add("--local-ranks-filter", "--local_ranks_filter", default="", help="show only these local ranks")
    for name in ("stdout", "stderr"):
        flag = f"--duplicate-{name}-filters"
        add(flag, flag.replace("-", "_").replace("__", "--", 1), default="", help=_FILTER_HELP.format(name))
    add(
        "--node-rank",
        "--node_rank",
        type=int,
        default=_Untold(0),
        help="0 starts the job; others join it and show their ranks",
    )
    add(
        "--master-addr",
        "--master_addr",
        default="127.0.0.1",
        help="where lines of several nodes meet",
    )
    add(
        "--master-port",
        "--master_port",
        type=int,
        default=None,
        help="port of rank 0's store inside the job",
    )
    add(
        "--local-addr",
        "--local_addr",
        default=None,
        help="accepted: pods have addresses that go with them",
    )
    add(
        "--logs-specs",
        "--logs_specs",
        default=None,
        help="a torchrun.logs_specs plug-in says where logs go",
    )
    add(
        "--numa-binding",
        "--numa_binding",
        default=None,
        choices=["node", "socket", "exclusive", "core-complex"],
        help="bind each rank to the cores near its GPU, as torch does",
    )
    add(
        "--signals-to-handle",
        "--signals_to_handle",
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        help="signals that end the job (Ctrl-C on a terminal asks first)",
    )
    add(
        "--shutdown-timeout",
        "--shutdown_timeout",
        type=int,
        default=None,
        help="seconds from SIGTERM to SIGKILL",
    )
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
    own("--durability", default="", help="when a checkpoint counts: remote (in the store) or local")
    own("--mount", action="append", default=[], help="SRC:DST[:ro], live and never saved")
    own("--env", action="append", default=[], help="NAME=VALUE")
    own("--user", default="", help="uid[:gid] or name")
    own("--image", default="", help="root file system on every node")
    own("--shm-size", default="0")
    own("--cpus", type=float, default=0.0)
    own("--memory", default="0")
    own("--hook", action="append", default=[], help="EVENT=SIGNAL for the ranks: before-checkpoint, after-restore, …")
    own("--publish", action="append", default=[], help="[POD@]HOST_PORT[:POD_PORT][/udp]")
    own("--on", default="", help="only on these nodes: NODE,NODE")
    own("--gpus-per-pod", type=int, default=None, help="GPUs of each node (as many as ranks, where nodes have GPUs)")
    own("--output", "-o", default=None, help="table, json or yaml")
    made.add_argument("script", help="the script, module or program")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made


def environment_defaults(made: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """torchrun reads ``PET_<FLAG>`` for each flag that is not given."""
    defaults: dict[str, Any] = {}
    for action in made._actions:
        value = environ.get(f"PET_{action.dest.upper()}")
        own = action.dest in _OWN and action.dest != "virtual_local_rank"
        own = own or action.dest in ("logs_specs", "numa_binding")  # torchrun reads no variable for these
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
    """``--nproc-per-node``: a number, ``cpu``, ``gpu`` or ``auto``; ``gpus``: of each pod. Raises `UsageError`."""
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu" or (text == "auto" and not gpus):
        return os.cpu_count() or 1
    if text in ("gpu", "auto"):
        if not gpus:
            raise UsageError("--nproc-per-node gpu: the nodes have no GPU", "give a number, or cpu")
        return gpus
    if text == "xpu":
        raise UsageError(
            "--nproc-per-node xpu: no node has an XPU that moorage knows", "give a number, auto, cpu or gpu"
        )
    raise UsageError(f"--nproc-per-node {text!r} is not a number, auto, cpu or gpu")


def rendezvous_settings(text: str) -> dict[str, str]:
    """``--rdzv-conf``. Raises `UsageError`."""
    found: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = part.partition("=")
        if not key.strip() or not equals:
            raise UsageError(f"--rdzv-conf {text!r} is not KEY=VALUE,KEY=VALUE")
        found[key.strip()] = value.strip()
    return found


def _join_seconds(text: str) -> float:
    settings = rendezvous_settings(text)
    value = settings.get("join_timeout") or settings.get("timeout") or "0"
    try:
        seconds = float(value)
    except ValueError:
        raise UsageError(f"--rdzv-conf join_timeout={value}: not a number of seconds") from None
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise UsageError(f"--rdzv-conf join_timeout={value}: not a number of seconds")
    return seconds


def words(text: str) -> list[str]:
    """A comma separated list in which two commas stand for one."""
    parts = [part.replace("\0", ",").strip() for part in text.replace(",,", "\0").split(",")]
    return [part for part in parts if part]


def signals(text: str) -> list[signal.Signals]:
    """``--signals-to-handle``. Raises `UsageError`."""
    found = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle {name}: no signal that can be handled", "such as SIGTERM,SIGUSR1")
        found.append(signal.Signals[name])
    return found


def _local_ranks(text: str) -> list[int]:
    if not re.fullmatch(r"(\d+(,\d+)*)?", text.replace(" ", "")):
        raise UsageError(f"--local-ranks-filter {text!r} is not a list of numbers", "such as 0,1,2")
    return [int(part) for part in text.split(",") if part.strip()]


def _meeting(found: Mapping[str, Any], nnodes: int) -> str:
    """What the lines of several nodes have in common; empty for a line that is alone."""
    if found["standalone"] or nnodes == 1:
        return ""
    if found["rdzv_backend"] == "c10d" and not found["rdzv_endpoint"]:
        return ""
    place = found["rdzv_endpoint"] or f"{found['master_addr']}:{found['master_port'] or DEFAULT_PORT}"
    if place.rpartition(":")[0] in _LOOPBACK:
        if not found["rdzv_endpoint"] and isinstance(found["node_rank"], _Untold):
            return ""  # a line that names neither a place nor its own rank is alone
        place = f"{socket.gethostname()}/{place}"  # every machine has this address
    return f"{place}/{found['rdzv_id']}"


def _refuse(found: Mapping[str, Any], nnodes: int) -> None:
    if found["rdzv_backend"] not in ("static", "c10d"):
        raise UsageError(
            f"--rdzv-backend {found['rdzv_backend']} is not supported",
            "moorage finds the ranks itself: use static or c10d",
        )
    if found["standalone"] and nnodes > 1:
        raise UsageError(f"--standalone means one node, --nnodes says {nnodes}", "leave one of them out")
    if found["run_path"] and (found["module"] or found["no_python"]):
        raise UsageError("--run-path excludes --module and --no-python")
    if found["event_log_handler"] not in ("null", "console", "dynamic_rendezvous"):
        raise UsageError(f"--event-log-handler {found['event_log_handler']} does not exist", "use null or console")
    if not 0 <= found["node_rank"] < nnodes:
        raise UsageError(f"--node-rank {found['node_rank']} is not one of {nnodes} nodes", f"0 to {nnodes - 1}")
    if found["monitor_interval"] <= 0:
        raise UsageError(f"--monitor-interval {found['monitor_interval']:g} is too small")
    if (found["shutdown_timeout"] or 0) < 0:
        raise UsageError(f"--shutdown-timeout {found['shutdown_timeout']} is too small", "the least is 0")


def parse(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> Launch:
    """Parse what follows ``moorage torchrun``. Raises `UsageError`; ``--help`` exits as argparse does."""
    environ = os.environ if environ is None else environ
    made = parser()
    environment_defaults(made, environ)
    found = vars(made.parse_args(list(arguments)))
    nnodes = nodes(found["nnodes"])
    _refuse(found, nnodes)
    port = found["master_port"] or DEFAULT_PORT
    endpoint_port = found["rdzv_endpoint"].rpartition(":")[2]
    if found["rdzv_endpoint"] and endpoint_port.isdigit() and int(endpoint_port):
        port = int(endpoint_port)
    # torchrun makes an id for a job on one node that was told of no meeting place.
    alone = found["rdzv_backend"] == "static" and not found["rdzv_endpoint"] and found["master_port"] is None
    fresh = found["standalone"] or (alone and nnodes == 1)
    grace = found["shutdown_timeout"]
    if grace is None:
        text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
        grace = int(text) if text.isdigit() else 30
    own = [name for name in found if name in _OWN]
    script, rest = found["script"], list(found["arguments"])
    if found["run_path"]:
        code = "import runpy,sys; sys.argv=sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        script, rest = "-c", [code, script, *rest]
    return Launch(
        script=script,
        arguments=rest,
        nnodes=nnodes,
        nproc_per_node=found["nproc_per_node"],
        module=found["module"],
        no_python=found["no_python"],
        max_restarts=found["max_restarts"],
        master_port=port,
        run_id=str(uuid.uuid4()) if fresh else found["rdzv_id"],
        role=found["role"],
        log_dir=found["log_dir"],
        redirects=found["redirects"],
        tee=found["tee"],
        local_ranks_filter=_local_ranks(found["local_ranks_filter"]),
        node_rank=found["node_rank"],
        rendezvous=_meeting(found, nnodes),
        join_seconds=_join_seconds(found["rdzv_conf"]),
        console_events=found["event_log_handler"] == "console",
        filters=(words(found["duplicate_stdout_filters"]), words(found["duplicate_stderr_filters"])),
        logs_specs=found["logs_specs"] or "",
        numa_binding=found["numa_binding"] or "",
        signals=signals(found["signals_to_handle"]),
        shutdown_seconds=float(grace),
        options={name: found[name] for name in own},
    )
