"""Making a machine a node, and taking that back: certificates, settings, the systemd unit.

All that it needs is a join token (`jointoken`) and an address. The private key is made here and never leaves.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from cryptography.hazmat.primitives import serialization

from moorage import trust
from moorage.config import DEFAULT_STATE, ClientConfig, EtcdConfig, WorkerConfig, load, to_toml
from moorage.coordinator.client.connection import Connection
from moorage.errors import Conflict, DeadlineExceeded, EnvironmentLacking, Forbidden, MoorageError, NotFound, UsageError
from moorage.jointoken import JoinToken
from moorage.store_settings import StoreSettings
from moorage.tls import TlsFiles
from moorage.v1 import coordinator_pb2 as pb

DEFAULT_FOLDER = Path("/etc/moorage")
UNIT = Path("/etc/systemd/system/moorage-worker.service")
PORT = 7400
SETTINGS = "worker.toml"
PID_FILE = "worker.pid"
_STOP_SECONDS = 30.0


def node_name(host: str) -> str:
    """A node's name made of a host's. Pure."""
    name = re.sub(r"[^a-z0-9-]+", "-", host.partition(".")[0].lower()).strip("-")[:48].strip("-")
    return name or "node"


def own_address(peer: str) -> str:
    """This machine's address for packets to ``peer`` (``host:port``). Sends none. Raises `UsageError`."""
    host, _, port = peer.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"no way to the coordinator {peer}: {error}", "give this machine's address: --address"
        ) from error


def worker_command(settings: Path) -> list[str]:
    """The command line of the worker."""
    return [sys.executable, "-P", "-m", "moorage.cli.main", "worker", "--config", str(settings)]


def unit(cluster: str, settings: Path) -> str:
    """The text of the systemd unit. Pure.

    ``KillMode=process``: the pods and their guards outlive the worker. ``Delegate``: cgroups of pods stand beside the
    unit's own and are none of systemd's business.
    """
    command = " ".join(word.replace("%", "%%").replace(" ", "\\x20") for word in worker_command(settings))
    return f"""\
[Unit]
Description=moorage worker of cluster {cluster}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Restart=always
RestartSec=1
TimeoutStopSec=30
KillMode=process
Delegate=yes
UMask=0077
OOMScoreAdjust=-900
LimitNOFILE=1048576
LimitMEMLOCK=infinity
LimitCORE=0
TasksMax=infinity

[Install]
WantedBy=multi-user.target
"""


def systemd_runs() -> bool:
    """Whether systemd is this machine's service manager, as sd_booted(3) tells."""
    return Path("/run/systemd/system").is_dir()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to become of this machine."""

    node: str
    address: str
    port: int = PORT
    folder: Path = DEFAULT_FOLDER
    state: str = DEFAULT_STATE
    labels: dict[str, str] = {}
    uplink: str = ""
    unit: Path = UNIT

    @property
    def settings(self) -> Path:
        return self.folder / SETTINGS


def settings_of(plan: Plan, reply: pb.JoinReply) -> WorkerConfig:
    """The worker's settings. Pure."""
    tls = TlsFiles.in_folder(plan.folder / "tls")
    shared = msgspec.json.decode(reply.store_settings, type=StoreSettings) if reply.store_settings else StoreSettings()
    return WorkerConfig(
        cluster=reply.cluster,
        node=reply.node,
        address=plan.address,
        listen=f"{plan.address}:{plan.port}",
        store=reply.store,
        tls=tls,
        etcd=EtcdConfig(endpoints=list(reply.etcd_endpoints), tls=tls),
        state=plan.state,
        lease_seconds=reply.lease_seconds,
        labels=plan.labels,
        uplink=plan.uplink,
        store_settings=shared,
    )


async def _ask(token: JoinToken, request: pb.JoinRequest, patience: float) -> pb.JoinReply:
    with tempfile.TemporaryDirectory(prefix="moorage-join-") as folder:  # 0700, and gone at once
        trust.lay(Path(folder), token.ca, token.certificate, token.key)
        config = ClientConfig(coordinator=",".join(token.coordinators), tls=TlsFiles.in_folder(Path(folder)))
        connection = Connection(config, patience=patience)
        try:
            reply: pb.JoinReply = await connection.call("Join", request)
            return reply
        finally:
            await connection.close()


def join(token: JoinToken, plan: Plan, *, patience: float = 30.0) -> WorkerConfig:
    """Get certificates and settings and write them; starts nothing. Raises what the coordinator raises, `Conflict`."""
    if os.geteuid() != 0:
        raise EnvironmentLacking("a node is run by root", "run this with sudo")
    if plan.settings.exists():
        raise Conflict(f"{plan.settings} exists: this machine is a node already", "moorage node leave takes that back")
    if trust.expiry_of(token.certificate) < time.time():
        raise Forbidden("this join token has run out", "make another: moorage node token")
    key = trust.new_key()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    request = pb.JoinRequest(node=plan.node, address=plan.address, public_key=public)
    reply = asyncio.run(_ask(token, request, patience))
    config = settings_of(plan, reply)
    trust.lay(plan.folder / "tls", reply.ca, reply.certificate, trust.key_pem(key), reply.crl)
    trust.write_private(plan.settings, to_toml(config).encode())
    if plan.unit.parent.is_dir():
        trust.write_private(plan.unit, unit(config.cluster, plan.settings).encode())
        plan.unit.chmod(0o644)
    return config


def start(plan: Plan) -> str:
    """Start the worker: by systemd where that runs, else as a process of its own. Returns how, in words."""
    if systemd_runs() and plan.unit == UNIT:
        for command in (["daemon-reload"], ["enable", "--now", UNIT.name]):
            done = subprocess.run(["systemctl", *command], capture_output=True, text=True, check=False)
            if done.returncode:
                raise MoorageError(
                    f"systemctl {command[0]} failed: {done.stderr.strip()}", f"journalctl -u {UNIT.name}"
                )
        return f"systemd runs it as {UNIT.name}"
    log = Path(plan.state) / "worker.log"
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            worker_command(plan.settings),
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    trust.write_private(plan.folder / PID_FILE, str(process.pid).encode())
    return f"it runs as process {process.pid}; nothing starts it again after a reboot, for there is no systemd here"


def leave(folder: Path = DEFAULT_FOLDER, *, unit_path: Path = UNIT, patience: float = 10.0) -> list[str]:
    """Stop the worker, have its certificates revoked and remove what `join` wrote. Returns what could not be done.

    Raises `NotFound` if this machine is no node, `Conflict` while a pod lives on it.
    """
    settings = folder / SETTINGS
    try:
        config = load(settings, WorkerConfig)
    except NotFound as error:
        raise NotFound(f"{settings} does not exist: this machine is no node", "") from error
    if pods := sorted(Path(config.state).glob("pods/*/*/*")):
        jobs = ", ".join(sorted({pod.parent.parent.name for pod in pods}))
        raise Conflict(f"pods of jobs are on this node: {jobs}", f"moorage drain {config.node} moves them away")
    _stop(folder, unit_path)
    told = []
    try:
        asyncio.run(_tell(config, patience))
    except MoorageError as error:
        told.append(f"its certificate was not revoked: {error.message}; moorage node remove {config.node} does it")
    if unit_path.exists():
        unit_path.unlink()
    shutil.rmtree(folder / "tls", ignore_errors=True)
    for name in (SETTINGS, PID_FILE):
        (folder / name).unlink(missing_ok=True)
    return told


async def _tell(config: WorkerConfig, patience: float) -> None:
    from moorage.barrier.client import EtcdClient
    from moorage.records import Keys

    async with EtcdClient(config.etcd.endpoints, tls=config.etcd.tls, user=config.etcd.user) as etcd:
        leaders = await etcd.list(Keys(config.cluster).leader)
    standing = min(leaders.items, key=lambda kv: kv.create_revision, default=None)
    if standing is None:
        raise NotFound("no coordinator leads")
    connection = Connection(ClientConfig(coordinator=standing.value.decode(), tls=config.tls), patience=patience)
    try:
        await connection.call("RemoveNode", pb.NodeRef(node=config.node))
    finally:
        await connection.close()


def _stop(folder: Path, unit_path: Path) -> None:
    if systemd_runs() and unit_path == UNIT and UNIT.exists():
        subprocess.run(["systemctl", "disable", "--now", UNIT.name], capture_output=True, check=False)
        return
    try:
        pid = int((folder / PID_FILE).read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return
    if os.fsencode(folder / SETTINGS) not in words:
        return  # the number is another process's by now
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        _wait(descriptor, pid)
    finally:
        os.close(descriptor)


def _wait(descriptor: int, pid: int) -> None:
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(_STOP_SECONDS * 1000):
        raise DeadlineExceeded(f"the worker (process {pid}) does not end", "see its log")


def wait_registered(node: str, cluster: str, seconds: float) -> dict[str, Any]:
    """Wait until the worker says over its local socket that it is registered. Raises `DeadlineExceeded`."""
    from moorage.localsocket import ask, path_of

    end = time.monotonic() + seconds
    while True:
        try:
            told = next(iter(ask(path_of(cluster, node), {"do": "node"})))
            if told.get("registered"):
                return told
        except (MoorageError, StopIteration):
            pass  # it is being started
        if time.monotonic() > end:
            raise DeadlineExceeded(f"the worker of {node} has not registered after {seconds:.0f} s", "see its log")
        time.sleep(0.1)
