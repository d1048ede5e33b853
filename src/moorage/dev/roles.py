"""What the supervisor of an embedded cluster runs: certificates, configuration and command line of each process."""

from __future__ import annotations

import importlib.util
import os
import pwd
import sys
from pathlib import Path

import msgspec

from moorage import trust
from moorage.barrier import access
from moorage.barrier.client import EtcdClient
from moorage.config import ClientConfig, CoordinatorConfig, EtcdConfig, WorkerConfig, to_toml
from moorage.dev.layout import WORKER_METRICS_PORT, Cluster, Node, write_atomically
from moorage.dev.network import namespace_path
from moorage.records import Keys
from moorage.runtime import programs
from moorage.tls import CRL_FILE

ETCD = "etcd"
COORDINATOR = "coordinator"
#: Seconds. There is one coordinator, whose successor ends its lease: a short one would only be lost on a busy machine.
LEADER_LEASE = 10


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its command line and what is added to the environment.

    ``name`` is etcd, coordinator (etcd-2, coordinator-2 and so on where there are several) or a node's.
    """

    name: str
    argv: list[str]
    environment: dict[str, str] = {}


def user() -> str:
    """The principal of whoever starts the cluster."""
    return f"user:{pwd.getpwuid(os.getuid()).pw_name}"


def authority(cluster: Cluster) -> Path:
    """The folder of the cluster's authority."""
    return cluster.folder / "authority"


def etcd_admin(cluster: Cluster) -> Path:
    """The certificate of etcd's own administrator, who lets users in."""
    return authority(cluster) / "etcd-root"


async def secure_etcd(cluster: Cluster) -> None:
    """Let the cluster's processes into etcd, and nobody else. Idempotent; waits until etcd answers."""
    config = _etcd(cluster, trust.TlsFiles.in_folder(etcd_admin(cluster)))
    async with EtcdClient(config.endpoints, tls=config.tls, timeout=30.0) as etcd:
        await access.secure(etcd, Keys(cluster.name), [node.name for node in cluster.nodes])


def _tls(cluster: Cluster, folder: Path, principal: str, *addresses: str, role: str | None = None) -> trust.TlsFiles:
    files = trust.TlsFiles.in_folder(folder)
    if not all(Path(path).exists() for path in (files.ca, files.cert, files.key)):
        trust.issue(authority(cluster), folder, principal, role=role, addresses=addresses)
    return files


def _etcd(cluster: Cluster, tls: trust.TlsFiles) -> EtcdConfig:
    return EtcdConfig(endpoints=[f"{cluster.gateway}:{client}" for client, _ in cluster.etcd_ports], tls=tls)


def _numbered(name: str, count: int) -> list[str]:
    return [name if number == 1 else f"{name}-{number}" for number in range(1, count + 1)]


def etcd_names(cluster: Cluster) -> list[str]:
    """The etcd members' roles."""
    return _numbered(ETCD, len(cluster.etcd_ports))


def coordinator_names(cluster: Cluster) -> list[str]:
    """The coordinators' roles."""
    return _numbered(COORDINATOR, len(cluster.coordinator_ports))


def store(cluster: Cluster) -> str:
    """Location of the cluster's store, shared by all its nodes."""
    return cluster.store or f"file://{cluster.folder / 'store'}"


def write_files(cluster: Cluster) -> None:
    """Write authority, certificates and configuration of etcd, the coordinator and the clients. Idempotent."""
    coordinators = coordinator_names(cluster)
    for name in ("authority", "etcd", *coordinators, "log", "nodes", "tls"):
        (cluster.folder / name).mkdir(mode=0o700, exist_ok=True)
    if not (authority(cluster) / "ca.pem").exists():
        trust.create_authority(authority(cluster), f"moorage dev {cluster.name}")
    _tls(cluster, etcd_admin(cluster), access.ADMIN, cluster.gateway)
    _tls(cluster, cluster.folder / "etcd" / "tls", "etcd", cluster.gateway, "127.0.0.1")
    tls = _tls(cluster, cluster.folder / "coordinator" / "tls", "coordinator", cluster.gateway)
    endpoints = [f"{cluster.gateway}:{port}" for port in cluster.coordinator_ports]
    for name, endpoint in zip(coordinators, endpoints, strict=True):
        coordinator = CoordinatorConfig(
            cluster=cluster.name,
            listen=endpoint,
            advertise=endpoint,
            store=store(cluster),
            tls=tls,
            etcd=_etcd(cluster, tls),
            state=str(cluster.folder / name),
            authority=str(authority(cluster)),
            metrics=f"{cluster.gateway}:{cluster.metrics_port}" if cluster.metrics_port and name == COORDINATOR else "",
            lease_seconds=max(cluster.lease_seconds, LEADER_LEASE),
            store_settings=cluster.store_settings,
        )
        write_atomically(cluster.folder / name / "config.toml", to_toml(coordinator).encode())
    own = _tls(cluster, cluster.folder / "tls" / "client", user(), role="administer")
    client = ClientConfig(coordinator=",".join(endpoints), tls=own, name=user())
    write_atomically(cluster.folder / "client.toml", to_toml(client).encode())


def write_node_files(cluster: Cluster, node: Node) -> None:
    """Write a node's certificate and configuration into its state folder. Idempotent."""
    folder = cluster.node_folder(node.name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tls = _tls(cluster, folder / "tls", f"worker:{node.name}", node.address)
    worker = WorkerConfig(
        cluster=cluster.name,
        node=node.name,
        address=node.address,
        listen=node.worker_endpoint(),
        state=str(folder),
        store=store(cluster),
        tls=tls,
        etcd=_etcd(cluster, tls),
        lease_seconds=cluster.lease_seconds,
        labels={"dev": cluster.name, "node": node.name},
        use_rto_max=cluster.use_rto_max,
        slots=cluster.slots,
        gpus=node.gpus,
        metrics=f"{node.address}:{WORKER_METRICS_PORT}",
        uplink="eth0",
        runtime=str(programs.prefixes()[0]),
        store_settings=cluster.store_settings,
    )
    write_atomically(folder / "config.toml", to_toml(worker).encode())


def _daemon(kind: str, config: Path) -> list[str]:
    # -P: with the project's root as working directory, `worker` and others must not be importable under bare names.
    if importlib.util.find_spec(f"moorage.{kind}.__main__"):
        return [sys.executable, "-P", "-m", f"moorage.{kind}", "--config", str(config)]
    return [sys.executable, "-P", "-m", "moorage.cli.main", kind, "--config", str(config)]


def etcd_argv(cluster: Cluster, name: str) -> list[str]:
    """The command line of one etcd member."""
    folder = cluster.folder / "etcd"
    names = etcd_names(cluster)
    number = names.index(name)
    members = [cluster.name, *(f"{cluster.name}-{n}" for n in range(2, len(names) + 1))]
    peers = [f"https://127.0.0.1:{peer}" for _, peer in cluster.etcd_ports]
    client, peer = f"https://{cluster.gateway}:{cluster.etcd_ports[number][0]}", peers[number]
    everybody = ",".join(f"{member}={url}" for member, url in zip(members, peers, strict=True))
    tls = trust.TlsFiles.in_folder(folder / "tls")
    return [
        str(programs.find("etcd")),
        f"--name={members[number]}",
        f"--data-dir={etcd_data(cluster, name)}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={everybody}",
        "--client-cert-auth=true",
        f"--trusted-ca-file={tls.ca}",
        f"--cert-file={tls.cert}",
        f"--key-file={tls.key}",
        f"--client-crl-file={authority(cluster) / CRL_FILE}",
        "--peer-client-cert-auth=true",
        f"--peer-trusted-ca-file={tls.ca}",
        f"--peer-cert-file={tls.cert}",
        f"--peer-key-file={tls.key}",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=1h",
        "--logger=zap",
        "--log-level=warn",
    ]


def role(cluster: Cluster, name: str) -> Role:
    """The process called ``name``. Raises `NotFound` for a node that does not exist."""
    if name in etcd_names(cluster):
        return Role(name=name, argv=etcd_argv(cluster, name))
    environment = {"MOORAGE_FAILPOINT_ROLE": name, "PYTHONUNBUFFERED": "1"}
    if name in coordinator_names(cluster):
        argv = _daemon("coordinator", cluster.folder / name / "config.toml")
        return Role(name=name, argv=argv, environment=environment)
    node = cluster.node(name)
    # nsenter, not `ip netns exec`: the latter makes a mount namespace as well, which would hide the pods' mounts.
    enter = ["nsenter", f"--net={namespace_path(cluster, node)}", "--"]
    argv = enter + _daemon("worker", cluster.node_folder(name) / "config.toml")
    return Role(name=name, argv=argv, environment=environment)


def role_names(cluster: Cluster) -> list[str]:
    """All processes, in the order in which they are started."""
    return [*etcd_names(cluster), *coordinator_names(cluster), *(node.name for node in cluster.nodes)]


def etcd_data(cluster: Cluster, name: str) -> Path:
    """Where an etcd member keeps its data."""
    return cluster.folder / "etcd" / name.replace(ETCD, "data")
