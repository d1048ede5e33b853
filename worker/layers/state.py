"""What one process plans for a pod's layers and another may have to take over: ``layers.json`` in the pod's folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from moorage.errors import CorruptData, NewerVersion, NotFound
from moorage.worker.layers.layer import ROOT, Layer

STATE_VERSION = 1
_NAME = "layers.json"


class Planned(msgspec.Struct, frozen=True):
    """One layer as it is noted. ``lower`` is a folder of this host."""

    name: str
    mountpoint: str
    lower: str
    hidden: tuple[str, ...] = ()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that `PodLayers` needs to know. ``boot``: the kernel's boot id when the layers were planned."""

    version: int = STATE_VERSION
    working_directory: str
    live: tuple[str, ...]  # destinations of --mount
    started_ns: int
    boot: str
    layers: tuple[Planned, ...]
    placed: tuple[str, ...] = ()  # files that moorage itself put there: no results of the job

    def save(self, folder: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self))
        temporary = folder / f"{_NAME}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        temporary.replace(folder / _NAME)

    @classmethod
    def read(cls, folder: Path) -> State:
        """Raises `NotFound`, `CorruptData`, `NewerVersion`."""
        path = folder / _NAME
        try:
            state = msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise NotFound(f"there is no {path}") from None
        except msgspec.MsgspecError as error:
            raise CorruptData(f"{path}: {error}") from None
        if state.version > STATE_VERSION:
            raise NewerVersion(f"{path} has version {state.version}", "upgrade moorage on this node")
        return state

    def layer(self, planned: Planned, folder: Path) -> Layer:
        """The layer in the pod's ``folder``."""
        own = folder if planned.name == ROOT else folder / "mounts" / planned.name
        return Layer(planned.name, planned.mountpoint, Path(planned.lower), own, planned.hidden)


def boot_id() -> str:
    """Another one after each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
