"""The worker's end of its local socket (`moorage.localsocket` says what it is for)::

{"do": "node"}                              → one object: the node, whether it is registered, who asks
{"do": "pods"}                              → one object for each pod of the asking user (root: of all)
{"do": "logs", "job": …, "pod": …}          → {"rank": …, "stderr": …, "text": …} for what it has written so far
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import structlog

from moorage import __version__
from moorage.errors import Forbidden, MoorageError, UsageError
from moorage.localsocket import FOLDER, GROUP, path_of, peer_uid
from moorage.worker import logs
from moorage.worker.agent import Agent
from moorage.worker.pod import Pod

log = structlog.get_logger(__name__)
_LINE_BYTES = 64 << 10


def principal_of(uid: int) -> str:
    """The principal that a user of this machine is; a number without an account is nobody's."""
    try:
        return f"user:{pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"uid:{uid}"


def listen(path: Path) -> socket.socket:
    """The socket, for the group `GROUP` if there is one. Its folder is made (0755). Raises `OSError`."""
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
    finally:
        os.umask(before)
    with contextlib.suppress(KeyError):  # no such group: root's alone
        os.chown(path, 0, grp.getgrnam(GROUP).gr_gid)
        path.chmod(0o660)
    listening.listen(16)
    listening.setblocking(False)
    return listening


class LocalSocket:
    """Serves until closed. A machine on which it cannot be made does without."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._path = path_of(agent.node.config.cluster, agent.node.name)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        try:
            self._server = await asyncio.start_unix_server(self._accept, sock=listen(self._path), limit=_LINE_BYTES)
        except OSError as error:
            log.warning("no local socket", path=str(self._path), error=str(error))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        uid = peer_uid(writer.get_extra_info("socket"))
        try:
            while line := await reader.readline():
                async for answer in self._answers(line, uid):
                    writer.write(msgspec.json.encode(answer) + b"\n")
                    await writer.drain()
                break  # one request a connection: its end is the end of the answers
        except (OSError, ValueError):
            pass  # the other end went away, or sent no line
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _answers(self, line: bytes, uid: int) -> AsyncIterator[dict[str, Any]]:
        try:
            request = msgspec.json.decode(line, type=dict[str, Any])
            async for answer in self._do(request, uid):
                yield answer
        except MoorageError as error:
            if isinstance(error, Forbidden):
                log.warning("refused", caller=principal_of(uid), uid=uid, why=error.message)
            yield {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        except msgspec.MsgspecError as error:
            yield {"error": "UsageError", "message": f"this is no request: {error}", "hint": ""}

    async def _do(self, request: dict[str, Any], uid: int) -> AsyncIterator[dict[str, Any]]:
        agent = self._agent
        match request.get("do"):
            case "node":
                yield {
                    "node": agent.node.name,
                    "cluster": agent.node.config.cluster,
                    "version": __version__,
                    "registered": agent.node.lease.deadline > 0,
                    "you": principal_of(uid),
                }
            case "pods":
                for pod in agent.pods.values():
                    if self._may(pod, uid):
                        status = pod.status()
                        yield {
                            "job": status.job,
                            "name": pod.spec.name,
                            "pod": status.pod,
                            "incarnation": status.incarnation,
                            "phase": status.phase,
                            "owner": pod.spec.owner,
                        }
            case "logs":
                pod = agent.newest(str(request.get("job", "")), int(request.get("pod", 0)))
                if not self._may(pod, uid):
                    raise Forbidden(f"job {pod.record.job} belongs to {pod.spec.owner}", "")
                async for chunk in logs.read(pod, offset=0, rank=-1, follow=False):
                    text = chunk.data.decode(errors="replace")
                    yield {"rank": chunk.rank, "stderr": chunk.is_stderr, "text": text}
            case other:
                raise UsageError(f"{other!r} cannot be asked", "node, pods, logs")

    @staticmethod
    def _may(pod: Pod, uid: int) -> bool:
        return uid == 0 or pod.spec.owner == principal_of(uid)
