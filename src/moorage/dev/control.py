"""Orders to the supervisor of an embedded cluster, from another process. Blocking."""

from __future__ import annotations

import signal
import socket
from typing import Any

import msgspec

from moorage import errors
from moorage.dev.layout import Cluster
from moorage.dev.supervisor import Running

#: Ending everything takes the workers', the coordinator's and etcd's grace one after the other.
LONGEST_ORDER = 60.0


def _order(cluster: Cluster, request: dict[str, str]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(LONGEST_ORDER)
        try:
            connection.connect(str(cluster.control))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as answers:
                line = answers.readline()
        except OSError as error:
            raise errors.Unavailable(
                f"the supervisor of dev cluster {cluster.name} does not answer: {error.strerror or error}",
                f"take the cluster down and start it again: {cluster.how_down}",
            ) from error
    if not line:
        raise errors.Unavailable(f"the supervisor of dev cluster {cluster.name} ended", "see its log")
    answer: dict[str, Any] = msgspec.json.decode(line)
    if "error" in answer:
        raise errors.by_name(answer["error"])(answer["message"], answer["hint"])
    return answer


def running(cluster: Cluster) -> bool:
    """Whether the supervisor answers."""
    try:
        status(cluster)
    except errors.Unavailable:
        return False
    return True


def status(cluster: Cluster) -> dict[str, Running]:
    """What runs, by name of the process. Raises `Unavailable`."""
    return msgspec.convert(_order(cluster, {"do": "status"})["roles"], dict[str, Running])


def start(cluster: Cluster, role: str) -> None:
    """Start a process if it does not run, and keep it running. Raises `NotFound`, `Unavailable`."""
    _order(cluster, {"do": "start", "role": role})


def stop(cluster: Cluster, role: str, number: signal.Signals = signal.SIGTERM) -> None:
    """End a process; it is not started again. Raises `UsageError`, `Unavailable`."""
    _order(cluster, {"do": "stop", "role": role, "signal": number.name})


def send(cluster: Cluster, role: str, number: signal.Signals) -> None:
    """Send a signal to a process; if it dies of it, it is started again. Raises `UsageError`, `Unavailable`."""
    _order(cluster, {"do": "signal", "role": role, "signal": number.name})


def down(cluster: Cluster) -> None:
    """End all processes and the supervisor. Raises `Unavailable`."""
    _order(cluster, {"do": "down"})
