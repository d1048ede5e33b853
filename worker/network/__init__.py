"""The network of a pod: ``job0`` between the pods of a job, ``ext0`` to the world, the seal and the fence.

Everything is synchronous netlink and nftables and takes milliseconds; callers with an event loop use a thread. "Host"
means the network namespace that the calling process is in. docs/network.md describes the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["MemberAddress", "PodNetwork", "PublishedPort", "leftovers", "remove_all"]

if TYPE_CHECKING:
    from moorage.worker.network.cleanup import leftovers, remove_all
    from moorage.worker.network.names import MemberAddress, PublishedPort
    from moorage.worker.network.pod import PodNetwork

_HOME = {
    "MemberAddress": "names",
    "PublishedPort": "names",
    "PodNetwork": "pod",
    "leftovers": "cleanup",
    "remove_all": "cleanup",
}


def __getattr__(name: str) -> Any:
    # The guard imports only `cut` from here and must stay small: pyroute2 costs 20 MiB.
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"moorage.worker.network.{_HOME[name]}"), name)
    raise AttributeError(f"module 'moorage.worker.network' has no attribute {name!r}")
