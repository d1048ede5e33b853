"""moorage: consistent checkpoint and restore of running jobs that span processes, GPUs and nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

if TYPE_CHECKING:
    from moorage.coordinator.client import AsyncClient, Client


def __getattr__(name: str) -> Any:
    # The client pulls in gRPC; `moorage --help` and the pod's own tools must not pay for it.
    if name in {"Client", "AsyncClient"}:
        from moorage.coordinator import client

        return getattr(client, name)
    raise AttributeError(f"module 'moorage' has no attribute {name!r}")
