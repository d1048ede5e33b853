"""Moving live chunks out of packs that will be deleted: for prune, and for a checkpoint about to be committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moorage import failpoints
from moorage.errors import CorruptData, Fenced, NotFound
from moorage.store import format as fmt
from moorage.store.leases import Lease
from moorage.store.packs import PackSet, PackWriter

if TYPE_CHECKING:
    from moorage.store.store import Store

_BATCH = 64
_AGAIN = "it was pruned before the commit; take a new checkpoint"

failpoints.declare("store.prune.copy.before", "store.prune.copy.after")


def copy_chunks(store: Store, lease: Lease, wanted: dict[bytes, int]) -> int:
    """Copy chunks (name to length) as they are stored into new packs and index those. Returns their stored bytes."""
    places = sorted((p, name) for name in wanted if (p := store.index.locate(name)) is not None)
    if not places:
        return 0
    failpoints.hit_sync("store.prune.copy.before")
    packs = PackSet(store.backend, store.key, bytes.fromhex(store.nonce), lease.info.id, store.write_rate)
    copied = 0
    try:
        writer = PackWriter(packs)
        for start in range(0, len(places), _BATCH):
            batch = {name: wanted[name] for _, name in places[start : start + _BATCH]}
            for group in store.reader.groups(batch):
                for _, header, stored, _ in group:
                    writer.add(header, stored)
                    copied += len(stored) + fmt.CHUNK_HEADER
                writer.flush()
        writer.close()
        records = packs.finish()
        if not lease.valid():
            raise Fenced("the store lease could not be renewed in time", "try again")
    except BaseException:
        packs.abort()
        raise
    store.put_index(records)
    failpoints.hit_sync("store.prune.copy.after")
    return copied


def confirm(store: Store, global_manifest: str) -> None:
    """See `Store.confirm`."""
    lease = store.leases.acquire("write", f"confirm {global_manifest[:12]}", [global_manifest])
    try:
        store.index.refresh()
        condemned = store.index.condemned
        chunks: dict[bytes, int] = {}
        try:
            pods = store.read_global_manifest(global_manifest).pods
            for path in (f"checkpoints/{global_manifest}", *(f"pods/{pod}" for pod in pods)):
                if path in condemned:
                    raise CorruptData(f"manifest {path} is about to be deleted", _AGAIN)
            for pod in pods:
                chunks.update(store.read_pod_manifest(pod).chunks())
        except NotFound as error:
            raise CorruptData(error.message, _AGAIN) from None
        packs = set()
        for name in chunks:
            place = store.index.locate(name)
            if place is None:
                raise CorruptData(f"chunk {name.hex()} is gone", _AGAIN)
            packs.add(place.pack)
        for pack in packs:
            if store.backend.stat(f"packs/{pack}") is None:
                raise CorruptData(f"pack {pack} is gone", _AGAIN)
        copy_chunks(store, lease, {name: size for name, size in chunks.items() if not store.index.reusable(name)})
    finally:
        lease.close()
