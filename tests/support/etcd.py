"""A real etcd for tests: one member or three, with TLS and users if wanted, on free ports, in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from moorage.barrier.client import EtcdClient
from moorage.barrier.etcdpb import POOL, auth_pb2, rpc_pb2
from moorage.dev.network import free_ports
from moorage.runtime import programs
from moorage.trust import TlsFiles, create_authority, issue

ROOT_PASSWORD = "root-secret"
START_SECONDS = 90.0


class Etcd:
    """``with Etcd() as etcd: …``. Not durable (no fsync) unless told so: a test kills processes, not machines.

    ``endpoints``: one for each member, in order. ``tls``: what a client presents, if ``tls=True``. ``user`` and
    ``password``: with ``auth=True``, of a user that may read and write below ``/moorage/`` only.
    """

    def __init__(
        self,
        *,
        members: int = 1,
        tls: bool = False,
        auth: bool = False,
        durable: bool = False,
        arguments: Sequence[str] = (),
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moorage-etcd-"))
        self.members = members
        self.user, self.password = ("moorage", "moorage-secret") if auth else ("", "")
        self._durable = durable
        self._secured = False
        self._arguments = list(arguments)
        ports = free_ports(2 * members)
        self._client_ports, self._peer_ports = ports[:members], ports[members:]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.scheme = "https" if tls else "http"
        self.endpoints = [f"{self.scheme}://127.0.0.1:{port}" for port in self._client_ports]
        self.tls: TlsFiles | None = None
        self._server_tls: TlsFiles | None = None
        if tls:
            create_authority(self.folder / "ca", "test authority")
            self.tls = issue(self.folder / "ca", self.folder / "client", "client")
            self._server_tls = issue(
                self.folder / "ca", self.folder / "server", "etcd", addresses=("127.0.0.1", "localhost")
            )

    def __enter__(self) -> Self:
        try:
            for index in range(self.members):
                self._spawn(index)
            self.wait_ready()
            if self.user:
                self._enable_auth()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def client(self, *, timeout: float = 5.0, endpoints: Sequence[str] | None = None) -> EtcdClient:
        """A client with all that it takes to get in."""
        return EtcdClient(
            endpoints or self.endpoints, tls=self.tls, user=self.user, password=self.password, timeout=timeout
        )

    # -- members

    def _command(self, index: int) -> list[str]:
        cluster = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peer_ports))
        peer = f"http://127.0.0.1:{self._peer_ports[index]}"
        command = [
            str(programs.find("etcd")),
            f"--name=m{index}",
            f"--data-dir={self.folder / f'm{index}'}",
            f"--listen-client-urls={self.endpoints[index]}",
            f"--advertise-client-urls={self.endpoints[index]}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            "--log-level=warn",
            *self._arguments,
        ]
        if self.members == 1:  # it elects itself: no need to wait for others
            command += ["--heartbeat-interval=20", "--election-timeout=200"]
        if not self._durable:
            command.append("--unsafe-no-fsync")
        if self._server_tls:
            command += [
                f"--cert-file={self._server_tls.cert}",
                f"--key-file={self._server_tls.key}",
                f"--trusted-ca-file={self._server_tls.ca}",
                "--client-cert-auth",
            ]
        # A test run that is killed takes its etcd with it.
        setpriv = shutil.which("setpriv")
        return [setpriv, "--pdeathsig", "KILL", *command] if setpriv else command

    def _spawn(self, index: int) -> None:
        with (self.folder / f"m{index}.log").open("ab") as output:
            self._processes[index] = subprocess.Popen(
                self._command(index), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def start_member(self, index: int = 0) -> None:
        """Start a member that was killed, with its data, and wait until it answers."""
        assert index not in self._processes
        self._spawn(index)
        self.wait_ready([index])

    def kill_member(self, index: int = 0) -> None:
        """SIGKILL."""
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def restart_member(self, index: int = 0) -> None:
        """SIGKILL, then start with the same data."""
        self.kill_member(index)
        self.start_member(index)

    def wipe_member(self, index: int = 0) -> None:
        """Delete the data of a member that was killed."""
        assert index not in self._processes
        shutil.rmtree(self.folder / f"m{index}")

    @contextlib.contextmanager
    def paused(self, index: int = 0) -> Iterator[None]:
        """SIGSTOP a member for the block: its connections stay up and nothing answers."""
        os.kill(self._processes[index].pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._processes[index].pid, signal.SIGCONT)

    def leader(self) -> int:
        """Index of the member that leads."""
        statuses = {index: self._status(index) for index in self._processes}
        leading = [index for index, s in statuses.items() if s.leader and s.leader == s.header.member_id]
        assert leading, f"no leader: {statuses}"
        return leading[0]

    def compact(self, revision: int) -> None:
        """Drop all history before ``revision``."""
        token = self.root_token() if self._secured else ""
        self.call("KV.Compact", rpc_pb2.CompactionRequest(revision=revision, physical=True), token=token)

    def stop(self) -> None:
        """Kill all members and delete the folder."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- plain synchronous calls, beside the client under test

    def call(self, method: str, request: Any, *, index: int = 0, timeout: float = 5.0, token: str = "") -> Any:
        """One call to one member, waiting until it listens."""
        target = self.endpoints[index].partition("://")[2]
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        if self.tls:
            ca, cert, key = self.tls.read()
            channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(ca, key, cert), options)
        else:
            channel = grpc.insecure_channel(target, options)
        service, _, name = method.partition(".")
        metadata = (("token", token),) if token else ()
        with channel:
            stub = POOL.stub(f"etcdserverpb.{service}")(channel)
            return getattr(stub, name)(request, timeout=timeout, wait_for_ready=True, metadata=metadata)

    def _status(self, index: int, timeout: float = 5.0) -> Any:
        token = self.root_token(index) if self._secured else ""
        return self.call("Maintenance.Status", rpc_pb2.StatusRequest(), index=index, timeout=timeout, token=token)

    def wait_ready(self, indexes: Sequence[int] | None = None) -> None:
        """Wait until the members answer and know a leader."""
        deadline = time.monotonic() + START_SECONDS
        for index in indexes if indexes is not None else range(self.members):
            while True:
                code = self._processes[index].poll()
                try:
                    if code is None and self._status(index, timeout=2).leader:
                        break
                except grpc.RpcError as error:
                    why = f"{error}"
                else:
                    why = f"exit code {code}" if code is not None else "no leader"
                if code is not None or time.monotonic() > deadline:
                    log = (self.folder / f"m{index}.log").read_text(errors="replace")
                    raise RuntimeError(f"etcd member {index} does not start: {why}\n{log[-4000:]}")

    def root_token(self, index: int = 0) -> str:
        """A token of the user root."""
        request = rpc_pb2.AuthenticateRequest(name="root", password=ROOT_PASSWORD)
        return str(self.call("Auth.Authenticate", request, index=index).token)

    def _enable_auth(self) -> None:
        permission = auth_pb2.Permission(
            permType=auth_pb2.Permission.READWRITE, key=b"/moorage/", range_end=b"/moorage0"
        )
        for name, password, role in (("root", ROOT_PASSWORD, "root"), (self.user, self.password, "moorage")):
            self.call("Auth.UserAdd", rpc_pb2.AuthUserAddRequest(name=name, password=password))
            self.call("Auth.RoleAdd", rpc_pb2.AuthRoleAddRequest(name=role))
            self.call("Auth.UserGrantRole", rpc_pb2.AuthUserGrantRoleRequest(user=name, role=role))
        self.call("Auth.RoleGrantPermission", rpc_pb2.AuthRoleGrantPermissionRequest(name="moorage", perm=permission))
        self.call("Auth.AuthEnable", rpc_pb2.AuthEnableRequest())
        self._secured = True
