"""Chunks, packs and manifests: where checkpoints lie. `Store` is the way in; ``docs/store.md`` has the format.

Invariants, and who keeps them:

1. *What is visible is whole.* Writing goes packs, index object, pod manifest, global manifest, each durable before the
   next; deleting goes the other way round. So whatever a manifest names is there. Small objects appear at once or not
   at all. Half a pack may exist, but nothing names it.
2. *Nothing is overwritten*, renamed or appended to. Packs have one writer each.
3. *Every read is verified*: chunks, manifests, index objects and blobs against keyed digests, packs against their head.
4. *Condemned is condemned.* Prune first records what it is going to delete. From then on no writer reuses it, not even
   if it turns out to be needed: what is live in it is copied to a new pack.
5. *Prune deletes only* what had been condemned before its generation was raised, what no kept, rooted or recent
   manifest needs, and only when every lease that was alive after the condemning is gone.
6. *A lease comes first.* Writers and readers take a lease, and only then look at the store; prune records, and only
   then looks at the leases. A writer gives its lease back after its pod manifest is written.
7. *The coordinator's part.* It reads what is condemned, raises the generation in etcd, reads which checkpoints exist,
   and prunes with all three. A commit compares the generation with the one read before the attempt began; if that has
   risen, it reads the generation, calls `Store.confirm`, and compares with that.

From 1, 4, 5 and 7 alone follows that no committed checkpoint ever loses a byte, however long anybody was stopped and
whichever leases have expired. Leases and ages only see to it that a running attempt or restore is not in vain.
"""

from __future__ import annotations

from moorage.store.check import CheckResult, Usage
from moorage.store.damage import missing_is_damage
from moorage.store.leases import Lease, LeaseInfo, LeaseKeeper
from moorage.store.manifests import Chunk, Content, GlobalManifest, PodManifest
from moorage.store.prune import PruneResult
from moorage.store.rebuild import Rebuilt
from moorage.store.retention import forget
from moorage.store.store import Store
from moorage.store.tiers import TieredStore, open_for_node
from moorage.store.writer import Writer, WriteStats

__all__ = [
    "CheckResult",
    "Chunk",
    "Content",
    "GlobalManifest",
    "Lease",
    "LeaseInfo",
    "LeaseKeeper",
    "PodManifest",
    "PruneResult",
    "Rebuilt",
    "Store",
    "TieredStore",
    "Usage",
    "WriteStats",
    "Writer",
    "forget",
    "missing_is_damage",
    "open_for_node",
]
