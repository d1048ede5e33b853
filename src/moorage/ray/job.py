"""`launch` and `RayJob`: a job of moorage as Ray users expect one, every verb a future (`ray.ObjectRef`)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from moorage.config import ClientConfig, client_config
from moorage.coordinator.client import CheckpointInfo, job_spec
from moorage.errors import EnvironmentLacking
from moorage.ray import options

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as _missing:
    raise EnvironmentLacking("ray is not installed", "pip install 'moorage[ray]'") from _missing

from moorage.ray.bundles import Wish
from moorage.ray.controller import Controller, Order
from moorage.ray.world import require


class RayJob:
    """A job that runs. Every method returns an ObjectRef: ``ray.get`` it, ``await`` it, or give it to ``ray.wait``.

    A future of a verb that failed raises a subclass of the `MoorageError` that says why. The job lives as long as the
    Ray job that started it and this handle's actor; a handle can be passed to tasks and actors.
    """

    def __init__(self, name: str, actor: Any, end: Any) -> None:
        self.name = name
        self._actor = actor
        self._end = end

    def __repr__(self) -> str:
        return f"<RayJob {self.name}>"

    def done(self) -> Any:
        """The end: `JobInfo` with ``exit_code``. The future raises `JobFailed` when it is not brought back any more,
        and whatever kept it from being started."""
        return self._end

    def started(self) -> Any:
        """`JobInfo`, as soon as all ranks run."""
        return self._actor.started.remote()

    def status(self) -> Any:
        """`JobInfo` now."""
        return self._actor.status.remote()

    def progress(self) -> Any:
        """`Progress`: phase, nodes, budgets, newest checkpoint and metrics. Answers in every phase."""
        return self._actor.progress.remote()

    def checkpoint(self) -> Any:
        """`CheckpointInfo`, when it is committed; the job runs on."""
        return self._actor.checkpoint.remote()

    def park(self) -> Any:
        """`CheckpointInfo`, when the job is off its nodes and its bundles are Ray's again."""
        return self._actor.park.remote()

    def restore(self, checkpoint: str | CheckpointInfo | None = None) -> Any:
        """`JobInfo`, when the job runs again, from this checkpoint (the newest)."""
        name = checkpoint.id if isinstance(checkpoint, CheckpointInfo) else checkpoint or ""
        return self._actor.restore.remote(name)

    def stop(self, *, checkpoint: bool = False) -> Any:
        """`JobInfo`, when no process of it is left; with ``checkpoint`` after a last one."""
        return self._actor.stop.remote(checkpoint)

    def reports(self, rank: int = 0) -> Any:
        """A list of all `Report` of a rank."""
        return self._actor.reports.remote(rank)

    def events(self) -> Any:
        """A list of `EventInfo`: what happened, in sentences."""
        return self._actor.events.remote()

    def logs(self, rank: int = -1) -> Any:
        """What a rank (-1: all) wrote so far, as text."""
        return self._actor.logs.remote(rank)

    def supervisors(self) -> Any:
        """The actors in the bundles, in the order of the pods."""
        return self._actor.supervisors.remote()


def launch(
    command: Sequence[str],
    *,
    name: str,
    scaling_config: Any = None,
    failure_config: Any = None,
    checkpoint_config: Any = None,
    working_directory: str | None = None,
    env: Mapping[str, str] | None = None,
    rendezvous: bool = True,
    files: Mapping[str, bytes] | None = None,
    if_exists: str = "fail",
    config: ClientConfig | None = None,
    **more: Any,
) -> RayJob:
    """Run ``command`` as one rank on each bundle, in pods; returns at once.

    ``rendezvous``: the ranks get torchrun's variables. ``files``: laid on each machine before the ranks begin (absolute
    path → content). ``if_exists``: fail, resume (a job of this name that is parked, failed or still runs) or replace.
    ``more``: options of `moorage.coordinator.client.job_spec`, such as ``mounts``. Raises `UsageError`.
    """
    require()
    scaling = options.scaling(scaling_config)
    keeping = options.checkpoints(checkpoint_config)
    bundle = options.bundle(scaling)
    spec = job_spec(
        command,
        name=name,
        pods=scaling.num_workers,
        rendezvous=rendezvous,
        env=env,
        working_directory=working_directory,
        gpus_per_pod=int(bundle.get("GPU", 0)),
        checkpoint_every=keeping.every_s,
        keep_last=keeping.num_to_keep or 3,
        # Where a job comes back is Ray's to say: the controller asks for bundles, then for the restore.
        on_failure="fail",
        keeper="its Ray driver",
        **more,
    )
    order = Order(
        spec=spec.SerializeToString(deterministic=True),
        wish=Wish(
            bundle=bundle,
            count=scaling.num_workers,
            strategy=scaling.placement_strategy,
            selector=dict(scaling.label_selector or {}),
            files=dict(files or {}),
            folder=spec.working_directory,
        ),
        config=config or client_config(),
        limits=options.failures(failure_config),
        if_exists=if_exists,
    )
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # On the driver's node: the certificates of the client's settings lie there.
    actor = ray.remote(Controller).options(num_cpus=0, scheduling_strategy=here, max_concurrency=100).remote(order)
    return RayJob(name, actor, actor.run.remote())


def python() -> str:
    """The interpreter of the ranks: the driver's."""
    return sys.executable
