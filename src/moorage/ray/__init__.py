"""moorage for Ray: a Ray job whose ranks are checkpointed, moved and brought back. Needs the extra ``moorage[ray]``.

>>> import moorage.ray as moorage_ray
>>> job = moorage_ray.launch(["python", "train.py"], scaling_config=moorage_ray.ScalingConfig(num_workers=2))
>>> checkpoint = ray.get(job.checkpoint())
>>> ray.get(job.done()).exit_code

`TorchTrainer` runs an unchanged ``train_loop_per_worker``. docs/tutorials/ray.md is the way in, docs/ray.md the
reference. Ray places, moorage runs: the ranks live in pods beside Ray, and no process of Ray's is ever captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "CheckpointConfig",
    "FailureConfig",
    "Progress",
    "RayJob",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "TorchTrainer",
    "launch",
]

if TYPE_CHECKING:
    from moorage.ray.job import RayJob, launch
    from moorage.ray.options import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from moorage.ray.plan import Progress
    from moorage.ray.trainer import Result, TorchTrainer

_HOMES = {
    "CheckpointConfig": "options",
    "FailureConfig": "options",
    "RunConfig": "options",
    "ScalingConfig": "options",
    "Progress": "plan",
    "RayJob": "job",
    "launch": "job",
    "Result": "trainer",
    "TorchTrainer": "trainer",
}


def __getattr__(name: str) -> Any:
    # A rank in its pod imports this package too, and must not pay for Ray or gRPC.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"moorage.ray.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'moorage.ray' has no attribute {name!r}")
