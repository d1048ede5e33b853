"""Where everything of an embedded cluster lies, and its state file.

A cluster has one folder (0700), with all that it owns::

    cluster.json         this module's `Cluster`: what exists, so that every command finds it again
    processes.json       pid and start time of what the supervisor runs
    client.toml  tls/    for clients; authority/ issues all certificates
    etcd/  coordinator/  store/  log/
    nodes/NODE/          the state folder of that node's worker; gone when the node is destroyed

and a link ``/run/moorage/dev/NAME`` to it, by which it is found under its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from moorage.errors import CorruptData, NewerVersion, NotFound, UsageError
from moorage.store_settings import StoreSettings

VERSION = 1
RUN_FOLDER = Path("/run/moorage/dev")
DEFAULT_FOLDER = Path("/var/lib/moorage/dev")
DEFAULT_NAME = "dev"
WORKER_PORT = 7400
WORKER_METRICS_PORT = 7401
FIRST_NODE_ADDRESS = 11  # .1 is the bridge


class Node(msgspec.Struct, kw_only=True):
    """One namespace that stands for a host. ``number`` counts from 1 and is never used again."""

    name: str
    number: int
    address: str
    gpus: list[str] = []  # as in `WorkerConfig`

    def worker_endpoint(self) -> str:
        return f"{self.address}:{WORKER_PORT}"


class Cluster(msgspec.Struct, kw_only=True):
    """What exists of a cluster. Written before the things are made, so that `down` finds what is half made."""

    version: int = VERSION
    name: str
    state: str
    subnet: str  # the 10.x.y.0/24 of the bridge
    etcd_port: int
    etcd_peer_port: int
    coordinator_port: int
    lease_seconds: int
    use_rto_max: bool = True
    slots: int = 0  # of each node
    metrics_port: int = 0  # of the coordinator
    store: str = ""  # empty: a folder of the cluster's own
    store_settings: StoreSettings = StoreSettings()
    more_etcd: list[tuple[int, int]] = []  # client's and peers' port of every member but the first
    more_coordinators: list[int] = []  # ports of all but the first
    nodes: list[Node] = []
    next_number: int = 1
    default: bool = True  # `moorage` without further settings may use it

    @property
    def id(self) -> str:
        """Six characters that stand for the cluster in names of links and tables, which are short."""
        return cluster_id(self.name)

    @property
    def how_down(self) -> str:
        """The command that takes it down."""
        return down_command(self.name)

    @property
    def bridge(self) -> str:
        return f"mdev{self.id}"

    @property
    def table(self) -> str:
        """The nftables table (family ip) with the way out to the world."""
        return f"moorage_dev_{self.id}"

    @property
    def gateway(self) -> str:
        """The machine's own address on the bridge: etcd and the coordinator listen there."""
        return str(ipaddress.ip_network(self.subnet)[1])

    @property
    def etcd_ports(self) -> list[tuple[int, int]]:
        """The client's and the peers' port of each member."""
        return [(self.etcd_port, self.etcd_peer_port), *self.more_etcd]

    @property
    def coordinator_ports(self) -> list[int]:
        return [self.coordinator_port, *self.more_coordinators]

    @property
    def folder(self) -> Path:
        return Path(self.state)

    @property
    def control(self) -> Path:
        """The supervisor's socket; not in the cluster's folder, whose path may be too long for one."""
        return RUN_FOLDER / f"{self.name}.sock"

    def link(self, node: Node) -> str:
        """The machine's end of the node's cable (at most 15 characters)."""
        return f"mdev{self.id}n{node.number}"

    def namespace(self, node: Node) -> str:
        """The name of the node's network namespace under /run/netns."""
        return f"mdev{self.id}-{node.name}"

    def node_folder(self, node: str) -> Path:
        return self.folder / "nodes" / node

    def node(self, name: str) -> Node:
        """The node called ``name``. Raises `NotFound`."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes) or "none"
        raise NotFound(f"cluster {self.name} has no node {name}", f"its nodes: {known}")

    def new_node(self) -> Node:
        """Add the next node to the record (nothing else is made)."""
        number = self.next_number
        network = ipaddress.ip_network(self.subnet)
        if FIRST_NODE_ADDRESS + number >= network.num_addresses:
            raise UsageError(f"cluster {self.name} has used up its addresses", "start a new one")
        node = Node(name=f"node-{number}", number=number, address=str(network[FIRST_NODE_ADDRESS + number - 1]))
        self.next_number += 1
        self.nodes.append(node)
        return node

    def write(self) -> None:
        """Replace the state file."""
        write_atomically(self.folder / "cluster.json", msgspec.json.format(msgspec.json.encode(self)))


def cluster_id(name: str) -> str:
    """Short name of the cluster ``name`` for links and tables."""
    return hashlib.blake2b(name.encode(), digest_size=3).hexdigest()


def down_command(name: str) -> str:
    """The command that takes the cluster ``name`` down."""
    return "moorage dev down" if name == DEFAULT_NAME else f"moorage dev down --name {name}"


def check_name(name: str) -> str:
    """``name`` if a cluster may be called so. Raises `UsageError`."""
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?", name):
        return name
    raise UsageError(f"{name!r} is no name for a cluster", "use up to 32 lower-case letters, digits and inner dashes")


def free_subnet(taken: Iterable[str]) -> str:
    """The first 10.x.y.0/24 that overlaps none of ``taken`` (networks or addresses of this machine, any notation).

    Raises `UsageError` if there is none.
    """
    used = [ipaddress.ip_network(network, strict=False) for network in taken]
    used = [network for network in used if network.version == 4 and network.prefixlen > 0]
    # High numbers first: hand-made networks mostly begin at 10.0.0.0.
    for second in range(231, 200, -1):
        for third in range(256):
            candidate = ipaddress.ip_network(f"10.{second}.{third}.0/24")
            if not any(candidate.overlaps(network) for network in used):
                return str(candidate)
    raise UsageError("no network 10.x.y.0/24 is free on this machine", "take unused clusters down: moorage dev down")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file (0600) so that a reader sees the old content or the new, also after a crash."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)


def read(folder: Path) -> Cluster:
    """The cluster in ``folder``. Raises `NotFound`, `CorruptData`, `NewerVersion`."""
    path = folder / "cluster.json"
    try:
        cluster = msgspec.json.decode(path.read_bytes(), type=Cluster)
    except FileNotFoundError as error:
        raise NotFound(f"there is no dev cluster in {folder}", "start one: moorage dev up") from error
    except msgspec.DecodeError as error:
        raise CorruptData(f"{path} is damaged: {error}", f"remove {folder} by hand") from error
    if cluster.version > VERSION:
        raise NewerVersion(f"{path} was written by a newer moorage", "use that one to take the cluster down")
    return cluster


def folder_of(name: str) -> Path:
    """The folder of the cluster called ``name``, as its link says; else where it would be by default."""
    try:
        return (RUN_FOLDER / name).readlink()
    except OSError:
        return DEFAULT_FOLDER / name


def find(name: str) -> Cluster:
    """The cluster called ``name``. Raises `NotFound`."""
    try:
        return read(folder_of(check_name(name)))
    except NotFound as error:
        others = ", ".join(names())
        hint = f"there are: {others}; say which with --name" if others else "start one: moorage dev up"
        raise NotFound(f"there is no dev cluster called {name}", hint) from error


def names() -> list[str]:
    """The clusters of this machine, by name."""
    links = [path.name for path in _entries(RUN_FOLDER) if path.is_symlink() and path.name != "client.toml"]
    folders = [path.name for path in _entries(DEFAULT_FOLDER) if (path / "cluster.json").exists()]
    found = {*links, *folders}
    return sorted(found)


def _entries(folder: Path) -> list[Path]:
    # Not glob: it fails when another cluster's folder is removed while it looks.
    return list(folder.iterdir()) if folder.exists() else []


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold a lock of this machine (``name``: a cluster's, or `MACHINE`); waits for it. Freed when the process dies.

    The lock of a cluster leaves no file when the cluster is not there in the end.
    """
    path = _lock_path(name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The one before may have removed the file: then somebody else may hold a lock on a new one.
            if os.fstat(descriptor).st_nlink:
                try:
                    yield
                finally:
                    if name != MACHINE and name not in names():
                        path.unlink(missing_ok=True)  # as the last thing under it: another may take it from here on
                return
        finally:
            os.close(descriptor)


def _lock_path(name: str) -> Path:
    return RUN_FOLDER / "locks" / name


#: The lock under which networks, ports and the machine's settings are chosen. No cluster can have this name.
MACHINE = "MACHINE"
