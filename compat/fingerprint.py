"""The fingerprint of a node and of a pod of a job, as plain data. Sizes are bytes, digests BLAKE3 in hexadecimal.

A node's is in its record in etcd, a pod's in its manifest in the store, both as JSON. A field that is empty is not
known; what is not known is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node."""

    model: str
    memory_bytes: int = 0
    uuid: str = ""


class NodeFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """A node: machine, kernel and the programs that make and restore checkpoints there."""

    architecture: str = ""
    kernel: str = ""  # as `uname -r` says
    cpu: str = ""
    cpu_features: tuple[str, ...] = ()  # those that a program can see, sorted
    libc: str = ""
    criu: str = ""
    runc: str = ""
    driver: str = ""  # of the GPUs; empty without one
    cuda: str = ""  # the newest CUDA that the driver serves
    gpus: tuple[Gpu, ...] = ()
    moorage: str = ""


class FileMark(msgspec.Struct, frozen=True, kw_only=True):
    """A file that a process had mapped or open, and that is not part of the checkpoint. ``path`` is the pod's.

    ``live``: it lies on a mount named by ``--mount``. ``digest`` begins with ``sampled:`` for a very large live file.
    """

    path: str
    size: int
    digest: str
    live: bool = False


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of software that the job has loaded. ``folder`` is where its metadata lies, as the pod sees it.

    ``carried``: it lies in the pod's own files, so it is part of the checkpoint.
    """

    name: str
    version: str = ""
    folder: str = ""
    carried: bool = False


class ModelMark(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a job serves or trains: its id or path, its revision, and the files that say what is in it."""

    name: str
    revision: str = ""
    index: tuple[FileMark, ...] = ()


class MountMark(msgspec.Struct, frozen=True, kw_only=True):
    """A live mount: a folder of the node, seen at ``destination`` in the pod."""

    source: str
    destination: str
    read_only: bool = False


class JobFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a job at the instant of a checkpoint, and the node that it ran on."""

    node: NodeFingerprint = NodeFingerprint()
    gpus: tuple[Gpu, ...] = ()  # those that it used
    engine: Package | None = None
    torch: Package | None = None
    cuda: Package | None = None
    nccl: Package | None = None
    model: ModelMark | None = None
    image: str = ""
    layers: tuple[str, ...] = ("/",)  # mount points of which the pod has a layer of its own
    mounts: tuple[MountMark, ...] = ()
    files: tuple[FileMark, ...] = ()

    @property
    def packages(self) -> dict[str, Package]:
        """Rule to package, those that the job has loaded."""
        all_of_them = {"engine": self.engine, "torch": self.torch, "cuda": self.cuda, "nccl": self.nccl}
        return {rule: package for rule, package in all_of_them.items() if package is not None}


class SeenFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has under a path. ``digest`` is empty when the size alone tells the difference."""

    size: int
    digest: str = ""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has of all that a job needs. A path, package or source that is not there has no entry."""

    files: dict[str, SeenFile] = {}
    packages: dict[str, str] = {}  # rule: version
    sources: tuple[str, ...] = ()  # of live mounts
    image: bool = True


def node_from(data: Mapping[str, Any]) -> NodeFingerprint:
    """Read a node's fingerprint; fields that this version does not know are left out, wrong ones count as unknown."""
    return _lenient(data, NodeFingerprint, NodeFingerprint())


def job_from(data: Mapping[str, Any]) -> JobFingerprint:
    """Read a pod's fingerprint, as `node_from` does. One that an earlier version wrote has little in it."""
    return _lenient(data, JobFingerprint, JobFingerprint())


_Kind = TypeVar("_Kind", NodeFingerprint, JobFingerprint)


def _lenient(data: Mapping[str, Any], kind: type[_Kind], fallback: _Kind) -> _Kind:
    try:
        return msgspec.convert(dict(data), kind)
    except msgspec.ValidationError:
        return fallback
