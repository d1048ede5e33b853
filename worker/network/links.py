"""Links, addresses, routes and forwarding entries by netlink. Every function takes an open `IPRoute`.

Idempotence is the caller's: these create what does not exist, and deletions of what is not there do nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from moorage.errors import EnvironmentLacking, MoorageError
from moorage.worker.network.names import (
    EXTERNAL_DEVICE,
    GATEWAY,
    JOB_DEVICE,
    JOB_NETWORK,
    VXLAN_OVERHEAD,
    MemberAddress,
    Names,
    device_mac,
    job_address,
    job_mac,
)

_GONE = {errno.ENODEV, errno.ENOENT, errno.EADDRNOTAVAIL, errno.ESRCH}
_NUD_NOARP, _NUD_PERMANENT = 0x40, 0x80
_NTF_SELF, _NTF_MASTER = 0x2, 0x4
_SCOPE_LINK = 253
DEFAULT_MTU = 1500


@contextmanager
def opened() -> Iterator[Any]:
    """An `IPRoute` in the current namespace, with its failures turned into `MoorageError`."""
    try:
        with IPRoute() as route:
            yield route
    except NetlinkError as error:
        if error.code == errno.EOPNOTSUPP:
            raise EnvironmentLacking(
                f"the kernel has no support for a network device that pods need: {error}",
                "load the modules vxlan, veth and bridge; `moorage doctor` names the missing one",
            ) from error
        if error.code == errno.EPERM:
            raise EnvironmentLacking(f"no right to change the network: {error}", "run the worker as root") from error
        raise MoorageError(f"network: {error}") from error


def index(route: Any, name: str) -> int | None:
    """Number of the device called ``name`` in this namespace."""
    found = route.link_lookup(ifname=name)
    return int(found[0]) if found else None


def delete(route: Any, name: str) -> bool:
    """Delete a device (of a veth pair: both ends). False if there was none."""
    try:
        number = index(route, name)
        if number is None:
            return False
        route.link("del", index=number)
    except NetlinkError as error:
        if error.code not in _GONE:
            raise
        return False
    return True


def set_alias(route: Any, name: str, alias: str) -> None:
    """Write the free text that ``ip link`` shows beside the device."""
    route.link("set", index=index(route, name), ifalias=alias)


def alias(route: Any, name: str) -> str:
    """The text that `set_alias` wrote; empty if there is none or no such device."""
    number = index(route, name)
    if number is None:
        return ""
    return str(route.get_links(number)[0].get_attr("IFLA_IFALIAS") or "")


def uplink_mtu(route: Any, address: str) -> int:
    """MTU of the device that carries ``address``, 1500 if none does."""
    for entry in route.get_addr(family=2, address=address):
        return int(route.get_links(entry["index"])[0].get_attr("IFLA_MTU"))
    return DEFAULT_MTU


def _without_ipv6(name: str) -> None:
    # No link-local address, no neighbour discovery: the host's ends are wires, not interfaces of the host.
    setting = Path("/proc/sys/net/ipv6/conf", name, "disable_ipv6")
    if setting.exists():
        setting.write_text("1\n")


def ensure_bridge(
    route: Any, names: Names, *, vni: int, node_address: str, port: int, remote: Sequence[MemberAddress], mtu: int
) -> None:
    """The job's bridge on this node, and its VXLAN device if it has members on other nodes.

    Nothing is learnt and nothing is flooded: a frame goes where an entry says, or nowhere.
    """
    if index(route, names.bridge) is None:
        route.link(
            "add",
            ifname=names.bridge,
            kind="bridge",
            address=device_mac(names.bridge),
            br_stp_state=0,
            br_mcast_snooping=0,
        )
        _without_ipv6(names.bridge)
        route.link("set", index=index(route, names.bridge), mtu=mtu, state="up")
    if not remote:
        return
    if index(route, names.vxlan) is None:
        route.link(
            "add",
            ifname=names.vxlan,
            kind="vxlan",
            address=device_mac(names.vxlan),
            vxlan_id=vni,
            vxlan_local=node_address,
            vxlan_port=port,
            vxlan_learning=0,
            mtu=mtu,
        )
        _without_ipv6(names.vxlan)
    vxlan = index(route, names.vxlan)
    attach(route, names, names.vxlan)
    for member in remote:
        mac, state = job_mac(member.pod), _NUD_NOARP | _NUD_PERMANENT
        route.fdb("replace", ifindex=vxlan, lladdr=mac, dst=member.node_address, flags=_NTF_SELF, state=state)
        _bridge_entry(route, vxlan, mac)
    route.link("set", index=vxlan, state="up")


def _bridge_entry(route: Any, port: int | None, mac: str) -> None:
    # "noarp" is a static entry; "permanent" would mean that the address is the bridge's own.
    route.fdb("replace", ifindex=port, lladdr=mac, flags=_NTF_MASTER, state=_NUD_NOARP)


def attach(route: Any, names: Names, device: str) -> None:
    """Make ``device`` a port of the job's bridge that neither learns nor receives floods."""
    number = index(route, device)
    route.link("set", index=number, master=index(route, names.bridge))
    route.brport("set", index=number, learning=0, unicast_flood=0, mcast_flood=0, bcast_flood=0)


def bridge_ports(route: Any, bridge: str) -> list[str]:
    """Names of the bridge's ports; empty when there is no such bridge."""
    number = index(route, bridge)
    if number is None:
        return []
    return [str(link.get_attr("IFLA_IFNAME")) for link in route.get_links() if link.get_attr("IFLA_MASTER") == number]


def job_cable(route: Any, names: Names, *, netns: Path, pod: int, mtu: int) -> None:
    """The veth pair from the bridge to ``job0`` in the pod. The pod's end stays down."""
    _cable(route, names.job_host, JOB_DEVICE, netns=netns, mac=job_mac(pod), mtu=mtu)
    attach(route, names, names.job_host)
    number = index(route, names.job_host)
    _bridge_entry(route, number, job_mac(pod))
    route.link("set", index=number, state="up")


def external_cable(route: Any, names: Names, *, netns: Path, address: str, mtu: int) -> None:
    """The veth pair from the host to ``ext0`` in the pod. The pod's end stays down."""
    _cable(route, names.external_host, EXTERNAL_DEVICE, netns=netns, mac=device_mac(names.netns), mtu=mtu)
    number = index(route, names.external_host)
    # An address with a peer: the kernel itself puts the pod's route back when the device was down and comes up again.
    route.addr("add", index=number, local=GATEWAY, address=address, prefixlen=32)
    route.link("set", index=number, state="up")


def _cable(route: Any, host: str, pod: str, *, netns: Path, mac: str, mtu: int) -> None:
    with netns.open("rb") as file:
        peer = {"ifname": pod, "net_ns_fd": file.fileno(), "address": mac, "mtu": mtu}
        route.link("add", ifname=host, kind="veth", address=device_mac(host), mtu=mtu, peer=peer)
    _without_ipv6(host)


def raise_loopback(route: Any) -> None:
    """Set ``lo`` up (in the pod)."""
    route.link("set", index=index(route, "lo"), state="up")


def raise_job_device(route: Any, *, pod: int, members: Sequence[MemberAddress]) -> None:
    """Give ``job0`` its address and a permanent neighbour entry for each other member, and set it up (in the pod)."""
    number = index(route, JOB_DEVICE)
    route.addr("add", index=number, address=job_address(pod), prefixlen=JOB_NETWORK.prefixlen)
    route.link("set", index=number, state="up")
    for member in members:
        if member.pod != pod:
            route.neigh(
                "replace", dst=job_address(member.pod), lladdr=job_mac(member.pod), ifindex=number, state=_NUD_PERMANENT
            )


def raise_external_device(route: Any, *, address: str) -> None:
    """Give ``ext0`` its address and the default route, and set it up (in the pod)."""
    number = index(route, EXTERNAL_DEVICE)
    route.addr("add", index=number, address=address, prefixlen=32)
    route.link("set", index=number, state="up")
    route.route("add", dst=f"{GATEWAY}/32", oif=number, scope=_SCOPE_LINK)
    route.route("add", dst="default", gateway=GATEWAY, oif=number)


def mtu_for(uplink: int) -> int:
    """MTU of ``job0`` over an uplink of that MTU. The same without VXLAN, since a move may bring it back."""
    return uplink - VXLAN_OVERHEAD
