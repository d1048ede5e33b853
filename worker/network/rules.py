"""The nftables rules: address translation and isolation on ``ext0`` (host), and the seal (pod).

One table of family ip for each cluster in the node's namespace. Its chains never change; each pod adds elements to sets
and maps and takes them away again, so the pods cannot disturb each other and nothing of a pod is left behind.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from moorage.errors import Conflict, EnvironmentLacking, MoorageError
from moorage.runtime import programs
from moorage.worker.network.names import (
    EXTERNAL_DEVICE,
    GATEWAY,
    JOB_DEVICE,
    JOB_NETWORK,
    PublishedPort,
)

SEAL_TABLE = "moorage-seal"
SHIELD_TABLE = "moorage-shield"
UNCORK_TABLE = "moorage-uncork"
#: Commands that undo `uncork`.
UNCORK = f"add table inet {UNCORK_TABLE}\ndelete table inet {UNCORK_TABLE}\n"
#: (IPv4 total length, TCP data offset in words) of a segment that carries nothing: 20 bytes of IP, 5 to 15 words of
#: TCP.
_EMPTY_SEGMENTS = ", ".join(f"{20 + 4 * words} . {words}" for words in range(5, 16))


def host_table(table: str, *, vxlan_port: int) -> str:
    """Commands that make sure the cluster's table exists. Running them again changes nothing."""
    return f"""
add table ip {table}
add set ip {table} pods {{ type ipv4_addr; }}
add map ip {table} tcp_ports {{ type inet_service : ipv4_addr . inet_service; }}
add map ip {table} udp_ports {{ type inet_service : ipv4_addr . inet_service; }}
add map ip {table} resolvers {{ type ipv4_addr : ipv4_addr; }}
add chain ip {table} untracked {{ type filter hook prerouting priority raw; }}
add chain ip {table} untracked_out {{ type filter hook output priority raw; }}
add chain ip {table} arriving {{ type nat hook prerouting priority dstnat; }}
add chain ip {table} from_host {{ type nat hook output priority dstnat; }}
add chain ip {table} leaving {{ type nat hook postrouting priority srcnat; }}
add chain ip {table} through {{ type filter hook forward priority filter; }}
add chain ip {table} to_host {{ type filter hook input priority filter; }}
flush chain ip {table} untracked
flush chain ip {table} untracked_out
flush chain ip {table} arriving
flush chain ip {table} from_host
flush chain ip {table} leaving
flush chain ip {table} through
flush chain ip {table} to_host
add rule ip {table} untracked ip saddr @pods ip daddr 127.0.0.0/8 drop
add rule ip {table} untracked ip saddr {JOB_NETWORK} ip daddr {JOB_NETWORK} notrack
add rule ip {table} untracked udp dport {vxlan_port} notrack
add rule ip {table} untracked_out udp dport {vxlan_port} notrack
add rule ip {table} arriving ip daddr {GATEWAY} udp dport 53 dnat ip to ip saddr map @resolvers
add rule ip {table} arriving ip daddr {GATEWAY} tcp dport 53 dnat ip to ip saddr map @resolvers
add rule ip {table} arriving fib daddr type local dnat ip to tcp dport map @tcp_ports
add rule ip {table} arriving fib daddr type local dnat ip to udp dport map @udp_ports
add rule ip {table} from_host fib daddr type local ip daddr != 127.0.0.0/8 dnat ip to tcp dport map @tcp_ports
add rule ip {table} from_host fib daddr type local ip daddr != 127.0.0.0/8 dnat ip to udp dport map @udp_ports
add rule ip {table} leaving ip saddr @pods masquerade
add rule ip {table} through ip saddr @pods udp dport {vxlan_port} drop
add rule ip {table} through ct status dnat accept
add rule ip {table} through ct state established,related accept
add rule ip {table} through ip daddr @pods drop
add rule ip {table} to_host ip saddr @pods udp dport {vxlan_port} drop
"""


def pod_elements(table: str, address: str, publish: Sequence[PublishedPort], resolver: str) -> str:
    """Commands that let one pod in. ``resolver``: the host's loopback resolver, empty if the pod needs none."""
    lines = [f"add element ip {table} pods {{ {address} }}"]
    if resolver:
        lines.append(f"add element ip {table} resolvers {{ {address} : {resolver} }}")
    for port in publish:
        element = f"{{ {port.host_port} : {address} . {port.pod_port} }}"
        lines.append(f"create element ip {table} {port.protocol}_ports {element}")
    return "\n".join(lines) + "\n"


def removal(table: str, address: str, listing: Sequence[dict[str, Any]]) -> str:
    """Commands that take away every element of the pod with that address; ``listing`` is `list_table`'s answer.

    When no other pod is left, the whole table goes.
    """
    lines: list[str] = []
    others = False
    for entry in listing:
        kind = "set" if "set" in entry else "map"
        held = entry.get(kind)
        if held is None:
            continue
        for element in held.get("elem", []):
            key, value = element if isinstance(element, list) else (element, None)
            target = value["concat"][0] if isinstance(value, dict) else None
            if address in (key, target):
                lines.append(f"delete element ip {table} {held['name']} {{ {key} }}")
            elif held["name"] == "pods":
                others = True
    if any("table" in entry for entry in listing) and not others:
        return f"delete table ip {table}\n"
    return "\n".join(lines) + "\n" if lines else ""


def taken_ports(listing: Sequence[dict[str, Any]], publish: Sequence[PublishedPort]) -> list[PublishedPort]:
    """Those of ``publish`` whose port of the node leads to a pod already."""
    taken = {
        (entry["map"]["name"], element[0])
        for entry in listing
        if "map" in entry and entry["map"]["name"].endswith("_ports")
        for element in entry["map"].get("elem", [])
    }
    return [port for port in publish if (f"{port.protocol}_ports", port.host_port) in taken]


def _seal_hook(device: str, hook: str) -> str:
    chain = f"{device}_{hook}"
    text = (
        f"add chain netdev {SEAL_TABLE} {chain} "
        f'{{ type filter hook {hook} device "{device}" priority filter; policy drop; }}\n'
    )
    if device == JOB_DEVICE:
        text += (
            f"add rule netdev {SEAL_TABLE} {chain} ip hdrlength 5 ip frag-off & 0x1fff == 0 "
            "tcp flags & (syn|fin|rst|psh|urg) == 0 "
            f"ip length . tcp doff {{ {_EMPTY_SEGMENTS} }} accept\n"
        )
    return text


def seal(devices: Sequence[str], *, egress: bool = True) -> str:
    """Commands for the pod's namespace that seal the devices, in one transaction.

    From ``job0`` only empty TCP segments leave: acknowledgements, and the probes by which an idle connection or one
    with a closed window learns that its peer lives. So no connection of a frozen pod dies however long the seal lasts,
    and no byte of data moves. All others are refused, which TCP takes as local congestion: it tries again every half
    second and does not back off. What arrives on ``job0`` is let in: it can only come from a pod that runs on already,
    and would have to be sent again if it were lost. On ``ext0``, where the peers are not sealed, nothing passes.
    """
    text = f"add table netdev {SEAL_TABLE}\ndelete table netdev {SEAL_TABLE}\nadd table netdev {SEAL_TABLE}\n"
    for device in devices:
        if egress:
            text += _seal_hook(device, "egress")
        if device == EXTERNAL_DEVICE:
            text += _seal_hook(device, "ingress")
    return text


#: Commands that take the seal away, sealed or not.
UNSEAL = f"add table netdev {SEAL_TABLE}\ndelete table netdev {SEAL_TABLE}\n"


def shield(mark: int, ports: Sequence[int], connections: Sequence[tuple[tuple[str, int], tuple[str, int]]]) -> str:
    """Commands that drop the TCP packets of ``ports`` and of ``connections`` (both ends) that do not bear ``mark``."""
    pre = f"add rule inet {SHIELD_TABLE} pre"
    text = (
        f"add table inet {SHIELD_TABLE}\ndelete table inet {SHIELD_TABLE}\nadd table inet {SHIELD_TABLE}\n"
        f"add chain inet {SHIELD_TABLE} pre {{ type filter hook prerouting priority raw; }}\n"
        f"{pre} meta mark {mark} accept\n"
    )
    for port in ports:
        text += f"{pre} tcp dport {port} drop\n{pre} tcp sport {port} drop\n"
    for one, other in connections:
        family = "ip6" if ":" in one[0] else "ip"
        for (source, sport), (target, dport) in ((one, other), (other, one)):
            text += f"{pre} {family} saddr {source} {family} daddr {target} tcp sport {sport} tcp dport {dport} drop\n"
    return text


#: Commands that take the shield away, if there is one.
UNSHIELD = f"add table inet {SHIELD_TABLE}\ndelete table inet {SHIELD_TABLE}\n"


def uncork(port: int, ports: Sequence[int]) -> str:
    """Commands that lead the UDP packets of the local ``port`` to ``ports`` of this network (of 127.0.0.1 and, if there
    is a second one, of ::1), and keep whom they were for in two sets."""
    table = f"inet {UNCORK_TABLE}"
    text = f"{UNCORK}add table {table}\nadd chain {table} out {{ type route hook output priority -300; }}\n"
    for family, address, to in zip(("ip", "ip6"), ("127.0.0.1", "::1"), ports, strict=False):
        kind = "ipv4_addr" if family == "ip" else "ipv6_addr"
        leading = f"{family} daddr set {address} udp dport set {to}"
        text += (
            f"add set {table} {family}_for {{ type {kind} . inet_service; flags dynamic; size 16; }}\n"
            f"add rule {table} out meta nfproto {'ipv4' if family == 'ip' else 'ipv6'} udp sport {port} "
            f"add @{family}_for {{ {family} daddr . udp dport }} {leading} accept\n"
        )
    return text


def apply(commands: str) -> None:
    """Run the commands as one transaction in the current namespace.

    Raises `Conflict` when an element exists already, `EnvironmentLacking` without nft or the kernel's nf_tables.
    """
    if commands.strip():
        _nft(["-f", "-"], commands)


def list_table(family: str, table: str) -> list[dict[str, Any]]:
    """What ``nft -j list table`` says, one object an entry; empty when there is no such table."""
    try:
        answer = _nft(["-j", "list", "table", family, table], "")
    except FileNotFoundError:
        return []
    return list(json.loads(answer)["nftables"])


def _nft(arguments: Sequence[str], text: str) -> str:
    done = subprocess.run(
        [programs.find("nft"), *arguments], input=text, capture_output=True, text=True, check=False, timeout=30
    )
    if done.returncode == 0:
        return done.stdout
    error = next((line for line in done.stderr.splitlines() if "Error" in line), done.stderr.strip())
    if "No such file or directory" in error:
        raise FileNotFoundError(error)
    if "File exists" in error:
        raise Conflict(f"nftables: {error.strip()}")
    if "Operation not permitted" in error:
        raise EnvironmentLacking(f"no right to change the packet filter: {error}", "run the worker as root")
    if "not supported" in error or "unable to initialize Netlink" in error:
        raise EnvironmentLacking(
            f"the kernel lacks a part of nf_tables: {error}", "load nf_tables, nft_chain_nat, nft_masq, nft_fib_ipv4"
        )
    raise MoorageError(f"nft: {error}")
