"""What the coordinator asks of the processes of a pod beside the rounds of the cut, and what they say. Plain data.

It travels as msgpack inside of the worker's RPC `QuiescePod`; towards the process the worker speaks `wire`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from moorage.errors import CorruptData
from moorage.nccl_quiesce.model import Snapshot

T = TypeVar("T")

#: Says in a job's environment whether it has communicators: "1" or "0". Where it does not say, see `has_communicators`.
VARIABLE = "MOORAGE_NCCL"


class Process(msgspec.Struct, frozen=True):
    """One process of a pod that has loaded NCCL.

    ``number``: its own for its life, over checkpoints and restores. ``pid``: in the pod. ``rank``: the world rank of
    its environment, -1 if it has none. ``closed``: its gate is. ``torn``: it has no communicator any more, and waits
    for new ones. ``again`` and ``widowed``: creations that it took back, and communicators that are not made anew, as
    it was told when it let go of all. ``report``: as of now, with the cut and round that it has heard of last.
    """

    number: int
    pid: int
    name: str
    rank: int
    closed: bool
    torn: bool
    report: Snapshot
    again: tuple[str, ...] = ()
    widowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


class Keep(msgspec.Struct, frozen=True):
    """Cut ``attempt`` is accepted: the gate stays closed until it is told to open, whoever dies."""

    attempt: int


class Destroy(msgspec.Struct, frozen=True):
    """After cut ``attempt``: let go of all communicators, undo the creations ``again``. ``own``: those of ``again``
    that this process had begun. ``widowed``: communicators that are not made anew. ``abort``: wait for no partner."""

    attempt: int
    again: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    widowed: tuple[str, ...] = ()
    abort: bool = False


class Names(msgspec.Struct, frozen=True):
    """Communicators for which this process makes fresh ids; the answer is `Ids`."""

    names: tuple[str, ...]


class Ids(msgspec.Struct, frozen=True):
    """Unique ids by the name of the communicator."""

    ids: tuple[tuple[str, bytes], ...] = ()


class Make(msgspec.Struct, frozen=True):
    """Make these communicators, in this order; of others it has no member. ``again``: fresh ids for creations."""

    attempt: int
    communicators: tuple[tuple[str, bytes], ...] = ()
    again: tuple[tuple[str, bytes], ...] = ()


class Renewed(msgspec.Struct, frozen=True):
    """Fresh ids for creations that were taken back, by name; for processes too that come to NCCL only later."""

    ids: tuple[tuple[str, bytes], ...] = ()


class Done(msgspec.Struct, frozen=True):
    """It was done."""


def encode(value: Any) -> bytes:
    """As it travels."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[T]) -> T:
    """The reverse. Raises `CorruptData`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"this is no {kind.__name__} of the consistent cut: {error}") from None


def has_communicators(env: Mapping[str, str], *, gpus: int, pods: int, ranks_per_pod: int) -> bool:
    """Whether a job can have NCCL communicators that a checkpoint must look after.

    ``env``: what the job's owner gave; ``gpus``: of each pod; of pods and ranks 0 stands for one. A job that does not
    say can have some if it has several ranks with GPUs, or several GPUs in a pod.
    """
    said, ranks = env.get(VARIABLE, ""), max(1, pods) * max(1, ranks_per_pod)
    return said != "0" if said else gpus > 0 and (ranks > 1 or gpus > 1)
