"""Pods on several hosts: who reaches whom, over job0, over ext0, and what is left when they are gone."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.errors import Conflict, NotFound
from moorage.worker.network import PublishedPort, namespace, resolver
from moorage.worker.network.cut import cut_by_names, uncut_by_names
from tests.support.network_lab import WORLD_ADDRESS, Lab, connect, connected, datagram_socket, listen

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def hosts() -> Iterator[Lab]:
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab(hosts: Lab) -> Iterator[Lab]:
    """The hosts, with nothing of moorage on them before and after."""
    yield hosts
    for number in range(len(hosts.hosts)):
        for network in [made for host, made in hosts._made if host == number]:
            hosts.remove(network)
        assert hosts.left(number) == []
    hosts._made.clear()


def _says(sender: socket.socket, receiver: socket.socket, text: bytes = b"hello") -> bool:
    sender.sendall(text)
    got = b""
    while len(got) < len(text):
        part = receiver.recv(1 << 16)
        if not part:
            return False
        got += part
    return got == text


def test_pods_on_one_host_and_on_others_reach_each_other(lab: Lab) -> None:
    pods = lab.pair(0, 0, 1, 2)
    for a in range(4):
        for b in range(a):
            server, client = connected(pods[a].netns_path, pods[b].netns_path, pods[a].job_address, 7000 + a)
            with server, client:
                assert _says(client, server, b"x" * 300_000)
                assert client.getsockname()[0] == pods[b].job_address


def test_a_job_on_one_host_needs_no_vxlan(lab: Lab) -> None:
    pods = lab.pair(0, 0)
    assert not [entry for entry in lab.left(0) if entry == f"link {pods[0]._names.vxlan}"]
    server, client = connected(pods[0].netns_path, pods[1].netns_path, pods[0].job_address, 7000)
    with server, client:
        assert _says(client, server)


def test_a_pod_of_a_stale_incarnation_reaches_nobody_of_the_new_one(lab: Lab) -> None:
    stale = lab.pod(0, [0, 1], incarnation=1, vni=100)
    lab.create(stale)
    new = lab.pair(2, 1, incarnation=2, vni=101)
    with (
        datagram_socket(new[1].netns_path, new[1].job_address, 7100) as receiver,
        datagram_socket(stale.netns_path, stale.job_address) as from_stale,
        datagram_socket(new[0].netns_path, new[0].job_address) as from_new,
    ):
        from_stale.sendto(b"stale", (new[1].job_address, 7100))
        from_new.sendto(b"new", (new[1].job_address, 7100))
        assert receiver.recv(100) == b"new"
        with pytest.raises(TimeoutError):
            receiver.recv(100)


def test_jobs_with_the_same_addresses_on_the_same_hosts_do_not_meet(lab: Lab) -> None:
    one = lab.pair(0, 1, job="one", vni=200, slot=0)
    two = lab.pair(0, 1, job="two", vni=201, slot=2)
    pairs = [connected(pods[1].netns_path, pods[0].netns_path, pods[1].job_address, 7000) for pods in (one, two)]
    for number, (server, client) in enumerate(pairs):
        with server, client:
            assert _says(client, server, b"job %d" % number)


def test_the_world_sees_the_nodes_address(lab: Lab) -> None:
    (pod,) = lab.pair(0)
    with listen(lab.world, WORLD_ADDRESS, 8000) as listener, connect(pod.netns_path, WORLD_ADDRESS, 8000) as client:
        server, peer = listener.accept()
        with server:
            assert peer[0] == lab.address(0)
            assert _says(client, server) and _says(server, client)


def test_a_published_port_leads_to_the_pod_from_the_world_from_its_host_and_from_other_pods(lab: Lab) -> None:
    publish = [PublishedPort(8080, 80)]
    (server_pod,) = lab.pair(0, job="server", slot=10, publish=publish)
    (near,) = lab.pair(0, job="near", slot=11)
    (far,) = lab.pair(1, job="far", slot=12)
    with listen(server_pod.netns_path, "", 80) as listener:
        listener.settimeout(5)
        for origin in (lab.world, lab.hosts[0], lab.hosts[1], near.netns_path, far.netns_path):
            with connect(origin, lab.address(0), 8080) as client:
                server, _ = listener.accept()
                with server:
                    assert _says(client, server)


def test_a_published_port_is_taken_once_and_free_again_afterwards(lab: Lab) -> None:
    publish = [PublishedPort(8081, 80), PublishedPort(8081, 81, "udp")]
    (first,) = lab.pair(0, job="first", publish=publish)
    second = lab.pod(0, [0], job="second", slot=1, publish=publish)
    before = lab.left(0)
    with pytest.raises(Conflict, match="8081"):
        lab.create(second)
    assert lab.left(0) == before
    lab.remove(first)
    lab.create(second)


def test_pods_of_different_jobs_do_not_reach_each_other_over_ext0(lab: Lab) -> None:
    (one,) = lab.pair(0, job="one", slot=20)
    (two,) = lab.pair(0, job="two", slot=21)
    with listen(two.netns_path, "", 9000), pytest.raises(TimeoutError):
        connect(one.netns_path, two.external_address, 9000, timeout=0.5)


def test_a_pod_cannot_speak_vxlan_to_a_node(lab: Lab) -> None:
    (pod,) = lab.pair(0)
    with (
        datagram_socket(lab.hosts[1], lab.address(1), 4789) as node,
        datagram_socket(lab.hosts[1], lab.address(1), 4790) as other,
        datagram_socket(pod.netns_path) as sender,
    ):
        sender.sendto(b"forged", (lab.address(1), 4789))
        sender.sendto(b"harmless", (lab.address(1), 4790))
        assert other.recv(100) == b"harmless"
        with pytest.raises(TimeoutError):
            node.recv(100)


def test_names_are_resolved_by_a_server_on_the_hosts_loopback(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    text, behind = resolver.pod_resolver("nameserver 127.0.0.53\n", "")
    monkeypatch.setattr(resolver, "host_resolver", lambda: (text, behind))
    (pod,) = lab.pair(0)
    server_of_pod = pod.resolv_conf().split()[-1]
    with (
        datagram_socket(lab.hosts[0], "127.0.0.53", 53) as server,
        datagram_socket(pod.netns_path) as client,
    ):
        client.sendto(b"who?", (server_of_pod, 53))
        question, origin = server.recvfrom(100)
        server.sendto(b"me", origin)
        assert (question, *client.recvfrom(100)) == (b"who?", b"me", (server_of_pod, 53))
        client.sendto(b"direct", ("127.0.0.53", 53))
        with pytest.raises(TimeoutError):
            server.recvfrom(100)


def test_a_pod_that_is_cut_off_by_names_reaches_nobody_until_it_is_plugged_in_again(lab: Lab) -> None:
    pods = lab.pair(0, 1)
    inner = connected(pods[1].netns_path, pods[0].netns_path, pods[1].job_address, 7000)
    outer = connected(lab.world, pods[0].netns_path, WORLD_ADDRESS, 7001)
    names = pods[0].host_devices
    assert lab.on(0, lambda: cut_by_names([*names, "nosuchdevice"])) == 2
    lab.on(0, pods[0].cut)  # again
    for server, client in (inner, outer):
        client.sendall(b"held")
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recv(100)
    assert lab.on(0, lambda: uncut_by_names(names)) == 2
    for server, client in (inner, outer):
        server.settimeout(10)
        assert server.recv(4) == b"held"
        server.close()
        client.close()


def test_connections_to_the_world_are_reset_and_those_between_pods_are_not(lab: Lab) -> None:
    pods = lab.pair(0, 1)
    inner = connected(pods[1].netns_path, pods[0].netns_path, pods[1].job_address, 7000)
    outer = connected(lab.world, pods[0].netns_path, WORLD_ADDRESS, 7001)
    assert [c.remote for c in pods[0].external_connections()] == [WORLD_ADDRESS]
    assert pods[0].reset_external() == 1
    with pytest.raises(ConnectionAbortedError):
        outer[1].recv(1)
    assert pods[0].external_connections() == []
    assert _says(inner[0], inner[1])
    for end in (*inner, *outer):
        end.close()


def test_sockets_that_matter_to_a_preflight_are_listed(lab: Lab) -> None:
    (pod,) = lab.pair(0)

    def inside() -> list[socket.socket]:
        return [
            socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP),
            socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0),
            socket.create_server(("", 6000)),
            socket.create_server(("::1", 6001), family=socket.AF_INET6),
        ]

    held = namespace.run_in(pod.netns_path, inside)
    report = pod.sockets()
    assert sorted(other.kind for other in report.other) == ["packet", "raw"]
    assert sorted((c.local, c.local_port) for c in report.listening) == [("0.0.0.0", 6000), ("::1", 6001)]
    inodes = {int(Path(f"/proc/self/fd/{one.fileno()}").readlink().name[8:-1]) for one in held}
    assert {other.inode for other in report.other} | {c.inode for c in report.listening} == inodes
    for one in held:
        one.close()


def test_creating_twice_leaves_a_running_pods_network_alone(lab: Lab) -> None:
    (pod,) = lab.pair(0)
    inode = pod.netns_path.stat().st_ino
    lab.create(pod)
    assert pod.netns_path.stat().st_ino == inode


def test_a_half_made_network_is_made_anew(lab: Lab) -> None:
    pod = lab.pod(0, [0, 1])
    lab.on(0, lambda: namespace.create(pod.netns_path))
    lab.create(pod)
    assert pod.drained()


def test_the_jobs_bridge_stays_until_its_last_pod_here_has_gone(lab: Lab) -> None:
    pods = lab.pair(0, 0, 1)
    server, client = connected(pods[2].netns_path, pods[1].netns_path, pods[2].job_address, 7000)
    lab.remove(pods[0])
    lab.remove(pods[0])  # again
    assert f"link {pods[1]._names.bridge}" in lab.left(0)
    with server, client:
        assert _says(client, server)
    lab.remove(pods[1])
    assert lab.left(0) == []
    with pytest.raises(NotFound):
        lab.on(0, pods[1].seal)


def test_remove_all_removes_what_a_killed_worker_left(lab: Lab) -> None:
    from moorage.worker.network import leftovers, remove_all

    lab.pair(0, 0, 1)
    found = lab.on(0, lambda: remove_all(lab.cluster, "node-0"))
    assert {entry.split()[0] for entry in found} == {"netns", "link", "table"}
    assert lab.left(0) == []
    assert lab.on(1, lambda: leftovers(lab.cluster, "node-1"))
