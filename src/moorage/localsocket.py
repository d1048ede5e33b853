"""The worker's socket for the users of its machine: where it lies, and how it is asked.

One JSON object a line each way. The kernel says who asks (SO_PEERCRED), so no certificate is needed: a user sees and
reads what is his own on this node, root sees everything. The socket is the group's, 0660, where there is a group of
that name; else root's alone.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from moorage import errors

GROUP: Final = "moorage"
FOLDER: Final = Path("/run/moorage")
_UCRED: Final = struct.Struct("3i")
_SECONDS: Final = 10.0


def path_of(cluster: str, node: str) -> Path:
    """The socket of a node's worker."""
    return FOLDER / f"{cluster}-{node}.sock"


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    _, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return int(uid)


def may_control(connection: socket.socket) -> bool:
    """Whether the peer may speak to a socket of this process's own: itself or root. File modes say the same; this holds
    also for a descriptor that was handed on."""
    return peer_uid(connection) in (0, os.geteuid())


def ask(path: Path, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers to one request. Raises `Unavailable`, `Forbidden`, or what the worker raises."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(str(path))
            connection.sendall(msgspec.json.encode(request) + b"\n")
            with connection.makefile("rb") as answers:
                for line in answers:
                    answer: dict[str, Any] = msgspec.json.decode(line)
                    if "error" in answer:
                        raise errors.by_name(answer["error"])(answer["message"], answer["hint"])
                    yield answer
        except PermissionError as error:
            raise errors.Forbidden(f"{path} is not for this user", f"join the group {GROUP}") from error
        except (OSError, msgspec.DecodeError) as error:
            raise errors.Unavailable(
                f"no worker answers at {path}: {error}", "is one running on this machine?"
            ) from error
