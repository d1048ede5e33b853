"""What a training loop finds as ``ray.train`` within a rank: `report`, `get_context`, `get_dataset_shard` and the like.

The loop's own line ``from ray import train`` (or ``import ray.train.torch``) gets these modules, so it is not changed;
the real ``ray.train`` would look for a controller that is not there. All of it is plain memory and files of the rank:
nothing that a checkpoint could not hold.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from moorage.ray import options, shard
from moorage.ray.wire import Report, line


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the rank stands."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int


class Checkpoint:
    """A folder with files that the loop wrote, as Ray Train's: an artifact, not what moorage restores from."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    @classmethod
    def from_directory(cls, path: str | Path) -> Checkpoint:
        """The checkpoint in this folder."""
        return cls(path)

    def to_directory(self, path: str | Path | None = None) -> str:
        """A copy in ``path`` (a new temporary folder)."""
        where = Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="checkpoint_"))
        shutil.copytree(self.path, where, dirs_exist_ok=True)
        return str(where)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The folder itself."""
        yield self.path

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path})"


class _Session:
    def __init__(self, place: Place) -> None:
        self.place = place
        self.name = ""
        self.folder = Path()
        self.datasets: Mapping[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        self.reported = 0
        self.checkpoint: Checkpoint | None = None


_session: _Session | None = None


def _here() -> _Session:
    if _session is None:
        raise RuntimeError("this is only there within a train_loop_per_worker")
    return _session


class TrainContext:
    """`get_context()`."""

    def get_world_size(self) -> int:
        """How many workers there are."""
        return _here().place.world_size

    def get_world_rank(self) -> int:
        """The number of this one."""
        return _here().place.rank

    def get_local_rank(self) -> int:
        """Its number in its pod."""
        return _here().place.local_rank

    def get_local_world_size(self) -> int:
        """How many there are in its pod."""
        return _here().place.local_world_size

    def get_node_rank(self) -> int:
        """The number of its pod."""
        return _here().place.node_rank

    def get_experiment_name(self) -> str:
        """The run's name."""
        return _here().name

    get_trial_name = get_trial_id = get_experiment_name

    def get_trial_dir(self) -> str:
        """The run's folder, which is the working directory."""
        return str(_here().folder)

    def get_metadata(self) -> dict[str, Any]:
        """What was given to the trainer as metadata."""
        return _here().metadata

    def get_trial_resources(self) -> None:
        """Ray's bundles are not seen from within a pod."""


def get_context() -> TrainContext:
    """The context of this worker."""
    _here()
    return TrainContext()


def report(
    metrics: Mapping[str, Any], checkpoint: Any = None, checkpoint_dir_name: str | None = None, **_: Any
) -> None:
    """Tell ``metrics`` (numbers, texts, lists and mappings of them), and keep the files of ``checkpoint``.

    The files are copied below the run's folder. Raises `TypeError` for a metric of another kind.
    """
    here = _here()
    kept = ""
    if checkpoint is not None:
        kept = checkpoint_dir_name or f"checkpoint_{here.reported:06d}"
        where = here.folder / kept
        with checkpoint.as_directory() as source:
            shutil.copytree(source, where, dirs_exist_ok=True)
        here.checkpoint = Checkpoint(where)
    print(line(Report(n=here.reported, metrics=dict(metrics), checkpoint=kept)), flush=True)
    here.reported += 1


def get_checkpoint() -> Checkpoint | None:
    """The last one that this worker reported; None at first. A worker that moorage brings back goes on in mid-loop."""
    return _here().checkpoint


def get_dataset_shard(dataset_name: str = "train") -> Any:
    """This worker's part of a data set. Raises `KeyError`."""
    here = _here()
    if dataset_name not in here.datasets:
        raise KeyError(f"no data set {dataset_name!r} was given to the trainer; there are {sorted(here.datasets)}")
    return shard.Shard(here.datasets[dataset_name], here.place.rank, here.place.world_size)


def get_preemption_info() -> None:
    """A rank is never told of a preemption: it is moved in time."""


# -- ray.train.torch


def get_device() -> Any:
    """The device of this worker."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", _here().place.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def get_devices() -> list[Any]:
    """The devices of this worker: one."""
    return [get_device()]


def prepare_model(model: Any, move_to_device: Any = True, parallel_strategy: str | None = "ddp", **more: Any) -> Any:
    """The model on its device, in DistributedDataParallel where there are several workers.

    Raises `ValueError` for another ``parallel_strategy`` than ddp, fsdp or None.
    """
    if move_to_device:
        model = model.to(get_device() if move_to_device is True else move_to_device)
    if _here().place.world_size == 1 or parallel_strategy is None:
        return model
    arguments = dict(more.get("parallel_strategy_kwargs") or {})
    if parallel_strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, **arguments)
    if parallel_strategy == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, **arguments)
    raise ValueError(f"parallel_strategy {parallel_strategy!r} is none of ddp, fsdp, None")


def prepare_data_loader(data_loader: Any, add_dist_sampler: bool = True, **_: Any) -> Any:
    """The loader with a `DistributedSampler`, where there are several workers and it has none yet."""
    from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

    place = _here().place
    sampled = isinstance(data_loader.sampler, DistributedSampler) or isinstance(data_loader.dataset, IterableDataset)
    if place.world_size == 1 or not add_dist_sampler or sampled:
        return data_loader
    sampler: Any = DistributedSampler(
        data_loader.dataset,
        num_replicas=place.world_size,
        rank=place.rank,
        shuffle=isinstance(data_loader.sampler, RandomSampler),
    )
    return DataLoader(
        data_loader.dataset,
        batch_size=data_loader.batch_size,
        sampler=sampler,
        num_workers=data_loader.num_workers,
        collate_fn=data_loader.collate_fn,
        pin_memory=data_loader.pin_memory,
        drop_last=data_loader.drop_last,
        timeout=data_loader.timeout,
        worker_init_fn=data_loader.worker_init_fn,
        multiprocessing_context=data_loader.multiprocessing_context,
        generator=data_loader.generator,
        persistent_workers=data_loader.persistent_workers,
    )


def enable_reproducibility(seed: int = 0) -> None:
    """Seeds, and deterministic algorithms."""
    import random

    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


@contextlib.contextmanager
def process_group(backend: str | None) -> Iterator[None]:
    """torch's process group around the loop, as Ray's TorchTrainer makes one; none without a ``backend``."""
    if backend is None:
        yield
        return
    import torch.distributed as dist

    dist.init_process_group(backend)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_TRAIN = {
    "report": report,
    "get_context": get_context,
    "get_checkpoint": get_checkpoint,
    "get_dataset_shard": get_dataset_shard,
    "get_preemption_info": get_preemption_info,
    "Checkpoint": Checkpoint,
    "TrainContext": TrainContext,
    "ScalingConfig": options.ScalingConfig,
    "RunConfig": options.RunConfig,
    "FailureConfig": options.FailureConfig,
    "CheckpointConfig": options.CheckpointConfig,
}
_TORCH = {
    "get_device": get_device,
    "get_devices": get_devices,
    "prepare_model": prepare_model,
    "prepare_data_loader": prepare_data_loader,
    "enable_reproducibility": enable_reproducibility,
}
_MODULES: dict[str, dict[str, Any]] = {"ray.train": _TRAIN, "ray.train.torch": _TORCH, "ray.train.context": _TRAIN}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the modules above for ``ray.train…``, and an empty ``ray`` where the real one is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in _MODULES or name == "ray":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name.startswith("ray.train."):
            raise ImportError(f"{name} cannot be had within a pod; docs/ray.md lists what can")
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != "ray":
            vars(module).update(_MODULES[module.__name__])
            return

        def absent(name: str) -> Any:
            raise AttributeError(f"ray.{name} cannot be used in a rank: it runs in a pod, beside Ray (docs/ray.md)")

        vars(module)["__getattr__"] = absent


def install(place: Place) -> None:
    """Let this process find the modules above. Call it before anything of Ray is imported."""
    global _session
    _session = _Session(place)
    sys.meta_path.insert(0, _Finder())


def begin(name: str, folder: Path, datasets: Mapping[str, Any], metadata: dict[str, Any]) -> None:
    """Tell the session what it is a part of; ``folder`` becomes the working directory."""
    here = _here()
    here.name, here.folder, here.datasets, here.metadata = name, folder, datasets, metadata
    os.chdir(folder)
