"""What a checkpoint consists of: contents (runs of chunks), pod manifests, and the global manifest on top.

A manifest is named by the keyed digest of its bytes. Prune keeps exactly the chunks of those `Content` values that
stand in a kept pod manifest: a content that is mentioned only inside some other bytes is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from moorage.errors import CorruptData
from moorage.store.format import newer

MANIFEST_VERSION = 1

#: How the names of CRIU's files about sockets, connections and network devices begin.
_NETWORK_IMAGES = (
    "tcp-stream-", "inetsk", "unixsk", "netlinksk", "packetsk", "sk-queues", "netdev-", "netns-", "ifaddr-", "route-",
    "route6-", "rule-", "iptables-", "ip6tables-", "nftables-",
)  # fmt: skip


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``length`` bytes of a file: those of a chunk from ``offset`` on.

    ``name`` is the chunk's 32-byte name; empty: that many zero bytes, which are stored nowhere. ``size`` is the whole
    chunk's length where only a part of it is meant, else 0.
    """

    name: bytes
    length: int
    offset: int = 0
    size: int = 0

    @property
    def whole(self) -> int:
        """Length of the chunk that this is a part of."""
        return self.size or self.length


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of one file: ``size`` bytes, in the order of ``chunks``."""

    size: int
    chunks: list[Chunk]


def image_kind(name: str) -> str:
    """What one of CRIU's files holds, as `moorage inspect` calls it."""
    if name.startswith("pages-"):
        return "process memory"
    return "network" if name.startswith(_NETWORK_IMAGES) else "process state"


class PodManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a checkpoint."""

    version: int = MANIFEST_VERSION
    job: str
    owner: str
    pod: int
    incarnation: int
    attempt: int
    node: str
    created: float  # seconds since the epoch
    spec: bytes = b""  # the JobSpec message
    images: dict[str, Content] = {}  # CRIU's files, by file name
    layer: Content | None = None  # the upper layers' trees, as the layers' code serialises them
    layer_files: dict[str, Content] = {}  # the contents that the tree refers to, by the key that it uses
    journal: Content | None = None  # stdout and stderr so far
    memory: dict[str, Content] = {}  # bulk device memory, by block; ``extra["gpu"]`` says what they are
    network: dict[str, Any] = {}
    ranks: list[dict[str, Any]] = []
    fingerprint: dict[str, Any] = {}
    bytes_by_kind: dict[str, int] = {}
    extra: dict[str, Any] = {}

    def contents(self) -> Iterator[tuple[str, str, Content]]:
        """Everything that this manifest needs: ``(kind, name within the kind, content)``."""
        yield from (("images", name, content) for name, content in self.images.items())
        if self.layer is not None:
            yield "layer", "tree", self.layer
        yield from (("layer", name, content) for name, content in self.layer_files.items())
        if self.journal is not None:
            yield "journal", "journal", self.journal
        yield from (("memory", name, content) for name, content in self.memory.items())

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Name and whole length of every stored chunk that this manifest needs, some more than once."""
        for _, _, content in self.contents():
            yield from ((chunk.name, chunk.whole) for chunk in content.chunks if chunk.name)


class GlobalManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A whole checkpoint: ``pods`` are the names of the pod manifests, pod 0 first."""

    version: int = MANIFEST_VERSION
    job: str
    owner: str
    attempt: int
    incarnation: int
    created: float  # seconds since the epoch
    pods: list[str]
    spec: bytes = b""
    trace: str = ""
    extra: dict[str, Any] = {}


class _Versioned(msgspec.Struct):
    version: int


Manifest = TypeVar("Manifest", PodManifest, GlobalManifest)


def encode(manifest: PodManifest | GlobalManifest) -> bytes:
    """The bytes of a manifest; equal manifests give equal bytes."""
    return msgspec.msgpack.encode(manifest, order="deterministic")


def decode(data: bytes, kind: type[Manifest], where: str) -> Manifest:
    """The reverse of `encode`. Raises `NewerVersion`, and `CorruptData` naming ``where``."""
    try:
        version = msgspec.msgpack.decode(data, type=_Versioned).version
        if version > MANIFEST_VERSION:
            raise newer(f"{where} has version {version}")
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptData(f"{where}: {error}") from None
