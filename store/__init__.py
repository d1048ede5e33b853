"""Chunks, packs and manifests. `Store` is the way in."""

from __future__ import annotations

from moorage.store.check import CheckResult, Usage
from moorage.store.leases import Lease, LeaseInfo, LeaseKeeper
from moorage.store.manifests import Chunk, Content, GlobalManifest, PodManifest
from moorage.store.prune import PruneResult
from moorage.store.retention import forget
from moorage.store.store import Store
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
    "Store",
    "Usage",
    "WriteStats",
    "Writer",
    "forget",
]
