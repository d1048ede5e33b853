"""From what a user says to a `JobSpec`. Pure."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from moorage.errors import UsageError
from moorage.hooks import KINDS
from moorage.v1 import types_pb2

ON_FAILURE = {"restore": types_pb2.ON_FAILURE_RESTORE, "fail": types_pb2.ON_FAILURE_FAIL}
IF_INCOMPATIBLE = {"fail": types_pb2.IF_INCOMPATIBLE_FAIL, "cold-start": types_pb2.IF_INCOMPATIBLE_COLD_START}
IF_EXISTS = {
    "fail": types_pb2.IF_EXISTS_FAIL,
    "resume": types_pb2.IF_EXISTS_RESUME,
    "replace": types_pb2.IF_EXISTS_REPLACE,
}
#: Bytes. runc and the first program of a pod need about half of it.
LEAST_MEMORY = 16 << 20
# Variables of the submitting shell that a job expects and that name nothing of the submitting machine.
_CARRIED = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")


def choice(table: Mapping[str, int], value: str, flag: str) -> int:
    """The number of ``value``. Raises `UsageError` naming ``flag`` and what is allowed."""
    if value not in table:
        raise UsageError(f"{flag} {value!r} does not exist", f"use one of {', '.join(table)}")
    return table[value]


def check_text(what: str, text: str) -> None:
    """Raises `UsageError` for a text that cannot travel: bytes from the command line that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode(errors="surrogateescape")
        raise UsageError(f"{what} is not valid UTF-8: {shown!r}", "put such bytes into a file or a script") from None


def _folder(working_directory: str | None) -> str:
    try:
        return str(Path(working_directory or Path.cwd()).absolute())
    except FileNotFoundError:
        raise UsageError("the working directory does not exist any more", "go to one that does") from None


def mount(text: str) -> types_pb2.Mount:
    """Parse ``SRC:DST[:ro]``. Raises `UsageError`."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
        raise UsageError(f"--mount {text!r} is not SRC:DST[:ro]")
    if not all(part.startswith("/") for part in parts[:2]):
        raise UsageError(f"--mount {text!r}: both paths must be absolute")
    return types_pb2.Mount(source=parts[0], destination=os.path.normpath(parts[1]), read_only=parts[2:] == ["ro"])


def publish(text: str) -> types_pb2.Publish:
    """Parse ``HOST_PORT:POD_PORT[/udp]``, for pod 0, or ``POD@HOST_PORT:POD_PORT``. Raises `UsageError`."""
    body, _, protocol = text.partition("/")
    pod, at, ports = body.rpartition("@")
    host, _, inner = ports.partition(":")
    try:
        message = types_pb2.Publish(
            host_port=int(host), pod_port=int(inner or host), protocol=protocol or "tcp", pod=int(pod) if at else 0
        )
    except ValueError:
        raise UsageError(f"--publish {text!r} is not [POD@]HOST_PORT[:POD_PORT][/udp]") from None
    if not (0 < message.host_port < 65536 and 0 < message.pod_port < 65536) or message.protocol not in ("tcp", "udp"):
        raise UsageError(f"--publish {text!r}: ports are 1 to 65535, protocols tcp and udp")
    return message


def hook_signal(kind: str, name: str | int) -> int:
    """The number of the signal (``SIGUSR1``, ``USR1`` or a number) for an event. Raises `UsageError`."""
    if kind not in KINDS:
        raise UsageError(f"--hook {kind}: no event is called so", f"there are {', '.join(KINDS)}")
    text = str(name).upper()
    found = int(text) if text.isdecimal() else getattr(signal, text if text.startswith("SIG") else f"SIG{text}", None)
    if not isinstance(found, int) or found not in set(signal.Signals):
        raise UsageError(f"--hook {kind}={name}: no signal is called so", "such as SIGUSR1")
    if found in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        raise UsageError(f"--hook {kind}={name}: a program cannot tell this signal apart", "such as SIGUSR1")
    return int(found)


def job_spec(
    command: Sequence[str],
    *,
    name: str = "",
    pods: int = 1,
    ranks_per_pod: int = 1,
    rendezvous: bool = False,
    env: Mapping[str, str] | None = None,
    working_directory: str | None = None,
    gpus_per_pod: int = 0,
    user: str = "",
    image: str = "",
    mounts: Iterable[str] = (),
    publish_ports: Iterable[str] = (),
    shm_bytes: int = 0,
    cpus: float = 0.0,
    memory_bytes: int = 0,
    checkpoint_every: float = 0.0,
    keep_last: int = 3,
    on_failure: str = "restore",
    max_restarts: int | None = None,
    if_incompatible: str = "fail",
    hang_timeout: float = 0.0,
    attempt_deadline: float = 0.0,
    durability: str = "",
    master_port: int = 0,
    nodes: Iterable[str] = (),
    labels: Mapping[str, str] | None = None,
    hooks: Mapping[str, str | int] | None = None,
    rank_env: Mapping[str, str] | None = None,
    elastic: bool = False,
    keeper: str = "",
) -> types_pb2.JobSpec:
    """A job that runs ``command`` as every rank. Durations in seconds, sizes in bytes, 0 meaning the default or none.

    The caller's PATH, HOME, LANG and the like are carried; all else of the environment only if ``env`` names it.
    ``max_restarts`` None sets no limit, but three failures of the job in a row with no new checkpoint between them end
    it; 0 means that no failure is followed by a restore, as ``on_failure="fail"`` does. ``elastic``: where there is no
    checkpoint that helps, a restart begins from nothing, as torchrun's do. ``keeper``: who brings the job back where
    ``on_failure`` is "fail", as the events name it ("its Ray driver"). Raises `UsageError` for values that cannot be.
    """
    if not command:
        raise UsageError("no command is given", "moorage run -- COMMAND...")
    if durability not in ("", "local", "remote"):
        raise UsageError(f"--durability {durability!r} does not exist", "local or remote")
    for flag, value, least in (
        ("--pods", pods, 1),
        ("ranks per pod", ranks_per_pod, 1),
        ("--keep-last", keep_last, 1),
        ("--max-restarts", max_restarts or 0, 0),
        ("--gpus-per-pod", gpus_per_pod, 0),
        ("--checkpoint-every", checkpoint_every, 0),
        ("--hang-timeout", hang_timeout, 0),
        ("--cpus", cpus, 0),
    ):
        if value < least:
            raise UsageError(f"{flag} {value:g} is too small", f"the least is {least}")
    after_failure = choice(ON_FAILURE, on_failure, "--on-failure")
    if max_restarts == 0:
        after_failure = types_pb2.ON_FAILURE_FAIL  # on the wire, 0 restarts are no limit
    if 0 < memory_bytes < LEAST_MEMORY:
        raise UsageError(
            f"--memory of {memory_bytes} bytes is too small", f"no pod starts with less than {LEAST_MEMORY >> 20}MiB"
        )
    folder = _folder(working_directory)
    variables = {key: os.environ[key] for key in _CARRIED if key in os.environ} | dict(env or {})
    for what, texts in (
        ("the command", command),
        ("--env", [text for pair in variables.items() for text in pair]),
        ("the working directory", [folder]),
        ("--mount", mounts := list(mounts)),
    ):
        for text in texts:
            check_text(what, text)
    return types_pb2.JobSpec(
        name=name,
        pods=pods,
        ranks_per_pod=ranks_per_pod,
        rendezvous=rendezvous,
        command=list(command),
        env=variables,
        working_directory=folder,
        gpus_per_pod=gpus_per_pod,
        user=user,
        image=image,
        mounts=[mount(text) for text in mounts],
        publish=[publish(text) for text in publish_ports],
        shm_bytes=shm_bytes,
        cpus=cpus,
        memory_bytes=memory_bytes,
        master_port=master_port,
        nodes=list(nodes),
        labels=dict(labels or {}),
        hooks={kind: hook_signal(kind, name) for kind, name in (hooks or {}).items()},
        rank_env=dict(rank_env or {}),
        policy=types_pb2.Policy(
            checkpoint_every_seconds=checkpoint_every,
            keep_last=keep_last,
            on_failure=after_failure,  # type: ignore[arg-type]
            max_restarts=max_restarts or 0,
            if_incompatible=choice(IF_INCOMPATIBLE, if_incompatible, "--if-incompatible"),  # type: ignore[arg-type]
            hang_seconds=hang_timeout,
            attempt_deadline_seconds=attempt_deadline,
            elastic=elastic,
            durability=durability,
            keeper=keeper,
        ),
    )


def torchrun_command(
    script: str, arguments: Sequence[str], *, module: bool = False, no_python: bool = False
) -> list[str]:
    """The argv that torchrun would start for each rank, with this interpreter (``PYTHON_EXEC`` as torchrun has it)."""
    if no_python:
        if module:
            raise UsageError("--no-python and --module exclude each other")
        return [script, *arguments]
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    return [python, "-u", *(["-m"] if module else []), script, *arguments]


def torchrun_spec(
    script: str,
    arguments: Sequence[str] = (),
    *,
    nnodes: int = 1,
    nproc_per_node: int = 1,
    module: bool = False,
    no_python: bool = False,
    **options: object,
) -> types_pb2.JobSpec:
    """What ``torchrun --nnodes N --nproc-per-node P script arguments`` is as a job: one pod a node.

    ``options`` are those of `job_spec`. Raises `UsageError`.
    """
    command = torchrun_command(script, arguments, module=module, no_python=no_python)
    return job_spec(
        command,
        pods=nnodes,
        ranks_per_pod=nproc_per_node,
        rendezvous=True,
        **options,  # type: ignore[arg-type]
    )
