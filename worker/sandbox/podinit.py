"""``moorage-init``, pid 1 of a pod: its configuration file, and how it gets into the pod's upper layer.

The file is a list of fields, each ended by a NUL byte, so that the program needs no parser::

    moorage-init 1
    cwd PATH | umask OCTAL | uid N | gid N | groups N,N,… | grace_ms N     (each in one field: name, space, value)
    events PATH                 the file that tells of checkpoints and restores
    hook KIND NUMBER …          signal for the ranks at each event of this kind
    env NAME=VALUE …            common to all ranks
    rank N                      opens a rank; the fields behind it are that rank's
    argv ARGUMENT …             in order
    env NAME=VALUE …            over the common ones
    end
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from moorage.errors import UsageError
from moorage.worker.sandbox import native

BINARY: Final = "moorage-init"
#: Where both files lie inside the pod: the configuration is for root alone, the program also for what `entering` names.
FOLDER: Final = "/.moorage"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One rank: its world rank, command (``argv[0]`` is looked up in its ``PATH``) and variables of its own."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitConfig:
    """What pid 1 starts, and as whom."""

    ranks: Sequence[Rank]
    cwd: str = "/"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    uid: int = 0
    gid: int = 0
    groups: Sequence[int] = ()
    umask: int = 0o022
    events: str = ""
    hooks: Mapping[str, int] = dataclasses.field(default_factory=dict)  # kind of event: signal
    grace_seconds: float = 10.0  # between SIGTERM and SIGKILL for the other ranks, when one has failed


def encode(config: InitConfig) -> bytes:
    """The configuration file. Raises `UsageError` for a NUL byte in any string, or a rank without a command."""
    fields = [
        "moorage-init 1",
        f"cwd {config.cwd}",
        f"umask {config.umask:o}",
        f"uid {config.uid}",
        f"gid {config.gid}",
        "groups " + ",".join(map(str, config.groups)),
        f"grace_ms {round(config.grace_seconds * 1000)}",
        *([f"events {config.events}"] if config.events else []),
        *(f"hook {kind} {number}" for kind, number in config.hooks.items()),
        *(f"env {name}={value}" for name, value in config.env.items()),
    ]
    for rank in config.ranks:
        if not rank.argv or not rank.argv[0]:
            raise UsageError(f"rank {rank.rank} has no command")
        fields.append(f"rank {rank.rank}")
        fields += [f"argv {argument}" for argument in rank.argv]
        fields += [f"env {name}={value}" for name, value in rank.env.items()]
    fields.append("end")
    for field in fields:
        if "\0" in field:
            raise UsageError(f"a NUL byte in the pod's configuration ({field.split(' ', 1)[0]})")
    return b"".join(os.fsencode(field) + b"\0" for field in fields)


def binary() -> Path:
    """The installed program. Raises `EnvironmentLacking`."""
    return native.find(BINARY, "podinit", variable="MOORAGE_INIT")


def install(upper: Path, config: InitConfig) -> None:
    """Lay program (0755) and configuration (0600) into the pod's fresh upper layer, below `FOLDER` (0711).

    Before it is mounted: through the merged folder, a symlink of that name in a job's image would lead to the host.
    """
    folder = upper / FOLDER.lstrip("/")
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o711)
    shutil.copyfile(binary(), folder / "init")
    (folder / "init").chmod(0o755)
    descriptor = os.open(folder / "config", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encode(config))


def argv() -> list[str]:
    """The command of pid 1: `oci.PodConfig.argv`."""
    return [f"{FOLDER}/init", f"{FOLDER}/config"]


def entering(folder: str, command: Sequence[str]) -> list[str]:
    """The command line that runs a command in a folder of the pod, entered with the rights of its user alone: runc
    would enter it as root first, and so past folders that are closed to that user."""
    return [f"{FOLDER}/init", "--in", folder, *command]
