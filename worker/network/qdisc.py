"""The seal's second choice: a queue that has room for nothing, for kernels without nftables' egress hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError

from moorage.worker.network.links import index

_ROOT = 0xFFFFFFFF


def block(route: Any, devices: Sequence[str]) -> None:
    """Put a queue of length 0 at the root of each device: every packet is refused, which TCP takes as congestion."""
    for device in devices:
        route.tc("replace", "pfifo", index(route, device), root=True, limit=0)


def unblock(route: Any, devices: Sequence[str]) -> None:
    """Take the queues away; devices without one are left alone."""
    for device in devices:
        number = index(route, device)
        if number is not None and any(
            entry.get_attr("TCA_KIND") == "pfifo" and entry["parent"] == _ROOT for entry in route.get_qdiscs(number)
        ):
            try:
                route.tc("del", index=number, root=True)
            except NetlinkError:
                if any(entry.get_attr("TCA_KIND") == "pfifo" for entry in route.get_qdiscs(number)):
                    raise
