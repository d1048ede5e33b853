"""The text of a pod's ``/etc/resolv.conf``."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path

from moorage.worker.network.names import GATEWAY

HOST_FILE = Path("/etc/resolv.conf")
#: Where systemd-resolved lists the servers behind its own address 127.0.0.53.
UPSTREAM_FILE = Path("/run/systemd/resolve/resolv.conf")


def _servers(text: str) -> Iterator[str]:
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            yield words[1]


def _usable(server: str) -> bool:
    # Pods speak IPv4 only. A scoped address (fe80::1%eth0) does not parse and is of no use to a pod either.
    try:
        return isinstance(ipaddress.ip_address(server), ipaddress.IPv4Address)
    except ValueError:
        return False


def _loopback(server: str) -> bool:
    return ipaddress.ip_address(server).is_loopback


def pod_resolver(host: str, upstream: str) -> tuple[str, str]:
    """From the host's two files (empty when missing): the pod's file, and the loopback server to lead it to (or "").

    A loopback server is reachable only inside the host's namespace: the pod then asks the gateway, and the host
    translates to that server.
    """
    text = host
    servers = [server for server in _servers(text) if _usable(server)]
    if all(_loopback(server) for server in servers) and any(
        _usable(server) and not _loopback(server) for server in _servers(upstream)
    ):
        text = upstream
        servers = [server for server in _servers(text) if _usable(server)]
    reachable = [server for server in servers if not _loopback(server)]
    behind = ""
    if not reachable and servers:
        behind, reachable = servers[0], [GATEWAY]
    kept = [line for line in text.splitlines() if line.split()[:1] in (["search"], ["domain"], ["options"])]
    return "".join(f"{line}\n" for line in [*kept, *(f"nameserver {server}" for server in reachable)]), behind


def host_resolver() -> tuple[str, str]:
    """`pod_resolver` over this machine's files."""

    def read(path: Path) -> str:
        try:
            return path.read_text(errors="replace")
        except OSError:
            return ""

    return pod_resolver(read(HOST_FILE), read(UPSTREAM_FILE))
