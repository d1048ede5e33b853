"""A job file (``job.yaml``): its fields, and the job that they make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moorage.cli.values import seconds, size
from moorage.errors import NotFound, UsageError

if TYPE_CHECKING:
    from moorage.v1.types_pb2 import JobSpec

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
    "hooks": dict,
}


def read_job_file(path: Path) -> dict[str, Any]:
    """Read ``job.yaml``. Raises `NotFound`, `UsageError` naming the field."""
    return checked(read_mapping(path), path)


def read_mapping(path: Path) -> dict[str, Any]:
    """What a YAML file holds at its top. Raises `NotFound`, `UsageError`."""
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
    return content


def checked(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """The fields of a job file, as they must be. Raises `UsageError` naming the field."""
    for name, value in content.items():
        if name not in SPEC_FIELDS:
            raise UsageError(f"job file {path}: no field {name!r}", f"fields: {', '.join(SPEC_FIELDS)}")
        kind = SPEC_FIELDS[name]
        if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
            content[name] = str(value)
        elif not isinstance(value, (int, float) if kind is float else kind):
            raise UsageError(f"job file {path}: {name} must be a {kind.__name__}, not {type(value).__name__}")
    return content


def spec_of(
    given: Mapping[str, Any], *, env: Mapping[str, str] | None = None, hooks: Mapping[str, str] | None = None
) -> JobSpec:
    """The job that checked fields make; ``env`` and ``hooks`` go over those of the file. Raises `UsageError`."""
    from moorage.coordinator.client import job_spec

    return job_spec(
        [str(part) for part in given.get("command", [])],
        name=given.get("name", ""),
        pods=given.get("pods", 1),
        ranks_per_pod=given.get("ranks_per_pod", 1),
        rendezvous=given.get("torchrun", False),
        env={str(key): str(value) for key, value in given.get("env", {}).items()} | dict(env or {}),
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
        hooks={str(key): str(value) for key, value in given.get("hooks", {}).items()} | dict(hooks or {}),
    )
