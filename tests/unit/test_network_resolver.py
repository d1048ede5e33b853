"""Which name servers a pod is told."""

from __future__ import annotations

import pytest

from moorage.worker.network.names import GATEWAY
from moorage.worker.network.resolver import pod_resolver

STUB = "# made by systemd-resolved\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch example.org\n"


@pytest.mark.parametrize(
    ("host", "upstream", "servers", "behind"),
    [
        ("nameserver 10.0.0.53\nnameserver 10.0.0.54\n", "", ["10.0.0.53", "10.0.0.54"], ""),
        ("nameserver 127.0.0.1\nnameserver 10.0.0.54\n", "", ["10.0.0.54"], ""),
        ("nameserver fe80::1%eth0\nnameserver 10.0.0.53\n", "", ["10.0.0.53"], ""),
        (STUB, "nameserver 192.168.1.1\nnameserver fd00::1\n", ["192.168.1.1"], ""),
        (STUB, "", [GATEWAY], "127.0.0.53"),
        (STUB, "nameserver ::1\n", [GATEWAY], "127.0.0.53"),
        ("nameserver 127.0.0.2\n", "nameserver 127.0.0.53\n", [GATEWAY], "127.0.0.2"),
        ("", "", [], ""),
    ],
)
def test_the_pod_asks_a_server_that_it_can_reach(host: str, upstream: str, servers: list[str], behind: str) -> None:
    text, loopback = pod_resolver(host, upstream)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("nameserver")] == servers
    assert loopback == behind


def test_search_domains_and_options_are_kept() -> None:
    text, _ = pod_resolver(STUB, "")
    assert text == f"options edns0 trust-ad\nsearch example.org\nnameserver {GATEWAY}\n"
