"""`PodNetwork`: all of one pod's network on this node, made, sealed, cut and removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import structlog

from moorage import failpoints
from moorage.errors import Conflict, EnvironmentLacking, NotFound, UsageError
from moorage.worker.network import links, namespace, qdisc, resolver, rules
from moorage.worker.network.cut import cut_by_names, uncut_by_names
from moorage.worker.network.datagrams import Datagram, deliver
from moorage.worker.network.names import (
    EXTERNAL_DEVICE,
    JOB_DEVICE,
    VXLAN_PORT,
    MemberAddress,
    Names,
    PublishedPort,
    external_address,
    job_address,
)
from moorage.worker.network.sockets import Connection, Diagnosis, SocketReport, report
from moorage.worker.network.waiting import Waiting, put_back, shield

log = structlog.get_logger(__name__)
T = TypeVar("T")

for _step in ("create", "seal", "unseal", "cut", "uncut", "reset_external", "remove"):
    failpoints.declare(f"network.{_step}.before", f"network.{_step}.after")

#: How often `wait_drained` looks, in seconds. The kernel sends no event when a socket's last segment is acknowledged.
_LOOK_EVERY = 0.004


class PodNetwork:
    """The network of pod ``pod`` of an incarnation of ``job``, on ``node`` with the address ``node_address``.

    ``members`` are all pods of the incarnation, this one included; with one member there is no ``job0``. ``slot`` is
    the job's first ``ext0`` number: pod *i* has number slot + i. ``vni`` belongs to (job, incarnation) alone. The
    object holds no state: another process that is given the same numbers finds the same devices.
    """

    def __init__(
        self,
        *,
        cluster: str,
        node: str,
        job: str,
        pod: int,
        incarnation: int,
        vni: int,
        slot: int,
        node_address: str,
        members: Sequence[MemberAddress],
        publish: Sequence[PublishedPort] = (),
        use_rto_max: bool = True,
        vxlan_port: int = VXLAN_PORT,
    ) -> None:
        self.pod = pod
        self._label = f"moorage {cluster} {job} pod {pod} incarnation {incarnation}"
        self._names = Names.derive(cluster=cluster, node=node, job=job, pod=pod, incarnation=incarnation)
        self._vni = vni
        self._node_address = node_address
        self._members = tuple(members)
        self._publish = tuple(publish)
        self._use_rto_max = use_rto_max
        self._vxlan_port = vxlan_port
        self._with_job_network = len(self._members) > 1
        self.external_address = external_address(slot + pod)
        self._check(job)

    def _check(self, job: str) -> None:
        if self._with_job_network and not 0 < self._vni < 1 << 24:
            raise UsageError(f"job {job}: {self._vni} is no VXLAN network identifier")
        if all(member.pod != self.pod for member in self._members):
            raise UsageError(f"job {job}: pod {self.pod} is not among the members of its network")
        for port in self._publish:
            if port.protocol not in ("tcp", "udp") or not (0 < port.host_port < 65536 and 0 < port.pod_port < 65536):
                raise UsageError(
                    f"cannot publish {port.host_port}:{port.pod_port}/{port.protocol}",
                    "ports are 1 to 65535, tcp or udp",
                )

    @property
    def netns_path(self) -> Path:
        """The pod's network namespace, for runc's configuration."""
        return namespace.FOLDER / self._names.netns

    @property
    def job_address(self) -> str:
        """The pod's address on ``job0``; of a job with one pod, 127.0.0.1."""
        return job_address(self.pod) if self._with_job_network else "127.0.0.1"

    @property
    def master_address(self) -> str:
        """Where pod 0 listens, as the ranks of this pod reach it (``MASTER_ADDR``)."""
        return job_address(0) if self._with_job_network else "127.0.0.1"

    @property
    def job_interface(self) -> str:
        """The device that the ranks speak over: ``job0``, or ``lo`` for a job with one pod."""
        return JOB_DEVICE if self._with_job_network else "lo"

    @property
    def host_devices(self) -> list[str]:
        """The host's ends of the pod's cables: all that `cut_by_names` needs to fence it."""
        return [*([self._names.job_host] if self._with_job_network else []), self._names.external_host]

    def resolv_conf(self) -> str:
        """Text for the pod's ``/etc/resolv.conf``."""
        return resolver.host_resolver()[0]

    def hosts(self, names: Mapping[int, str]) -> str:
        """Text for the pod's ``/etc/hosts``: ``names`` maps pod numbers to host names."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        for pod, name in sorted(names.items()):
            lines.append(f"{job_address(pod) if self._with_job_network else self.external_address} {name}")
        return "\n".join(lines) + "\n"

    def create(self, *, sealed: bool) -> None:
        """Make everything, sealed from the first moment or open. A network that stands already is left as it is.

        On failure nothing is left. Raises `EnvironmentLacking`, and `Conflict` for a published port that is taken.
        """
        failpoints.hit_sync("network.create.before")
        if not self._stands():
            self.remove()
            try:
                self._build(sealed)
            except BaseException:
                with suppress(Exception):
                    self.remove()
                raise
        failpoints.hit_sync("network.create.after")

    def _stands(self) -> bool:
        with links.opened() as route:
            return self.netns_path.exists() and links.alias(route, self._names.external_host) == self._label

    def _build(self, sealed: bool) -> None:
        namespace.create(self.netns_path)
        namespace.run_in(self.netns_path, self._set_up_stack)
        behind = resolver.host_resolver()[1]
        with namespace.host_lock(), links.opened() as route:
            namespace.write_sysctl("net/ipv4/ip_forward", 1)
            uplink = links.uplink_mtu(route, self._node_address)
            if self._with_job_network:
                mtu = links.mtu_for(uplink)
                remote = [member for member in self._members if member.node_address != self._node_address]
                links.ensure_bridge(
                    route, self._names, vni=self._vni, node_address=self._node_address, port=self._vxlan_port,
                    remote=remote, mtu=mtu,
                )  # fmt: skip
                links.job_cable(route, self._names, netns=self.netns_path, pod=self.pod, mtu=mtu)
            links.external_cable(route, self._names, netns=self.netns_path, address=self.external_address, mtu=uplink)
            if behind:
                namespace.write_sysctl(f"net/ipv4/conf/{self._names.external_host}/route_localnet", 1)
            taken = rules.taken_ports(rules.list_table("ip", self._names.table), self._publish)
            if taken:
                ports = ", ".join(f"{port.host_port}/{port.protocol}" for port in taken)
                raise Conflict(
                    f"port {ports} of this node is published by another job already",
                    "publish on another port, or stop that job",
                )
            rules.apply(
                rules.host_table(self._names.table, vxlan_port=self._vxlan_port)
                + rules.pod_elements(self._names.table, self.external_address, self._publish, behind)
            )
        if sealed:
            self.seal()
        namespace.run_in(self.netns_path, self._raise_devices)
        with links.opened() as route:
            links.set_alias(route, self._names.external_host, self._label)

    def _set_up_stack(self) -> None:
        # job0 and ext0 speak IPv4 only; lo keeps ::1, which some programs want.
        namespace.write_sysctl("net/ipv6/conf/default/disable_ipv6", 1)
        # However long a pod is frozen or sealed, no retransmission counter may end a connection.
        namespace.write_sysctl("net/ipv4/tcp_retries2", 255)
        if self._use_rto_max:
            namespace.write_sysctl("net/ipv4/tcp_rto_max_ms", 1000)
        namespace.write_sysctl("net/ipv4/ping_group_range", "0 2147483647")
        with links.opened() as route:
            links.raise_loopback(route)

    def _raise_devices(self) -> None:
        with links.opened() as route:
            if self._with_job_network:
                links.raise_job_device(route, pod=self.pod, members=self._members)
            links.raise_external_device(route, address=self.external_address)

    def _inside(self, work: Callable[[], T]) -> T:
        try:
            return namespace.run_in(self.netns_path, work)
        except FileNotFoundError as error:
            if error.filename != str(self.netns_path):
                raise
            raise NotFound(f"the network of {self._label.removeprefix('moorage ')} does not exist") from error

    @property
    def _pod_devices(self) -> list[str]:
        return [*([JOB_DEVICE] if self._with_job_network else []), EXTERNAL_DEVICE]

    def seal(self) -> None:
        """Let no data out of the pod (see `rules.seal`). Idempotent. Raises `NotFound`, `EnvironmentLacking`."""
        failpoints.hit_sync("network.seal.before")
        self._inside(self._seal)
        failpoints.hit_sync("network.seal.after")

    def _seal(self) -> None:
        try:
            rules.apply(rules.seal(self._pod_devices))
        except (EnvironmentLacking, FileNotFoundError):
            # Kernels before 5.16 have no egress hook. The queue of length 0 answers senders in the same way, but holds
            # acknowledgements back too.
            rules.apply(rules.seal(self._pod_devices, egress=False))
            with links.opened() as route:
                qdisc.block(route, self._pod_devices)

    def unseal(self) -> None:
        """Undo `seal`. Idempotent. Raises `NotFound`."""
        failpoints.hit_sync("network.unseal.before")

        def work() -> None:
            with links.opened() as route:
                qdisc.unblock(route, self._pod_devices)
            rules.apply(rules.UNSEAL)

        self._inside(work)
        failpoints.hit_sync("network.unseal.after")

    def sealed(self) -> bool:
        """Whether the seal is on. Raises `NotFound`."""
        return self._inside(lambda: bool(rules.list_table("netdev", rules.SEAL_TABLE)))

    def shield(self, *, ports: Sequence[int] = (), waiting: Sequence[Waiting] = ()) -> None:
        """See `waiting.shield`. Raises `NotFound`, `EnvironmentLacking`."""
        self._inside(lambda: shield(ports, waiting))

    def unshield(self) -> None:
        """Undo `shield`. Idempotent. Raises `NotFound`."""
        self._inside(lambda: rules.apply(rules.UNSHIELD))

    def put_back(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """See `waiting.put_back`: the connections that did not get in. Raises `NotFound`, `OSError`."""
        return self._inside(lambda: put_back(waiting))

    def deliver(self, datagrams: Sequence[Datagram]) -> None:
        """Let the pod's UDP sockets receive these. Raises `NotFound`, `OSError`."""
        self._inside(lambda: deliver(datagrams))

    def cut(self) -> None:
        """Fence the pod: pull its cables at the host's end. Works on what is left of a half-removed pod too."""
        failpoints.hit_sync("network.cut.before")
        cut_by_names(self.host_devices)
        failpoints.hit_sync("network.cut.after")

    def uncut(self) -> None:
        """Plug the cables in again. A seal stays."""
        failpoints.hit_sync("network.uncut.before")
        uncut_by_names(self.host_devices)
        failpoints.hit_sync("network.uncut.after")

    def drained(self) -> bool:
        """Whether all that the pod sent to other pods has arrived: no unacknowledged TCP data on ``job0``.

        A connection whose peer has closed its window counts as drained: it cannot send, so nothing is on its way.
        """
        return self.wait_drained(0.0)

    def wait_drained(self, deadline: float) -> bool:
        """Wait until `drained`, but not beyond ``deadline`` (CLOCK_BOOTTIME seconds). Returns whether it is."""
        if not self._with_job_network:
            return True
        with self._inside(Diagnosis) as diagnosis:
            while any(c.in_flight and c.local == self.job_address for c in diagnosis.tcp()):
                left = deadline - time.clock_gettime(time.CLOCK_BOOTTIME)
                if left <= 0:
                    return False
                time.sleep(min(_LOOK_EVERY, left))
        return True

    def sockets(self) -> SocketReport:
        """All TCP connections and listeners, raw and packet sockets of the pod, for the preflight."""
        return self._inside(report)

    def external_connections(self) -> list[Connection]:
        """TCP connections over ``ext0``."""
        with self._inside(Diagnosis) as diagnosis:
            return [c for c in diagnosis.tcp() if c.local == self.external_address]

    def reset_external(self) -> int:
        """End all TCP connections over ``ext0``, so that nobody waits for a peer that knows another address.

        Returns how many were ended; 0 with a warning in the log where the kernel cannot do it.
        """
        failpoints.hit_sync("network.reset_external.before")
        ended = 0
        with self._inside(Diagnosis) as diagnosis:
            try:
                for connection in diagnosis.tcp():
                    if connection.local == self.external_address:
                        ended += diagnosis.destroy(connection)
            except EnvironmentLacking as error:
                log.warning("connections to the world not reset", pod=self._label, reason=str(error))
        failpoints.hit_sync("network.reset_external.after")
        return ended

    def remove(self) -> None:
        """Remove every trace of the pod, and the job's bridge and VXLAN device with its last pod here. Idempotent."""
        failpoints.hit_sync("network.remove.before")
        with namespace.host_lock():
            with links.opened() as route:
                links.delete(route, self._names.external_host)
                links.delete(route, self._names.job_host)
                if not set(links.bridge_ports(route, self._names.bridge)) - {self._names.vxlan}:
                    links.delete(route, self._names.vxlan)
                    links.delete(route, self._names.bridge)
            table = self._names.table
            rules.apply(rules.removal(table, self.external_address, rules.list_table("ip", table)))
        namespace.delete(self.netns_path)
        failpoints.hit_sync("network.remove.after")
