"""Where a store's bytes live: the interface that a kind of storage has to offer: `posix` a folder, `s3` a bucket.

The interface is what an object store can do as well: whole objects put if absent, packs streamed by one writer under
their final name, ranged reads, listings. No rename, no append, no partial overwrite.

Names are relative paths with ``/`` (``packs/0a1b…``). All methods are safe to call from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

Data = bytes | bytearray | memoryview


class Entry(NamedTuple):
    """One object: its name, size in bytes and the store's own time of its last change, seconds since the epoch."""

    name: str
    size: int
    modified: float


class Sink(Protocol):
    """A pack that is being written, by one thread at a time. Nobody refers to it before `finish` has returned."""

    def write(self, buffers: Sequence[Data]) -> None:
        """Append all of ``buffers``. Raises `NoCapacity` when the store is full, `Unavailable`."""

    def finish(self) -> None:
        """Make the pack durable and close it."""

    def abort(self) -> None:
        """Close and remove it. Raises nothing: what cannot be removed is left for prune."""


class Source(Protocol):
    """An object opened for ranged reads."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the bytes read, fewer only at the object's end."""

    def close(self) -> None: ...


class Backend(Protocol):
    """A place for objects. Errors: `NotFound`, `NoCapacity`, `Unavailable`, `EnvironmentLacking`."""

    @property
    def location(self) -> str:
        """What the user calls this place."""

    @property
    def settle_seconds(self) -> float:
        """For how long another host's listing may be stale (0 for a local file system)."""

    @property
    def pack_size(self) -> int:
        """How large a pack should become, in bytes."""

    def make_folders(self, folders: Sequence[str]) -> None:
        """Make ready for a new store. Raises `UsageError` when something else is there already."""

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        """Create ``name`` with ``data``, whole or not at all. False: the name exists already.

        ``durable``: it survives a loss of power once this has returned.
        """

    def create(self, name: str) -> Sink:
        """Start a pack at its final name. Raises `Conflict` if the name exists."""

    def open(self, name: str) -> Source: ...

    def get(self, name: str) -> bytes:
        """The whole object."""

    def stat(self, name: str) -> Entry | None: ...

    def list(self, folder: str) -> Iterator[Entry]:
        """All objects below ``folder``, in any order; those that come or go meanwhile may or may not be there."""

    def delete(self, name: str) -> bool:
        """False: there was no such object."""

    def touch(self, name: str) -> bool:
        """Set the object's time to now. False: there is no such object."""

    def now(self) -> float:
        """The store's own clock, the one that `Entry.modified` is read from."""

    def free_bytes(self) -> int: ...
