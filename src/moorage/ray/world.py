"""What Ray says: its nodes, which of them go away, and placement groups. Blocking calls, each of some milliseconds
unless said otherwise; the controller makes them in threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from moorage.errors import EnvironmentLacking

#: The label of a Ray node that says what moorage calls its machine: ``ray start --labels moorage-node=node-1``.
LABEL = "moorage-node"
_NODE_ID = "ray.io/node-id"
# NodeDeathInfo.Reason of Ray: AUTOSCALER_DRAIN_PREEMPTED.
_PREEMPTED = 4


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node as Ray's control plane has it. ``deadline``: when it goes away, seconds since the epoch, 0 if unsaid."""

    id: str
    address: str
    alive: bool
    draining: bool = False
    preempted: bool = False
    deadline: float = 0.0
    labels: dict[str, str] = {}


def require() -> Any:
    """The module `ray`, connected. Raises `EnvironmentLacking`."""
    if not ray.is_initialized():
        ray.init(logging_level="warning")  # RAY_ADDRESS, as for any driver
    return ray


def nodes() -> dict[str, RayNode]:
    """All nodes that Ray knows, by id; those that died too."""
    leaving: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
    found = {}
    for entry in ray.nodes():
        name = entry["NodeID"]
        found[name] = RayNode(
            id=name,
            address=entry.get("NodeManagerAddress", ""),
            alive=entry["Alive"],
            draining=name in leaving,
            preempted=entry.get("DeathReason") == _PREEMPTED,
            deadline=leaving.get(name, 0) / 1000,
            labels=dict(entry.get("Labels") or {}),
        )
    return found


def reserve(
    bundle: Mapping[str, float],
    count: int,
    *,
    strategy: str,
    selector: Mapping[str, str],
    without: Iterable[str] = (),
) -> PlacementGroup:
    """Ask for a placement group of ``count`` bundles, on none of the nodes ``without``. Does not wait for it."""
    wanted = dict(selector)
    if excluded := sorted(set(without)):
        wanted[_NODE_ID] = f"!in({','.join(excluded)})"
    more = {"bundle_label_selector": [wanted] * count} if wanted else {}
    return placement_group([dict(bundle)] * count, strategy=strategy, **more)


def ready(group: PlacementGroup, seconds: float) -> bool:
    """Wait until the group has its bundles, at most so long."""
    return bool(group.wait(seconds))


def seats(group: PlacementGroup) -> list[str]:
    """The Ray node of each bundle of a group that is ready."""
    table = placement_group_table(group)["bundles_to_node_id"]
    return [table[index] for index in sorted(table)]


def release(group: PlacementGroup) -> None:
    """Give the bundles back. What Ray runs in them ends; the pods are not Ray's and run on."""
    remove_placement_group(group)


def impossible(bundle: Mapping[str, float], count: int) -> str:
    """Why no group of this kind can ever be had on the nodes that are there now; empty if it may be."""
    totals: dict[str, float] = ray.cluster_resources()
    for name, value in bundle.items():
        if totals.get(name, 0.0) < value * count:
            return f"{count} bundles need {value * count:g} {name}, and Ray's nodes have {totals.get(name, 0.0):g}"
    return ""


def missing() -> EnvironmentLacking:
    """The error for a machine without Ray."""
    return EnvironmentLacking("ray is not installed", "pip install 'moorage[ray]'")
