"""Binding a server to its address, and saying in one line why that cannot be."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from pathlib import Path
from typing import Any

from moorage import rpc
from moorage.errors import Conflict, EnvironmentLacking, MoorageError, NotFound, UsageError
from moorage.tls import TlsFiles

_ISSUE = "`moorage certs issue` makes them; `tls` in the settings names them"


def bind(server: Any, listen: str, tls: TlsFiles, what: str) -> int:
    """Let ``server`` listen on ``HOST:PORT`` with mutual TLS; returns the port. ``what`` it is: coordinator, worker.

    Raises `NotFound` (a certificate file is not there), `UsageError` (it is none, or the address cannot be this
    machine's), `Conflict` (another process listens there), `EnvironmentLacking` (this user may not).
    """
    check_files(tls)
    # gRPC takes a port of its own choice for what is none.
    if not (found := re.fullmatch(r".*:(\d{1,5})", listen)) or int(found[1]) > 65535:
        raise UsageError(f"cannot listen on {listen!r}: it is not HOST:PORT", _correct(what))
    try:
        port = int(server.add_secure_port(listen, rpc.server_credentials(tls)))
    except (RuntimeError, OSError, ValueError) as error:
        raise _why(listen, what) from error
    if not port:
        raise _why(listen, what)
    return port


def check_files(tls: TlsFiles) -> None:
    """Raises `NotFound` or `UsageError`, naming the file, unless these are an authority, a certificate and its key."""
    for path in (tls.ca, tls.cert, tls.key):
        try:
            Path(path).read_bytes()
        except FileNotFoundError:
            raise NotFound(f"certificate file {path} does not exist", _ISSUE) from None
        except OSError as error:
            raise EnvironmentLacking(
                f"certificate file {path} cannot be read: {error.strerror}", "let this user read it"
            ) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(tls.ca)
    except (ssl.SSLError, ValueError):
        raise UsageError(f"{tls.ca} holds no certificate of an authority", _ISSUE) from None
    try:
        context.load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (ssl.SSLError, ValueError):
        raise UsageError(f"{tls.cert} and {tls.key} are not a certificate and its key", _ISSUE) from None


def _correct(what: str) -> str:
    return f"correct `listen` in the {what}'s settings"


def _why(listen: str, what: str) -> MoorageError:
    """gRPC does not say, so it is tried once more without it."""
    correct = _correct(what)
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except socket.gaierror as error:
        return UsageError(f"cannot listen on {listen}: {error.strerror}", correct)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Conflict(f"cannot listen on {listen}: another process does", f"is another {what} running there?")
        if error.errno == errno.EADDRNOTAVAIL:
            return UsageError(f"cannot listen on {listen}: this machine has no such address", correct)
        return EnvironmentLacking(f"cannot listen on {listen}: {error.strerror}", correct)
    return Conflict(f"cannot listen on {listen}", f"{correct}, or try again")
