"""The seal on real TCP: nothing moves while it is on, nothing dies, everything moves afterwards."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from moorage.errors import EnvironmentLacking
from moorage.worker.network import PodNetwork, namespace, rules
from tests.support.network_lab import WORLD_ADDRESS, Lab, connect, connected, datagram_socket, listen

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(hosts=2) as made:
        yield made


@pytest.fixture
def pods(lab: Lab) -> Iterator[list[PodNetwork]]:
    """Two pods on two hosts, without the setting that only new kernels have."""
    made = [lab.pod(number, [0, 1], use_rto_max=False) for number in range(2)]
    lab.create(*made)
    yield made
    lab.remove(*made)
    assert lab.left(0) == lab.left(1) == []


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _seal(pods: list[PodNetwork]) -> None:
    for pod in pods:
        pod.seal()
        assert pod.sealed()


def _unseal(pods: list[PodNetwork]) -> None:
    for pod in pods:
        pod.unseal()
        assert not pod.sealed()


def _tcp(pods: list[PodNetwork], port: int) -> tuple[socket.socket, socket.socket]:
    return connected(pods[0].netns_path, pods[1].netns_path, pods[0].job_address, port)


def _in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def _read_exactly(end: socket.socket, size: int) -> None:
    while size:
        assert select.select([end], [], [], 30)[0], f"{size} bytes did not come"
        part = end.recv(min(size, 1 << 20))
        assert part, "the connection ended"
        size -= len(part)


def _fill(end: socket.socket) -> int:
    """Write until the peer's window is closed and our own queue is full; returns the bytes written."""
    end.setblocking(False)
    written = 0
    while select.select([], [end], [], 1.0)[1]:
        written += end.send(b"z" * 65536)
    end.setblocking(True)
    return written


def test_no_byte_moves_between_sealed_pods_and_all_move_afterwards(pods: list[PodNetwork]) -> None:
    server, client = _tcp(pods, 7000)
    _seal(pods)
    _seal(pods)  # again
    size = 3_000_000
    writer = _in_thread(lambda: client.sendall(b"q" * size))
    server.settimeout(1.0)
    with pytest.raises(TimeoutError):
        server.recv(1)
    _unseal(pods)
    _unseal(pods)  # again
    _read_exactly(server, size)
    writer.join()
    server.close()
    client.close()


def test_connections_live_through_a_long_seal_while_their_processes_write(pods: list[PodNetwork]) -> None:
    both, closed_window, idle = _tcp(pods, 7000), _tcp(pods, 7001), _tcp(pods, 7002)
    for end in idle:
        # Dead after three seconds without an answer.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    filled = _fill(closed_window[1])
    assert all(pod.wait_drained(_now() + 5) for pod in pods)
    _seal(pods)
    size = 500_000
    for end in both:
        end.settimeout(None)
    writers = [_in_thread(lambda end=end: end.sendall(b"w" * size)) for end in both]  # type: ignore[misc]
    time.sleep(20)  # the test's subject: so long a seal, several times what any of these would survive in silence
    _unseal(pods)
    _read_exactly(closed_window[0], filled)
    for end in both:
        _read_exactly(end, size)
    for writer in writers:
        writer.join()
    idle[1].sendall(b"alive")
    _read_exactly(idle[0], 5)
    for end in (*both, *closed_window, *idle):
        end.close()


def test_a_pod_made_sealed_is_sealed_before_its_first_packet(lab: Lab, pods: list[PodNetwork]) -> None:
    lab.remove(pods[1])
    lab.create(pods[1], sealed=True)
    with datagram_socket(pods[0].netns_path, pods[0].job_address, 7000) as receiver:
        with datagram_socket(pods[1].netns_path) as sender:
            sender.sendto(b"early", (pods[0].job_address, 7000))
            pods[1].unseal()
            sender.sendto(b"late", (pods[0].job_address, 7000))
        assert receiver.recv(100) == b"late"


def test_a_pod_without_a_socket_for_a_segment_answers_no_reset_while_it_is_sealed(
    lab: Lab, pods: list[PodNetwork]
) -> None:
    server, client = _tcp(pods, 7000)
    _seal(pods)
    lab.remove(pods[0])
    lab.create(pods[0], sealed=True)  # as at a restore: the network stands, the processes do not yet
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    client.settimeout(2.5)
    with pytest.raises(TimeoutError):
        client.recv(1)
    pods[0].unseal()
    client.settimeout(5)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    server.close()
    client.close()


def test_the_world_is_sealed_off_too(lab: Lab, pods: list[PodNetwork]) -> None:
    server, client = connected(lab.world, pods[0].netns_path, WORLD_ADDRESS, 7000)
    _seal(pods)
    server.sendall(b"in")
    client.sendall(b"out")
    for end in (server, client):
        end.settimeout(0.5)
        with pytest.raises(TimeoutError):
            end.recv(1)
    _unseal(pods)
    _read_exactly(client, 2)
    _read_exactly(server, 3)
    server.close()
    client.close()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_pod_is_drained_when_its_peers_have_acknowledged_all(lab: Lab, pods: list[PodNetwork], mapped: bool) -> None:
    with listen(pods[0].netns_path, pods[0].job_address, 7000) as listener:
        if mapped:

            def dual_stack() -> socket.socket:
                made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
                made.connect((f"::ffff:{pods[0].job_address}", 7000))
                return made

            client = namespace.run_in(pods[1].netns_path, dual_stack)
        else:
            client = connect(pods[1].netns_path, pods[0].job_address, 7000)
        server, _ = listener.accept()
    assert pods[1].wait_drained(_now() + 5)
    lab.on(0, pods[0].cut)
    client.sendall(b"on its way")
    assert not pods[1].drained()
    assert not pods[1].wait_drained(_now() + 0.05)
    lab.on(0, pods[0].uncut)
    assert pods[1].wait_drained(_now() + 10)
    server.close()
    client.close()


def test_a_peer_with_a_closed_window_does_not_keep_a_pod_from_being_drained(pods: list[PodNetwork]) -> None:
    server, client = _tcp(pods, 7000)
    _fill(client)
    assert pods[1].wait_drained(_now() + 5)
    queued = [c.send_queue for c in pods[1].sockets().connections]
    assert queued and queued[0] > 0
    server.close()
    client.close()


def test_the_seal_works_without_the_egress_hook_of_newer_kernels(
    lab: Lab, pods: list[PodNetwork], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rules.apply

    def old_kernel(commands: str) -> None:
        if "hook egress" in commands:
            raise EnvironmentLacking("no egress hook")
        real(commands)

    monkeypatch.setattr(rules, "apply", old_kernel)
    server, client = _tcp(pods, 7000)
    outer, inner = connected(lab.world, pods[1].netns_path, WORLD_ADDRESS, 7001)
    _seal(pods)
    client.sendall(b"one")
    inner.sendall(b"two")
    for end in (server, outer):
        end.settimeout(0.5)
        with pytest.raises(TimeoutError):
            end.recv(1)
    _unseal(pods)
    _read_exactly(server, 3)
    _read_exactly(outer, 3)
    for end in (server, client, outer, inner):
        end.close()
