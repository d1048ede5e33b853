"""An embedded cluster for one test, and the ways to hurt it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from moorage import Client
from moorage.barrier.etcdpb import POOL, rpc_pb2
from moorage.config import ClientConfig, load
from moorage.dev import cluster as dev
from moorage.dev import control, layout, roles
from moorage.dev.supervisor import Running
from moorage.store_settings import StoreSettings
from moorage.trust import TlsFiles
from tests.support import leftovers

_numbers = itertools.count(1)
_LOG_LINES = 40


class DevCluster:
    """``with DevCluster(nodes=3) as cluster: …``: etcd, a coordinator and workers, ready for use, gone afterwards.

    Roles are ``etcd``, ``coordinator`` and the nodes' names (``node-1``, …), which stand for their workers. When the
    test fails, the last lines of every log are printed.
    """

    def __init__(
        self,
        *,
        nodes: int = 2,
        lease_seconds: int = 10,
        use_rto_max: bool = True,
        slots: int = 0,
        environment: Mapping[str, str] | None = None,
        ready_seconds: float = 180.0,
        client_patience: float = 60.0,
        etcd: int = 1,
        coordinators: int = 1,
        store: str = "",
        store_settings: StoreSettings | None = None,
        gpus: Sequence[Sequence[str]] = (),
        on_network: Callable[[layout.Cluster], None] = lambda cluster: None,
    ) -> None:
        self.name = f"test-{os.getpid()}-{next(_numbers)}"
        # Not pytest's folder: it may lie on a file system that cannot carry an overlay's upper layer.
        # On a machine with a slow disk and much memory it may be a tmpfs.
        place = os.environ.get("MOORAGE_TEST_FOLDER", "/var/tmp")
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-test-", dir=place))
        self.failpoints = self.folder / "failpoints"
        self.failpoints.mkdir(mode=0o700)
        self._nodes = nodes
        self._more: dict[str, Any] = {
            "etcd": etcd,
            "coordinators": coordinators,
            "store": store,
            "store_settings": store_settings,
            "gpus": gpus,
            "on_network": on_network,
        }
        self._lease_seconds = lease_seconds
        self._use_rto_max = use_rto_max
        self._slots = slots
        self._ready_seconds = ready_seconds
        self._client_patience = client_patience
        self._environment = {"MOORAGE_FAILPOINTS_DIR": str(self.failpoints), **(environment or {})}
        self._clients = contextlib.ExitStack()

    def __enter__(self) -> Self:
        leftovers.made(self.name, self.folder)
        try:
            dev.up(
                nodes=self._nodes,
                name=self.name,
                state=self.folder / "state",
                lease_seconds=self._lease_seconds,
                use_rto_max=self._use_rto_max,
                slots=self._slots,
                default=False,
                ready_seconds=self._ready_seconds,
                environment=self._environment,
                **self._more,
            )
        except BaseException:
            self._print_logs(self.folder / "state-failed-logs")
            shutil.rmtree(self.folder)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._clients.close()
        finally:
            if error is not None:
                self._print_logs(self.folder / "state" / "log")
            dev.down(self.name)
            shutil.rmtree(self.folder)

    @staticmethod
    def _print_logs(folder: Path) -> None:
        for path in sorted(folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            print(f"--- {path.name}", *lines, sep="\n", file=sys.stderr)

    # -- what it is

    @property
    def record(self) -> layout.Cluster:
        """The cluster as its state file has it now."""
        return layout.read(self.folder / "state")

    def record_exists(self) -> bool:
        """Whether the cluster was not taken down yet."""
        return (self.folder / "state" / "cluster.json").exists()

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes that are there."""
        return [node.name for node in self.record.nodes]

    @property
    def config(self) -> ClientConfig:
        """How a client reaches it. For a command: `environment`."""
        return load(self.folder / "state" / "client.toml", ClientConfig)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the command `moorage` use this cluster."""
        return {"MOORAGE_CONFIG": str(self.folder / "state" / "client.toml")}

    def client(self) -> Client:
        """A client; closed when the cluster goes."""
        return self._clients.enter_context(Client(config=self.config, patience=self._client_patience))

    def impatient(self) -> Client:
        """A client that takes the first answer; the caller closes it."""
        return Client(config=self.config, patience=1.0)

    def etcd_leader(self) -> str:
        """The role of the etcd member that leads."""
        ca, cert, key = TlsFiles.in_folder(roles.etcd_admin(self.record)).read()
        for name, (port, _) in zip(roles.etcd_names(self.record), self.record.etcd_ports, strict=True):
            credentials = grpc.ssl_channel_credentials(ca, key, cert)
            with grpc.secure_channel(f"{self.record.gateway}:{port}", credentials) as channel:
                status = POOL.stub("etcdserverpb.Maintenance")(channel).Status(rpc_pb2.StatusRequest(), timeout=5)
            if status.leader == status.header.member_id:
                return name
        raise AssertionError("no etcd member leads")

    def node_folder(self, node: str) -> Path:
        """The state folder of a node's worker."""
        return self.record.node_folder(node)

    def log(self, role: str) -> str:
        """All that a process has logged so far, over its restarts."""
        return (self.folder / "state" / "log" / f"{role}.log").read_text(errors="replace")

    def status(self) -> dict[str, Running]:
        """What runs, by role."""
        return control.status(self.record)

    # -- ways to hurt it

    def arm(self, failpoint: str, action: str = "kill", *, role: str = "") -> None:
        """Let the next process that passes the failpoint act (see `moorage.failpoints`)."""
        new = self.failpoints / f".{failpoint}"
        new.write_text(f"{action}@{role}" if role else action)
        new.rename(self.failpoints / failpoint)

    def armed(self) -> list[str]:
        """Failpoints that nobody has passed yet."""
        return sorted(path.name for path in self.failpoints.iterdir() if not path.name.startswith("."))

    def disarm(self) -> None:
        """Take all failpoints back."""
        for path in self.failpoints.iterdir():
            path.unlink(missing_ok=True)

    def kill(self, role: str) -> None:
        """SIGKILL; the supervisor starts the process again."""
        control.send(self.record, role, signal.SIGKILL)

    def stop(self, role: str) -> None:
        """SIGKILL, and not started again before `start`."""
        control.stop(self.record, role, signal.SIGKILL)

    def start(self, role: str) -> None:
        """Start what was stopped."""
        control.start(self.record, role)

    def restart(self, role: str) -> None:
        """Stop as an operator would (SIGTERM), then start again."""
        control.stop(self.record, role, signal.SIGTERM)
        control.start(self.record, role)

    def pause(self, role: str) -> None:
        """SIGSTOP: the process is there but does nothing."""
        control.send(self.record, role, signal.SIGSTOP)

    def resume(self, role: str) -> None:
        """SIGCONT."""
        control.send(self.record, role, signal.SIGCONT)

    def cut(self, node: str, *, control_only: bool = False) -> None:
        """Pull the node's cable; with ``control_only`` only etcd and the coordinator are out of its reach."""
        dev.cut(self.name, node, control_only=control_only)

    def mend(self, node: str) -> None:
        """Undo `cut`."""
        dev.mend(self.name, node)

    @contextlib.contextmanager
    def isolated(self, node: str, *, control_only: bool = False) -> Iterator[None]:
        """Cut off within the block."""
        self.cut(node, control_only=control_only)
        try:
            yield
        finally:
            self.mend(node)

    def destroy(self, node: str) -> None:
        """Lose the node for good, with all that runs on it and all its files."""
        dev.destroy(self.name, node)

    def add(self) -> str:
        """Add a node; its name."""
        return dev.add(self.name, ready_seconds=self._ready_seconds).name
