"""Addresses, device names and members of a job's network. Pure: nothing here touches the machine.

Addresses (all IPv4):

* ``job0`` of pod *i*: 100.96.0.0/16 + i + 1, the same in every job (jobs never meet there) and for the job's life;
* ``ext0`` of pod *i*: 100.64.0.0/11 + slot + i, unique in the cluster and the same for the job's life;
* the host's end of every ``ext0``: 100.97.0.1.

Device names have at most 15 characters: ``m``, three of a hash of the cluster, three of a hash of cluster and node, one
letter for the kind, seven of a hash of what the device belongs to. The names of network namespaces are made in the
same way: nodes of a development cluster share ``/run/netns``.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re

import msgspec

from moorage.errors import UsageError

JOB_NETWORK = ipaddress.IPv4Network("100.96.0.0/16")
EXTERNAL_NETWORK = ipaddress.IPv4Network("100.64.0.0/11")
GATEWAY = "100.97.0.1"
#: The standard port; every node of a cluster must use the same one.
VXLAN_PORT = 4789
#: Bytes that VXLAN over IPv4 puts before each frame, with the inner Ethernet header.
VXLAN_OVERHEAD = 50
JOB_DEVICE = "job0"
EXTERNAL_DEVICE = "ext0"

_CLUSTER = re.compile(r"[a-z0-9-]{1,32}")


class MemberAddress(msgspec.Struct, frozen=True):
    """Where pod number ``pod`` of the job runs: the address of its node, to which VXLAN packets for it go."""

    pod: int
    node_address: str


class PublishedPort(msgspec.Struct, frozen=True):
    """TCP or UDP port ``host_port`` of the node leads to ``pod_port`` of the pod."""

    host_port: int
    pod_port: int
    protocol: str = "tcp"


def _digest(length: int, *parts: str | int) -> str:
    joined = "\0".join(str(part) for part in parts).encode()
    return base64.b32encode(hashlib.blake2b(joined, digest_size=10).digest()).decode().lower()[:length]


def cluster_prefix(cluster: str) -> str:
    """What the names of everything that moorage makes for ``cluster`` begin with. Raises `UsageError`."""
    if not _CLUSTER.fullmatch(cluster):
        raise UsageError(f"{cluster!r} cannot be a cluster's name", "use 1 to 32 of a-z, 0-9 and -")
    return "m" + _digest(3, "cluster", cluster)


def node_prefix(cluster: str, node: str) -> str:
    """What the names of everything on ``node`` begin with."""
    return cluster_prefix(cluster) + _digest(3, "node", cluster, node)


class Names(msgspec.Struct, frozen=True):
    """Names of one pod's devices on one node. ``job_host`` and ``external_host`` are the host's ends."""

    netns: str
    job_host: str
    external_host: str
    bridge: str
    vxlan: str
    table: str

    @classmethod
    def derive(cls, *, cluster: str, node: str, job: str, pod: int, incarnation: int) -> Names:
        """The names that belong to these numbers, always the same."""
        prefix = node_prefix(cluster, node)
        pod_hash = _digest(7, "pod", job, incarnation, pod)
        job_hash = _digest(7, "job", job, incarnation)
        return cls(
            netns=f"{prefix}n{pod_hash}",
            job_host=f"{prefix}j{pod_hash}",
            external_host=f"{prefix}e{pod_hash}",
            bridge=f"{prefix}b{job_hash}",
            vxlan=f"{prefix}x{job_hash}",
            table=table_name(cluster),
        )


def table_name(cluster: str) -> str:
    """The nftables table (family ip) that holds all rules of ``cluster`` in the node's namespace."""
    return f"moorage-{cluster}"


def job_address(pod: int) -> str:
    """Address of the pod on ``job0``. Raises `UsageError` beyond 65,533 pods."""
    if not 0 <= pod < JOB_NETWORK.num_addresses - 2:
        raise UsageError(f"pod {pod}: a job has at most {JOB_NETWORK.num_addresses - 2} pods")
    return str(JOB_NETWORK[pod + 1])


def external_address(slot: int) -> str:
    """Address number ``slot`` on ``ext0``. Counters only grow, so the numbers go round; 0 and the last are left out."""
    return str(EXTERNAL_NETWORK[1 + slot % (EXTERNAL_NETWORK.num_addresses - 2)])


def job_mac(pod: int) -> str:
    """Hardware address of the pod's ``job0``: locally administered, the same wherever the pod runs."""
    return "02:6d:" + ":".join(f"{byte:02x}" for byte in pod.to_bytes(4, "big"))


def device_mac(name: str) -> str:
    """Hardware address of one of the host's devices, set at creation so that udev has none to choose."""
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    return "02:6e:" + ":".join(f"{byte:02x}" for byte in digest)
