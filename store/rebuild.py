"""A new index for packs whose index objects are lost or damaged: packs say themselves what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moorage.errors import CorruptData, NotFound
from moorage.store import format as fmt
from moorage.store.backend import Entry
from moorage.store.index import PackRecord

if TYPE_CHECKING:
    from moorage.store.store import Store

#: Packs in one index object.
_TOGETHER = 64


class Rebuilt(NamedTuple):
    """Packs that are indexed again, chunks in them, damaged index objects that were removed, and what is wrong."""

    packs: int
    chunks: int
    removed: int
    problems: list[str]


def rebuild(store: Store) -> Rebuilt:
    """See `Store.rebuild_index`."""
    # As a writer: a prune that begins meanwhile deletes nothing that this one has looked at.
    lease = store.leases.acquire("write", "rebuild of the index")
    try:
        store = store.anew()
        store.index.refresh()
        damaged = store.index.damaged
        known = {pack for packs in store.index.objects.values() for pack in packs}
        # Packs of those who write now: they are indexed when they are whole.
        writers = {info.id for info in store.leases.active()}
        records: list[PackRecord] = []
        problems: list[str] = []
        for entry in list(store.backend.list("packs")):
            pack = entry.name.removeprefix("packs/")
            if pack in known or pack[:24] in writers:
                continue
            try:
                entries = _walk(store, entry, pack, problems)
            except NotFound:
                continue  # removed meanwhile
            except CorruptData as error:
                problems.append(error.message)
                continue
            if entries:
                records.append(PackRecord(pack, entry.size, fmt.encode_entries(entries)))
        for start in range(0, len(records), _TOGETHER):
            store.put_index(records[start : start + _TOGETHER])
        for name in damaged:
            store.backend.delete(name)
        chunks = sum(len(record.entries) // fmt.ENTRY for record in records)
        return Rebuilt(len(records), chunks, len(damaged), problems)
    finally:
        lease.close()


def _walk(store: Store, entry: Entry, pack: str, problems: list[str]) -> list[fmt.PackEntry]:
    """The chunks of a pack, from its headers alone. Ends at the first that makes no sense, and says so."""
    source = store.backend.open(entry.name)
    try:
        head = bytearray(fmt.PACK_HEADER)
        got = source.read_into(0, memoryview(head))
        fmt.check_pack_header(memoryview(head)[:got], bytes.fromhex(store.nonce), pack)
        found: list[fmt.PackEntry] = []
        at = fmt.PACK_HEADER
        buffer = bytearray(fmt.CHUNK_HEADER)
        while at < entry.size:
            got = source.read_into(at, memoryview(buffer))
            try:
                header = fmt.parse_chunk_header(memoryview(buffer)[:got], 0, f"pack {pack} at {at}")
                if at + fmt.CHUNK_HEADER + header.stored > entry.size:
                    raise CorruptData(f"pack {pack} is cut short")
            except CorruptData as error:
                problems.append(error.message)
                break
            found.append(fmt.PackEntry(header.name, at, header.stored, header.plain))
            at += fmt.CHUNK_HEADER + header.stored
        return found
    finally:
        source.close()
