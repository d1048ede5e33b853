"""Where each chunk lies: the index objects of a store, loaded into memory and kept fresh.

An index object lists packs and their chunks; it is written after its packs are durable. `ChunkIndex` answers two
different questions, and the difference is what makes prune safe:

* `reusable`: may a new checkpoint refer to this chunk? Only in a pack that exists and is not condemned.
* `locate`: where can it be read? In a condemned pack as well, if need be, until prune has deleted that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from moorage.errors import CorruptData, NotFound, Unavailable
from moorage.store import format as fmt
from moorage.store.backend import Backend

INDEX_VERSION = 1


class PackRecord(msgspec.Struct, frozen=True, array_like=True):
    """A pack in an index object: its name, size in bytes, and entries as `format.encode_entries` makes them."""

    pack: str
    size: int
    entries: bytes


class IndexObject(msgspec.Struct, frozen=True, kw_only=True):
    """One index object, written once."""

    version: int = INDEX_VERSION
    packs: list[PackRecord]


class Condemned(msgspec.Struct, frozen=True, kw_only=True):
    """What prune will delete: paths of packs, or of manifests. What is named here once is never used again.

    That this is final is what makes deleting safe: a prune that was stopped may delete it at any later time.
    """

    version: int = 1
    generation: int
    objects: list[str]


class Location(NamedTuple):
    """A chunk's place: pack, offset of its header, length of what is stored behind the header."""

    pack: str
    offset: int
    stored: int


class ChunkIndex:
    """The index of one store in memory. Thread-safe; lookups take no lock.

    ``read`` decodes a named object of a kind: ``read(name, kind)``.
    """

    def __init__(self, backend: Backend, read: Callable[[str, int], bytes]) -> None:
        self._backend = backend
        self._read = read
        self._lock = threading.Lock()
        self._loaded: dict[str, list[str]] = {}  # index object -> its packs
        self._condemned: dict[str, frozenset[str]] = {}  # record -> paths
        self._packs: list[str] = []  # number -> name
        self._numbers: dict[str, int] = {}
        self._live: dict[bytes, int] = {}
        self._dying: dict[bytes, int] = {}  # only in condemned packs
        self._missing: set[str] = set()
        self._damaged: dict[str, str] = {}
        self._fresh = False

    def reusable(self, name: bytes) -> bool:
        return name in self._live

    def locate(self, name: bytes) -> Location | None:
        self.ensure()
        found = self._live.get(name)
        if found is None:
            found = self._dying.get(name)
        if found is None:
            return None
        return Location(self._packs[found >> 64], found >> 32 & 0xFFFFFFFF, found & 0xFFFFFFFF)

    def ensure(self) -> None:
        """Load the index if nobody has yet."""
        if not self._fresh:
            self.refresh()

    @property
    def objects(self) -> dict[str, list[str]]:
        """Loaded index objects and the packs that each one names."""
        return dict(self._loaded)

    @property
    def missing(self) -> frozenset[str]:
        """Packs that an index object names and that did not exist when it was loaded."""
        return frozenset(self._missing)

    @property
    def damaged(self) -> dict[str, str]:
        """Index objects that cannot be read, and what is wrong. Their packs count as unknown."""
        return dict(self._damaged)

    @property
    def condemned(self) -> frozenset[str]:
        """Paths of all packs and manifests that are condemned and not yet deleted."""
        return _paths(self._condemned)

    def __len__(self) -> int:
        return len(self._live)

    def refresh(self) -> None:
        """See what other writers and prune did.

        An index object that is damaged is left out and told in `damaged`: what it named is stored anew by writers, and
        missed by readers. Raises `CorruptData` for a damaged record of condemned packs: without it nothing can be
        reused safely.

        The order matters: index objects first, then condemned packs, then whether packs exist. Prune deletes packs
        before the record that condemns them, so a pack that an index names is either seen as condemned or as missing.
        """
        with self._lock:
            for _ in range(5):
                if self._try_refresh():
                    self._fresh = True
                    return
        raise Unavailable(f"{self._backend.location}: the index changes faster than it can be read", "try again")

    def verify(self) -> None:
        """`refresh`, and see which packs are gone although nobody condemned them: what they held is unknown from here
        on, so that it is stored anew instead of being referred to. Raises as `refresh`."""
        self.refresh()
        with self._lock:
            named = {pack for packs in self._loaded.values() for pack in packs} - self._missing
            there = {entry.name.removeprefix("packs/") for entry in self._backend.list("packs")}
            # A listing may be older than the index.
            lost = {pack for pack in named - there if self._backend.stat(f"packs/{pack}") is None}
            if lost:
                self._drop(lost, frozenset())
                self._missing |= lost

    def _try_refresh(self) -> bool:
        names = {entry.name for entry in self._backend.list("index")}
        back = {pack for pack in self._missing if self._backend.stat(f"packs/{pack}") is not None}
        for name in [name for name, packs in self._loaded.items() if not back.isdisjoint(packs)]:
            del self._loaded[name]
        self._missing -= back
        gone = self._loaded.keys() - names
        added = names - self._loaded.keys()
        found: dict[str, IndexObject] = {}
        records: dict[str, frozenset[str]] = {}
        try:
            damaged: dict[str, str] = {}
            for name in sorted(added):
                try:
                    found[name] = self._decode_index(name)
                except CorruptData as error:
                    damaged[name] = error.message
            for name in [entry.name for entry in self._backend.list("condemned")]:
                records[name] = self._condemned.get(name) or self._decode_condemned(name)
        except NotFound:
            return False  # prune replaced it since the listing
        condemned = frozenset(path.removeprefix("packs/") for path in _paths(records))
        doubtful = {pack for name in gone for pack in self._loaded[name]}
        doubtful |= {record.pack for object_ in found.values() for record in object_.packs}
        missing = {pack for pack in doubtful if self._backend.stat(f"packs/{pack}") is None}
        known = frozenset(path.removeprefix("packs/") for path in self.condemned)
        if any(pack in self._numbers for pack in missing | (condemned - known)):
            self._drop(missing, condemned)
        for name in gone:
            del self._loaded[name]
        self._condemned, self._damaged = records, damaged
        self._missing = (self._missing & {pack for packs in self._loaded.values() for pack in packs}) | missing
        for name, object_ in found.items():
            for record in object_.packs:
                if record.pack not in missing:
                    self._add(record.pack, fmt.decode_entries(record.entries, name), dying=record.pack in condemned)
            self._loaded[name] = [record.pack for record in object_.packs]
        return True

    def _decode_index(self, name: str) -> IndexObject:
        try:
            found = msgspec.msgpack.decode(self._read(name, fmt.KIND_INDEX), type=IndexObject)
        except msgspec.MsgspecError as error:
            raise CorruptData(f"{name}: {error}") from None
        if found.version > INDEX_VERSION:
            raise fmt.newer(f"{name} has version {found.version}")
        return found

    def _decode_condemned(self, name: str) -> frozenset[str]:
        try:
            return frozenset(msgspec.msgpack.decode(self._read(name, fmt.KIND_CONDEMNED), type=Condemned).objects)
        except (CorruptData, msgspec.MsgspecError) as error:
            raise CorruptData(
                f"{name} in {self._backend.location} is damaged: {error}",
                "while no prune is running, delete that file; the next prune condemns its packs again",
            ) from None

    def _add(self, pack: str, entries: Iterable[fmt.PackEntry], *, dying: bool) -> None:
        number = self._numbers.get(pack)
        if number is None:
            number = self._numbers[pack] = len(self._packs)
            self._packs.append(pack)
        table = self._dying if dying else self._live
        for name, offset, stored, _ in entries:
            table[name] = number << 64 | offset << 32 | stored

    def _drop(self, missing: set[str], condemned: frozenset[str]) -> None:
        dead = {self._numbers[pack] for pack in missing if pack in self._numbers}
        dying = {self._numbers[pack] for pack in condemned if pack in self._numbers} - dead
        moved = {name: place for name, place in self._live.items() if place >> 64 in dying}
        self._dying = {n: p for n, p in (self._dying | moved).items() if p >> 64 not in dead}
        self._live = {n: p for n, p in self._live.items() if p >> 64 not in dead and p >> 64 not in dying}

    def added(self, name: str, packs: Sequence[PackRecord]) -> None:
        """Take in an index object that this process has just written."""
        with self._lock:
            for record in packs:
                self._add(record.pack, fmt.decode_entries(record.entries, name), dying=False)
            self._loaded[name] = [record.pack for record in packs]


def _paths(records: dict[str, frozenset[str]]) -> frozenset[str]:
    return frozenset(path for paths in records.values() for path in paths)
