"""Ray Train's words for how a job is to run, and what they mean here. Pure: nothing of Ray is imported.

Objects of Ray's own ``ray.train`` are accepted in their place: only their attributes are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moorage.errors import UsageError

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
#: Fields of Ray's ScalingConfig that ask for what is not done here; a value other than these is refused.
_REFUSED: dict[str, tuple[Any, ...]] = {"use_tpu": (False, None), "topology": (None,), "accelerator_type": (None,)}


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, and what each needs.

    ``num_workers``: pods, one rank each, one bundle each. ``resources_per_worker``: Ray's resources of a bundle
    (default one CPU, and one GPU with ``use_gpu``); ``label_selector``: which Ray nodes may have one.
    """

    num_workers: int = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    label_selector: Mapping[str, str] | None = None


@dataclass(frozen=True)
class FailureConfig:
    """How often a job is brought back. -1: without end.

    ``max_failures``: after a rank, an actor or a node has failed. ``max_preemptions``: after Ray has announced that a
    node goes away; these do not count as failures.
    """

    max_failures: int = 3
    max_preemptions: int = -1


@dataclass(frozen=True)
class CheckpointConfig:
    """``num_to_keep``: committed checkpoints to keep (None: 3). ``every_s``: seconds between heartbeats; 0: none."""

    num_to_keep: int | None = None
    every_s: float = 60.0


@dataclass(frozen=True)
class RunConfig:
    """``name``: of the job, and of its folder below ``storage_path`` (default: ``~/moorage_results``)."""

    name: str | None = None
    storage_path: str | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)


def scaling(given: Any) -> ScalingConfig:
    """Ours from ours or from Ray's. Raises `UsageError` for what cannot be."""
    if given is None:
        return ScalingConfig()
    workers = getattr(given, "num_workers", 1)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise UsageError(f"num_workers is {workers!r}", "give a number of workers; a range of them cannot be had")
    for name, allowed in _REFUSED.items():
        if (value := getattr(given, name, allowed[0])) not in allowed:
            raise UsageError(f"ScalingConfig({name}={value!r}) cannot be had", "leave it out")
    strategy = getattr(given, "placement_strategy", "PACK") or "PACK"
    if strategy not in STRATEGIES:
        raise UsageError(f"placement_strategy {strategy!r} does not exist", f"use one of {', '.join(STRATEGIES)}")
    selector = getattr(given, "label_selector", None)
    if selector is not None and not isinstance(selector, Mapping):
        raise UsageError("label_selector must be one mapping for all workers")
    resources = getattr(given, "resources_per_worker", None)
    return ScalingConfig(
        num_workers=workers,
        use_gpu=bool(getattr(given, "use_gpu", False)),
        resources_per_worker=dict(resources) if resources is not None else None,
        placement_strategy=strategy,
        label_selector=dict(selector) if selector else None,
    )


def bundle(config: ScalingConfig) -> dict[str, float]:
    """The resources of one bundle, in Ray's words. Raises `UsageError`."""
    resources = dict(config.resources_per_worker or {"CPU": 1.0})
    if config.use_gpu:
        resources.setdefault("GPU", 1.0)
    elif resources.get("GPU"):
        raise UsageError("resources_per_worker has GPUs, and use_gpu is False", "say ScalingConfig(use_gpu=True)")
    if bad := {name: value for name, value in resources.items() if value < 0}:
        raise UsageError(f"resources_per_worker {bad} is less than nothing")
    if resources.get("GPU", 0) % 1:
        raise UsageError(f"{resources['GPU']} GPUs for a worker cannot be had", "give each worker whole GPUs")
    return {name: float(value) for name, value in resources.items() if value}


def failures(given: Any) -> FailureConfig:
    """Ours from ours or from Ray's. Raises `UsageError`."""
    if given is None:
        return FailureConfig()
    found = FailureConfig(
        max_failures=getattr(given, "max_failures", 3), max_preemptions=getattr(given, "max_preemptions", -1)
    )
    for name in ("max_failures", "max_preemptions"):
        value = getattr(found, name)
        if not isinstance(value, int) or value < -1:
            raise UsageError(f"{name} is {value!r}", "give a number from 0, or -1 for no limit")
    return found


def checkpoints(given: Any) -> CheckpointConfig:
    """Ours from ours or from Ray's. Raises `UsageError`."""
    if given is None:
        return CheckpointConfig()
    keep = getattr(given, "num_to_keep", None)
    if keep is not None and keep < 1:
        raise UsageError(f"num_to_keep is {keep}", "keep at least one")
    return CheckpointConfig(num_to_keep=keep, every_s=getattr(given, "every_s", CheckpointConfig().every_s))


def run_config(given: Any) -> RunConfig:
    """Ours from ours or from Ray's."""
    if given is None:
        return RunConfig()
    storage = getattr(given, "storage_path", None)
    if storage is not None and "://" in str(storage):
        raise UsageError(f"storage_path {storage!r} is no folder", "name a folder that every node has")
    return RunConfig(
        name=getattr(given, "name", None),
        storage_path=None if storage is None else str(storage),
        failure_config=failures(getattr(given, "failure_config", None)),
        checkpoint_config=checkpoints(getattr(given, "checkpoint_config", None)),
    )
