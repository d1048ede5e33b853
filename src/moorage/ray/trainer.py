"""`TorchTrainer`: Ray Train's entry, with the workers in pods that are checkpointed and brought back in mid-step."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moorage.config import ClientConfig
from moorage.errors import JobFailed, UsageError
from moorage.ray import job, options
from moorage.ray.job import RayJob
from moorage.ray.session import Checkpoint
from moorage.ray.world import require

_PAYLOAD = ".moorage-ray/train.pickle"
_MOST_BYTES = 64 << 20
_NONE: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Result:
    """How a training ended. ``metrics``: the last report of rank 0; ``history``: all of them. ``error``: why it failed,
    and None where it did not. ``path``: the run's folder, on the nodes where the ranks ended."""

    metrics: dict[str, Any] | None
    checkpoint: Checkpoint | None
    path: str
    error: Exception | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    info: Any = None


class TorchTrainer:
    """``TorchTrainer(train_loop_per_worker, scaling_config=ScalingConfig(num_workers=2)).fit()``.

    The arguments are Ray Train's. ``datasets``: sequences of rows; of a Ray data set the rows are taken when the job
    begins. ``torch_config``: only its ``backend`` is read; ``backend=None`` on a loop without torch. ``env``,
    ``if_exists`` and ``more`` are those of `moorage.ray.launch`.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: Any = None,
        scaling_config: Any = None,
        run_config: Any = None,
        datasets: Mapping[str, Any] = _NONE,
        metadata: dict[str, Any] | None = None,
        backend: str | None = "auto",
        env: Mapping[str, str] | None = None,
        if_exists: str = "fail",
        config: ClientConfig | None = None,
        **more: Any,
    ) -> None:
        self._loop = train_loop_per_worker
        self._takes_config = _takes_config(train_loop_per_worker)
        self._config = train_loop_config or {}
        self._scaling = options.scaling(scaling_config)
        self._run = options.run_config(run_config)
        self._name = self._run.name or f"train-{uuid.uuid4().hex[:8]}"
        self._folder = Path(self._run.storage_path or Path.home() / "moorage_results").absolute() / self._name
        self._datasets = datasets
        self._metadata = metadata or {}
        self._backend = _backend(backend, torch_config, gpu=self._scaling.use_gpu)
        self._env = dict(env or {})
        self._if_exists = if_exists
        self._client = config
        self._more = more

    def fit(self) -> Result:
        """Train to the end. Raises nothing for a training that failed: `Result.error` has it, as with Ray Tune; what
        kept it from being started is raised."""
        import ray

        started = self.start()
        error: Exception | None = None
        info = None
        try:
            info = ray.get(started.done())
        except JobFailed as failed:
            error = failed
        reports = ray.get(started.reports())
        kept = [report.checkpoint for report in reports if report.checkpoint]
        return Result(
            metrics=reports[-1].metrics if reports else None,
            checkpoint=Checkpoint(self._folder / kept[-1]) if kept else None,
            path=str(self._folder),
            error=error,
            history=[report.metrics for report in reports],
            info=info,
        )

    def start(self) -> RayJob:
        """Begin, and return at once: the handle has checkpoint, park, restore and progress."""
        require()
        payload = self._folder / _PAYLOAD
        return job.launch(
            [job.python(), "-u", "-m", "moorage.ray.rank", str(payload)],
            name=self._name,
            scaling_config=self._scaling,
            failure_config=self._run.failure_config,
            checkpoint_config=self._run.checkpoint_config,
            working_directory=str(self._folder),
            env={"OMP_NUM_THREADS": "1", **self._env},
            files={str(payload): self._payload()},
            if_exists=self._if_exists,
            config=self._client,
            **self._more,
        )

    def _payload(self) -> bytes:
        import cloudpickle

        module = _by_value(self._loop)
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        try:
            data: bytes = cloudpickle.dumps(
                {
                    "name": self._name,
                    "folder": str(self._folder),
                    "loop": self._loop,
                    "takes_config": self._takes_config,
                    "config": self._config,
                    "datasets": {name: rows(name, value) for name, value in self._datasets.items()},
                    "metadata": self._metadata,
                    "backend": self._backend,
                }
            )
        finally:
            if module is not None:
                cloudpickle.unregister_pickle_by_value(module)
        if len(data) > _MOST_BYTES:
            raise UsageError(
                f"the loop with its data is {len(data) >> 20} MiB large", "let the loop read its data from a folder"
            )
        return data


def rows(name: str, value: Any) -> Any:
    """The rows of a data set: the sequence itself, or what ``take_all`` of a Ray data set gives."""
    if callable(getattr(value, "take_all", None)):
        return value.take_all()
    if hasattr(value, "__getitem__") and hasattr(value, "__len__"):
        return value
    raise UsageError(f"the data set {name!r} is a {type(value).__name__}", "give a sequence of rows")


def _takes_config(loop: Callable[..., Any]) -> bool:
    count = len(inspect.signature(loop).parameters)
    if count > 1:
        raise UsageError("train_loop_per_worker has more than one parameter", "it takes none, or its configuration")
    return count == 1


def _backend(backend: str | None, torch_config: Any, *, gpu: bool) -> str | None:
    if backend != "auto":
        return backend
    if named := getattr(torch_config, "backend", None):
        return str(named)
    if importlib.util.find_spec("torch") is None:
        return None
    return "nccl" if gpu else "gloo"


def _by_value(loop: Callable[..., Any]) -> Any:
    """The loop's module if a pod may not find it: one that is not installed."""
    module = sys.modules.get(getattr(loop, "__module__", None) or "")
    where = getattr(module, "__file__", None)
    if module is None or module.__name__ == "__main__" or where is None or "site-packages" in where:
        return None
    return module
