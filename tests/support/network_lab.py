"""Three hosts on one wire: network namespaces joined by a bridge in an outer namespace that stands for the world.

Sockets are made inside a namespace and used from anywhere, so a test plays every rank itself.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from moorage.runtime import programs
from moorage.worker.network import MemberAddress, PodNetwork, PublishedPort, namespace, remove_all
from moorage.worker.network import leftovers as left_on_host
from tests.support import leftovers

T = TypeVar("T")
_numbers = itertools.count(1)
WORLD_ADDRESS = "10.88.0.254"


class Lab:
    """Use as a context manager. Those of several test processes do not meet.

    Hosts are numbered; host *i* has the address 10.88.0.(i+1).
    """

    def __init__(self, hosts: int = 3) -> None:
        self.cluster = tag = f"lab-{os.getpid()}-{next(_numbers)}"
        self.world = namespace.FOLDER / f"{tag}-world"
        self.hosts = [namespace.FOLDER / f"{tag}-{number}" for number in range(hosts)]
        self._made: list[tuple[int, PodNetwork]] = []

    def __enter__(self) -> Lab:
        leftovers.made(self.cluster)
        try:
            for path in (self.world, *self.hosts):
                namespace.create(path)
                self._ip(path, "link set lo up")
            self._ip(self.world, "link add name wire type bridge")
            self._ip(self.world, f"addr add {WORLD_ADDRESS}/24 dev wire")
            self._ip(self.world, "link set wire up")
            for number, path in enumerate(self.hosts):
                self._ip(self.world, f"link add name port{number} type veth peer name eth0 netns {path.name}")
                self._ip(self.world, f"link set port{number} master wire up")
                self._ip(path, f"addr add {self.address(number)}/24 dev eth0")
                self._ip(path, "link set eth0 up")
                self._ip(path, f"route add default via {WORLD_ADDRESS}")
        except BaseException:
            self._tear_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._tear_down()

    def _ip(self, path: Path, command: str) -> None:
        subprocess.run([programs.find("ip"), "-n", path.name, *command.split()], check=True, capture_output=True)

    def _tear_down(self) -> None:
        for path in self.hosts:
            if path.exists():
                with suppress(OSError):
                    namespace.run_in(path, lambda: remove_all(self.cluster))
        for path in (*self.hosts, self.world):
            namespace.delete(path)

    def address(self, host: int) -> str:
        """Of the host's uplink."""
        return f"10.88.0.{host + 1}"

    def on(self, host: int, work: Callable[[], T]) -> T:
        """Call ``work`` on the host."""
        return namespace.run_in(self.hosts[host], work)

    def pod(
        self,
        pod: int,
        placement: Sequence[int],
        *,
        job: str = "job",
        incarnation: int = 1,
        vni: int = 100,
        slot: int = 0,
        publish: Sequence[PublishedPort] = (),
        **options: Any,
    ) -> PodNetwork:
        """The network of pod number ``pod`` of a job whose pods run on the hosts ``placement``. Not created yet."""
        host = placement[pod]
        network = PodNetwork(
            cluster=self.cluster,
            node=f"node-{host}",
            job=job,
            pod=pod,
            incarnation=incarnation,
            vni=vni,
            slot=slot,
            node_address=self.address(host),
            members=[MemberAddress(number, self.address(where)) for number, where in enumerate(placement)],
            publish=publish,
            **options,
        )
        self._made.append((host, network))
        return network

    def create(self, *networks: PodNetwork, sealed: bool = False) -> None:
        """Create each on its host."""
        for network in networks:
            self.on(self.host_of(network), lambda network=network: network.create(sealed=sealed))  # type: ignore[misc]

    def host_of(self, network: PodNetwork) -> int:
        """Number of the host that `pod` put it on."""
        return next(host for host, made in self._made if made is network)

    def remove(self, *networks: PodNetwork) -> None:
        """Remove each from its host."""
        for network in networks:
            self.on(self.host_of(network), network.remove)

    def pair(self, *placement: int, **options: Any) -> list[PodNetwork]:
        """All pods of a job, created."""
        pods = [self.pod(number, placement, **options) for number in range(len(placement))]
        self.create(*pods)
        return pods

    def left(self, host: int) -> list[str]:
        """What is left of moorage on the host."""
        return self.on(host, lambda: left_on_host(self.cluster, f"node-{host}"))


def listen(path: Path, address: str, port: int) -> socket.socket:
    """A TCP listener in the namespace."""
    return namespace.run_in(path, lambda: socket.create_server((address, port)))


def connect(path: Path, address: str, port: int, timeout: float = 5.0) -> socket.socket:
    """A TCP connection from the namespace."""
    return namespace.run_in(path, lambda: socket.create_connection((address, port), timeout))


def connected(
    server: Path, client: Path, address: str, port: int, *, ask: str = ""
) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection from ``client`` to ``address`` (or ``ask``): (server's, client's)."""
    with listen(server, address, port) as listener:
        listener.settimeout(5)
        ours = connect(client, ask or address, port)
        theirs, _ = listener.accept()
    theirs.settimeout(5)
    return theirs, ours


def datagram_socket(path: Path, address: str = "", port: int = 0) -> socket.socket:
    """A UDP socket in the namespace, bound if an address is given."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.settimeout(0.3)
        if address:
            made.bind((address, port))
        return made

    return namespace.run_in(path, make)
