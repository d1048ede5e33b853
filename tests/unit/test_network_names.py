"""Names and addresses: unique, short, and the same every time."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.errors import UsageError
from moorage.worker.network import MemberAddress, PodNetwork, PublishedPort
from moorage.worker.network.names import (
    EXTERNAL_NETWORK,
    GATEWAY,
    JOB_NETWORK,
    Names,
    cluster_prefix,
    external_address,
    job_address,
    job_mac,
    node_prefix,
)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)


@given(node=texts, job=texts, pod=st.integers(0, 60_000), incarnation=st.integers(1, 2**40))
def test_names_fit_the_kernel_and_show_whose_they_are(node: str, job: str, pod: int, incarnation: int) -> None:
    names = Names.derive(cluster="dev", node=node, job=job, pod=pod, incarnation=incarnation)
    assert names == Names.derive(cluster="dev", node=node, job=job, pod=pod, incarnation=incarnation)
    devices = [names.netns, names.job_host, names.external_host, names.bridge, names.vxlan]
    assert len(set(devices)) == 5
    for name in devices:
        assert len(name) <= 15 and name.isalnum()
        assert name.startswith(node_prefix("dev", node)) and name.startswith(cluster_prefix("dev"))


def test_pods_have_names_of_their_own_and_share_the_jobs_bridge() -> None:
    def derive(node: str = "a", job: str = "j", pod: int = 0, incarnation: int = 1) -> Names:
        return Names.derive(cluster="dev", node=node, job=job, pod=pod, incarnation=incarnation)

    assert derive().bridge == derive(pod=1).bridge and derive().vxlan == derive(pod=1).vxlan
    others = [derive(pod=1), derive(node="b"), derive(job="k"), derive(incarnation=2)]
    assert len({derive().netns, *(other.netns for other in others)}) == 5
    assert len({derive().bridge, *(other.bridge for other in others[1:])}) == 4


@pytest.mark.parametrize("name", ["", "UPPER", "a" * 33, "a_b", "a b"])
def test_a_cluster_name_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="cluster"):
        cluster_prefix(name)


def test_job_addresses_follow_the_pod_number() -> None:
    assert [job_address(pod) for pod in (0, 1, 254, 255)] == ["100.96.0.1", "100.96.0.2", "100.96.0.255", "100.96.1.0"]
    assert job_mac(258) == "02:6d:00:00:01:02"
    for pod in (-1, 65_534):
        with pytest.raises(UsageError):
            job_address(pod)


@given(st.integers(0, 2**40))
def test_external_addresses_stay_in_their_range_however_large_the_counter(slot: int) -> None:
    address = ipaddress.IPv4Address(external_address(slot))
    assert address in EXTERNAL_NETWORK and address not in JOB_NETWORK
    assert address not in (EXTERNAL_NETWORK.network_address, EXTERNAL_NETWORK.broadcast_address)
    assert str(address) != GATEWAY


@given(st.sets(st.integers(0, EXTERNAL_NETWORK.num_addresses - 3), max_size=50))
def test_different_slots_have_different_addresses(slots: set[int]) -> None:
    assert len({external_address(slot) for slot in slots}) == len(slots)


def _network(**changes: object) -> PodNetwork:
    settings: dict[str, object] = {
        "cluster": "dev", "node": "a", "job": "j", "pod": 0, "incarnation": 1, "vni": 5, "slot": 7,
        "node_address": "10.0.0.1", "members": [MemberAddress(0, "10.0.0.1"), MemberAddress(1, "10.0.0.2")],
    }  # fmt: skip
    return PodNetwork(**{**settings, **changes})  # type: ignore[arg-type]


def test_a_pod_of_several_speaks_over_job0_and_a_single_one_over_lo() -> None:
    several = _network()
    assert (several.job_address, several.master_address, several.job_interface) == ("100.96.0.1", "100.96.0.1", "job0")
    assert len(several.host_devices) == 2
    single = _network(members=[MemberAddress(0, "10.0.0.1")], vni=0)
    assert (single.job_address, single.master_address, single.job_interface) == ("127.0.0.1", "127.0.0.1", "lo")
    assert len(single.host_devices) == 1
    assert single.drained()  # there is nothing to drain, nor a namespace to look into
    assert several.external_address == external_address(7)
    assert _network(pod=1).external_address == external_address(8)
    assert "100.96.0.2 two" in several.hosts({0: "one", 1: "two"})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vni": 0}, "VXLAN"),
        ({"vni": 1 << 24}, "VXLAN"),
        ({"pod": 2}, "not among the members"),
        ({"publish": [PublishedPort(0, 80)]}, "publish"),
        ({"publish": [PublishedPort(80, 65536)]}, "publish"),
        ({"publish": [PublishedPort(80, 80, "sctp")]}, "publish"),
    ],
)
def test_numbers_that_make_no_network_are_refused_before_anything_is_made(
    changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(UsageError, match=complaint):
        _network(**changes)
