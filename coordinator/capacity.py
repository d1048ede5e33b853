"""What a pod needs of a node, and what a node has to give. Pure.

A pod takes one slot, its GPUs, and what its job asked for with ``--cpus`` and ``--memory``. A job that asks for no
cores and no memory reserves none: it shares what is there.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moorage.v1.types_pb2 import JobSpec

UNBOUNDED: Final = 1 << 62


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What some pods take together: their number, GPUs, cores, bytes of memory."""

    pods: int = 1
    gpus: int = 0
    cpus: float = 0.0
    memory: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(
            pods=self.pods + other.pods,
            gpus=self.gpus + other.gpus,
            cpus=self.cpus + other.cpus,
            memory=self.memory + other.memory,
        )

    def __sub__(self, other: Need) -> Need:
        return Need(
            pods=self.pods - other.pods,
            gpus=self.gpus - other.gpus,
            cpus=self.cpus - other.cpus,
            memory=self.memory - other.memory,
        )

    def fits(self, room: Need) -> bool:
        """Whether ``room`` has this much."""
        return (
            self.pods <= room.pods
            and self.gpus <= room.gpus
            and self.cpus <= room.cpus + 1e-9
            and self.memory <= room.memory
        )

    def short(self, room: Need) -> str:
        """What ``room`` lacks, as a clause; empty if nothing."""
        if self.pods > room.pods:
            return "every slot is taken"
        if self.gpus > room.gpus:
            return f"{_count(max(0, room.gpus), 'GPU')} free, {self.gpus} needed"
        if self.cpus > room.cpus + 1e-9:
            return f"{max(0.0, room.cpus):g} cores free, {self.cpus:g} needed"
        if self.memory > room.memory:
            return f"{max(0, room.memory) >> 20} MiB of memory free, {self.memory >> 20} needed"
        return ""


NOTHING: Final = Need(pods=0)


def has(*, slots: int, gpus: int, cpus: float, memory: int) -> Need:
    """What a node has. ``slots`` 0: any number of pods."""
    return Need(pods=slots or UNBOUNDED, gpus=gpus, cpus=cpus, memory=memory)


def need_of(spec: JobSpec) -> Need:
    """What one pod of a job takes."""
    return Need(gpus=spec.gpus_per_pod, cpus=spec.cpus, memory=spec.memory_bytes)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
