"""The network of an embedded cluster: a bridge, a namespace and a cable for each node, and the way out to the world."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from moorage.dev.layout import RUN_FOLDER, Cluster, Node, write_atomically
from moorage.errors import MoorageError
from moorage.runtime import programs
from moorage.worker.network.names import node_prefix

IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
#: What `IP_FORWARD` held before the first cluster of this machine was started.
FORWARD_BEFORE = RUN_FOLDER / "locks" / "ip_forward"
#: In a node's namespace: drops what goes to and comes from etcd and the coordinator.
CUT_TABLE = "moorage_dev_cut"
#: iptables' chains through which the nodes' packets go, and how a rule there names the bridge.
_GUARDED = {"FORWARD": ("iifname", "oifname"), "INPUT": ("iifname",)}


def _run(program: str, *arguments: str, text: str | None = None) -> str:
    command = [str(programs.find(program)), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        what = f"{program} {' '.join(arguments)}".strip()
        raise MoorageError(f"{what} failed: {(done.stderr.strip() or 'no message').splitlines()[0]}")
    return done.stdout


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _ip_json(*arguments: str) -> list[dict[str, Any]]:
    found = json.loads(_run("ip", "-json", *arguments) or "[]")
    # Where a filter leaves nothing, some versions print an empty object for each link.
    return [entry for entry in found if entry]


def taken_networks() -> list[str]:
    """Every network that a route or an address of this machine names."""
    routes = [str(route["dst"]) for route in _ip_json("-4", "route", "show", "table", "all")]
    addresses = [
        f"{address['local']}/{address['prefixlen']}"
        for link in _ip_json("-4", "address", "show")
        for address in link.get("addr_info", [])
    ]
    return [network for network in [*routes, *addresses] if network[0].isdigit()]


def free_ports(count: int) -> list[int]:
    """Ports on which nothing of this machine listens, at any address. None of those that the kernel gives to outgoing
    connections: such a one may be taken when a process that died shall listen on it again."""
    lowest = int(PORT_RANGE.read_text().split()[0])
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            # Where the kernel may give nearly every port, it has to choose.
            port = random.randrange(_FIRST_PORT, lowest) if lowest > 2 * _FIRST_PORT else 0
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                found.append(probe.getsockname()[1])
        return found


def link_exists(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def namespace_path(cluster: Cluster, node: Node) -> Path:
    return Path("/run/netns") / cluster.namespace(node)


def create(cluster: Cluster) -> None:
    """Make the bridge, the machine's address on it and the way out. Idempotent."""
    if not link_exists(cluster.bridge):
        _ip("link", "add", cluster.bridge, "type", "bridge", "stp_state", "0", "forward_delay", "0")
    _ip("address", "replace", f"{cluster.gateway}/24", "dev", cluster.bridge)
    _ip("link", "set", cluster.bridge, "up")
    if not FORWARD_BEFORE.exists():
        write_atomically(FORWARD_BEFORE, IP_FORWARD.read_bytes())
    IP_FORWARD.write_text("1")
    rules = f"""
        table ip {cluster.table} {{}}
        delete table ip {cluster.table}
        table ip {cluster.table} {{
            chain postrouting {{
                type nat hook postrouting priority srcnat; policy accept;
                ip saddr {cluster.subnet} ip daddr != {cluster.subnet} masquerade
            }}
        }}"""
    _run("nft", "-f", "-", text=rules)
    open_firewall(cluster)


def open_firewall(cluster: Cluster) -> None:
    """Let the nodes' packets through where another program made the machine drop them (Docker: what is forwarded; ufw:
    what comes in). Idempotent.

    The bridge's own frames meet the chain of what is forwarded too, when ``br_netfilter`` is loaded.
    """
    for name, directions in _GUARDED.items():
        chain = _chain(name)
        if chain.policy != "drop" or _mark(cluster) in dict(chain.handles):
            continue
        for direction in directions:
            rule = f'{direction} "{cluster.bridge}" counter accept comment "{_mark(cluster)}"'
            _run("nft", "insert", "rule", "ip", "filter", name, rule)


def close_firewall(cluster: Cluster) -> None:
    """Undo `open_firewall`. Idempotent."""
    for name in _GUARDED:
        for comment, handle in _chain(name).handles:
            if comment == _mark(cluster):
                _run("nft", "delete", "rule", "ip", "filter", name, "handle", str(handle))


class _Chain(msgspec.Struct, frozen=True):
    policy: str = ""
    handles: tuple[tuple[str, int], ...] = ()  # (comment, handle) of each rule that has a comment


def _mark(cluster: Cluster) -> str:
    return f"moorage-dev-{cluster.id}"


def _chain(name: str) -> _Chain:
    """A chain of iptables' filter table; without a policy where there is none."""
    try:
        answer = json.loads(_run("nft", "-j", "-a", "list", "chain", "ip", "filter", name))
    except MoorageError:
        return _Chain()
    entries = answer["nftables"]
    policy = next((entry["chain"].get("policy", "") for entry in entries if "chain" in entry), "")
    rules = [entry["rule"] for entry in entries if "rule" in entry]
    return _Chain(policy, tuple((rule["comment"], rule["handle"]) for rule in rules if "comment" in rule))


def create_node(cluster: Cluster, node: Node) -> None:
    """Make the node's namespace and join it to the bridge. Idempotent."""
    namespace, link = cluster.namespace(node), cluster.link(node)
    if not namespace_path(cluster, node).exists():
        _ip("netns", "add", namespace)
    if not link_exists(link):
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", link, "master", cluster.bridge, "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    _ip("-n", namespace, "address", "replace", f"{node.address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")
    _ip("-n", namespace, "route", "replace", "default", "via", cluster.gateway)


def cut(cluster: Cluster, node: Node, *, control_only: bool) -> None:
    """Pull the node's cable; with ``control_only`` cut it off from etcd and the coordinator, not from other nodes."""
    if not control_only:
        _ip("link", "set", cluster.link(node), "down")
        return
    rules = f"""
        table ip {CUT_TABLE} {{}}
        delete table ip {CUT_TABLE}
        table ip {CUT_TABLE} {{
            chain input {{ type filter hook input priority -300; policy accept; ip saddr {cluster.gateway} drop; }}
            chain output {{ type filter hook output priority -300; policy accept; ip daddr {cluster.gateway} drop; }}
        }}"""
    _in_namespace(cluster, node, "nft", "-f", "-", text=rules)


def mend(cluster: Cluster, node: Node) -> None:
    """Undo `cut`, whichever it was."""
    _ip("link", "set", cluster.link(node), "up")
    rules = f"table ip {CUT_TABLE} {{}}\ndelete table ip {CUT_TABLE}\n"
    _in_namespace(cluster, node, "nft", "-f", "-", text=rules)


def _in_namespace(cluster: Cluster, node: Node, program: str, *arguments: str, text: str) -> None:
    command = [f"--net={namespace_path(cluster, node)}", str(programs.find(program)), *arguments]
    _run("nsenter", *command, text=text)


def pod_namespaces(cluster: Cluster, node: Node) -> set[str]:
    """The named namespaces of the node's pods, whether or not anything of the node is left."""
    prefix = node_prefix(cluster.name, node.name)
    folder = Path("/run/netns")
    return {path.name for path in folder.iterdir() if path.name.startswith(prefix)} if folder.exists() else set()


def remove_namespace(name: str) -> None:
    """Remove a named namespace; the links in it go with it. Idempotent."""
    if (Path("/run/netns") / name).exists():
        _ip("netns", "delete", name)


def remove_node(cluster: Cluster, node: Node) -> None:
    """Remove the node's cable and namespace. Idempotent."""
    # The cable first: a namespace that a process still holds open would keep its end alive.
    if link_exists(cluster.link(node)):
        _ip("link", "delete", cluster.link(node))
    remove_namespace(cluster.namespace(node))


def remove(cluster: Cluster, *, last: bool) -> None:
    """Remove bridge and rules; ``last``: no other cluster is left, so put the machine's setting back. Idempotent."""
    if link_exists(cluster.bridge):
        _ip("link", "delete", cluster.bridge)
    close_firewall(cluster)
    _run("nft", "-f", "-", text=f"table ip {cluster.table} {{}}\ndelete table ip {cluster.table}\n")
    if last:
        with contextlib.suppress(FileNotFoundError):
            IP_FORWARD.write_bytes(FORWARD_BEFORE.read_bytes())
            FORWARD_BEFORE.unlink()
