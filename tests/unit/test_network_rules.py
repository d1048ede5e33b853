"""The texts given to nft, and what is concluded from its listing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from moorage.errors import Conflict, EnvironmentLacking, MoorageError
from moorage.runtime import programs
from moorage.worker.network import rules
from moorage.worker.network.names import PublishedPort

LISTING: list[dict[str, Any]] = [
    {"metainfo": {"version": "1.1.3"}},
    {"table": {"family": "ip", "name": "t"}},
    {"set": {"name": "pods", "elem": ["100.64.0.1", "100.64.0.2"]}},
    {
        "map": {
            "name": "tcp_ports",
            "elem": [[80, {"concat": ["100.64.0.1", 8080]}], [81, {"concat": ["100.64.0.2", 1]}]],
        }
    },
    {"map": {"name": "udp_ports"}},
    {"map": {"name": "resolvers", "elem": [["100.64.0.1", "127.0.0.53"]]}},
    {"chain": {"name": "leaving"}},
]


def test_a_pod_takes_exactly_its_own_elements_away() -> None:
    assert rules.removal("t", "100.64.0.1", LISTING).splitlines() == [
        "delete element ip t pods { 100.64.0.1 }",
        "delete element ip t tcp_ports { 80 }",
        "delete element ip t resolvers { 100.64.0.1 }",
    ]


def test_the_last_pod_takes_the_table_along() -> None:
    last = [entry for entry in LISTING if "set" not in entry] + [{"set": {"name": "pods", "elem": ["100.64.0.1"]}}]
    assert rules.removal("t", "100.64.0.1", last) == "delete table ip t\n"


def test_a_pod_that_is_not_there_takes_nothing() -> None:
    assert rules.removal("t", "100.64.0.9", LISTING) == ""
    assert rules.removal("t", "100.64.0.9", []) == ""


def test_taken_ports_are_found_by_protocol() -> None:
    wanted = [PublishedPort(80, 1), PublishedPort(80, 1, "udp"), PublishedPort(82, 1)]
    assert rules.taken_ports(LISTING, wanted) == [PublishedPort(80, 1)]
    assert rules.taken_ports([], wanted) == []


def test_the_seal_drops_all_but_empty_segments_on_job0_and_everything_on_ext0() -> None:
    text = rules.seal(["job0", "ext0"])
    assert text.count("policy drop") == 3 and text.count("accept") == 1
    assert "job0_ingress" not in text
    assert "52 . 8" in text  # with a timestamp option, as Linux sends them
    old = rules.seal(["job0", "ext0"], egress=False)
    assert "egress" not in old and "ext0_ingress" in old


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("x:1:2-3: Error: Could not process rule: File exists", Conflict),
        ("x: Error: Could not process rule: Operation not permitted", EnvironmentLacking),
        ("x: Error: Could not process rule: Operation not supported", EnvironmentLacking),
        ("netlink: Error: unable to initialize Netlink socket: Protocol not supported", EnvironmentLacking),
        ("x: Error: syntax error", MoorageError),
    ],
)
def test_what_nft_says_becomes_an_error_that_says_the_way_out(
    said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "find", lambda name: Path("/bin/nft"))
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", said))
    with pytest.raises(error) as caught:
        rules.apply("add table ip t")
    assert type(caught.value) is error
