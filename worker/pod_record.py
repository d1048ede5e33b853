"""What the worker keeps about a pod on disk, so that its successor can go on: ``pod.json`` in the pod's folder.

It is written (0600) after each step and replaced as a whole. It is not flushed to the disk: when the machine itself
goes down no process of the pod is left either, and a record of an earlier boot only says that the pod was lost.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moorage.errors import CorruptData
from moorage.v1.types_pb2 import JobSpec
from moorage.v1.worker_pb2 import Membership
from moorage.worker.gpu.blocks import KnownProcess
from moorage.worker.guard.messages import RankState
from moorage.worker.pod_phase import Phase

RECORD_FILE = "pod.json"
VERSION = 1


class StagedCapture(msgspec.Struct, frozen=True, kw_only=True):
    """A capture that stands in the staging folder: all that is needed to bring it into the store."""

    attempt: int
    incarnation: int
    staging: str
    generation: int  # the store's generation that the attempt began with
    finished: bool = False  # all ranks had exited with 0: no images
    ranks: list[RankState] = []


class SavedNccl(msgspec.Struct, frozen=True):
    """What a manifest says of a pod's NCCL: processes (number, pid in the pod); creations that they took back, and
    communicators that are not made anew; the libraries that the proxy stands over; the fresh ids of creations that were
    taken back. And for the worker's successor the newest cut that was accepted."""

    processes: list[tuple[int, int]] = []
    let_go: list[tuple[int, list[str], list[str]]] = []
    files: list[str] = []
    kept: int = 0
    renewed: list[tuple[str, bytes]] = []


class PodRecord(msgspec.Struct, kw_only=True):
    """The whole of what is written down. ``spec`` and ``membership`` are serialized messages.

    ``deadline`` is that of the attempt under way and ``frozen_since`` when it froze the pod (CLOCK_BOOTTIME seconds,
    valid within ``boot`` only; 0: none).
    """

    version: int = VERSION
    boot: str
    job: str
    pod: int
    incarnation: int
    spec: bytes
    membership: bytes
    manifest: str = ""  # restored from this pod manifest; empty: started afresh
    checkpoint: str = ""  # and from this checkpoint
    phase: Phase = "starting"
    reason: str = ""
    exit_code: int = 0
    attempt: int = 0
    last_attempt: int = 0
    kind: str = ""
    keep: str = ""  # of a stop: where the device memory stays; empty: nowhere
    deadline: float = 0.0
    frozen_since: float = 0.0
    pause_seconds: float = 0.0
    generation: int = 0
    captured: int = 0  # the newest attempt that the pod was captured in
    image_bytes: int = 0  # of its images
    staged: StagedCapture | None = None
    index_generation: int = -1  # of the store, when the layer index in the pod's folder was made; -1: there is none
    ranks: list[RankState] = []
    gpus: list[str] = []  # UUIDs of the GPUs that the pod has on this node, in its own order
    nccl: SavedNccl = SavedNccl()  # its processes are those of the last capture
    gpu_processes: list[KnownProcess] = []  # that have to get their device memory back; empty: all have it
    gpu_mapping: dict[str, str] = {}  # which GPU took the place of which at the restore; empty: none moved

    def job_spec(self) -> JobSpec:
        """What the user asked for."""
        return JobSpec.FromString(self.spec)

    def members(self) -> Membership:
        """Where the pods of this incarnation run."""
        return Membership.FromString(self.membership)


def boot_id() -> str:
    """The kernel's random name for this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pod_folder(state: Path, job: str, incarnation: int, pod: int) -> Path:
    """Where everything of one pod lies on this node."""
    return state / "pods" / job / str(incarnation) / str(pod)


def save(folder: Path, record: PodRecord) -> None:
    """Replace the record in ``folder`` (made, 0700, if absent)."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / (RECORD_FILE + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(record))
    temporary.replace(folder / RECORD_FILE)


def load(folder: Path) -> PodRecord | None:
    """The record in ``folder``; None if there is none. Raises `CorruptData` if it cannot be read."""
    try:
        return msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=PodRecord)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise CorruptData(
            f"{folder / RECORD_FILE}: {error}", "end the pod's processes and remove the folder"
        ) from error


def folders(state: Path) -> Iterator[Path]:
    """The folders of all pods on this node, in no order."""
    for path in (state / "pods").glob("*/*/*"):
        if path.is_dir() and path.name.isdigit() and path.parent.name.isdigit():
            yield path


def remove_folder(folder: Path) -> None:
    """Delete the pod's folder, and those of its incarnation and job if they are empty then. Idempotent."""
    shutil.rmtree(folder, ignore_errors=True)
    for parent in (folder.parent, folder.parent.parent):
        try:
            parent.rmdir()
        except OSError:
            return
