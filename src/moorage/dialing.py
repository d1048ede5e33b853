"""A channel to a coordinator, and to nobody who only has some certificate of the same authority.

A worker's certificate is a server's too. gRPC for Python verifies a server's names and nothing else of its
certificate, so a coordinator's has a name of its own (`COORDINATOR_NAME`). One that was issued before there was that
name tells its role in a URI alone: so a handshake of our own looks first, and where the name is missing and the role is
right the channel trusts that one certificate, whose key the server must prove to have, in place of the authority.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import grpc
import grpc.aio

from moorage import rpc
from moorage.errors import Unavailable
from moorage.tls import COORDINATOR_NAME, ROLE_URI, SERVER_NAME, TlsFiles

_SECONDS: Final = 5.0
_HINT: Final = (
    "somebody else listens there, or its certificate is none of a coordinator's: moorage certs issue coordinator"
)


class Server(NamedTuple):
    """Who was met, by a certificate of the authority. ``address``: where, as gRPC writes it."""

    address: str
    name: str
    named: bool  # the certificate has `COORDINATOR_NAME`
    role: str
    certificate: bytes  # PEM


async def coordinator_channel(target: str, tls: TlsFiles, *, seconds: float = _SECONDS) -> grpc.aio.Channel:
    """A channel to the coordinator at ``host:port``; ``seconds``: how long one look at it may take.

    Raises `Unavailable` when nobody answers there or who does is no coordinator, `OSError` for files that cannot be
    read.
    """
    what = f"coordinator {target}"
    ca, cert, key = tls.read()
    try:
        async with asyncio.timeout(seconds):
            met = await _meet(target, tls)
    except TimeoutError:
        raise Unavailable(f"{what} cannot be reached", "is it running? it does not answer in time") from None
    except OSError as error:  # ssl's errors too
        raise rpc.unreachable(what, str(error)) from None
    if met.named:
        return rpc.channel(target, grpc.ssl_channel_credentials(ca, key, cert), COORDINATOR_NAME)
    if met.role != "coordinator":
        raise Unavailable(f"{what} is no coordinator: the certificate there is that of {met.name or 'nobody'}", _HINT)
    return rpc.channel(met.address, grpc.ssl_channel_credentials(met.certificate, key, cert), SERVER_NAME)


async def _meet(target: str, tls: TlsFiles) -> Server:
    host, _, port = target.rpartition(":")
    _, writer = await asyncio.open_connection(
        host.strip("[]"), int(port), ssl=_context(tls), server_hostname=SERVER_NAME
    )
    try:
        link: Any = writer.get_extra_info("ssl_object")
        there, number = writer.get_extra_info("peername")[:2]
        place = f"ipv6:[{there}]:{number}" if ":" in there else f"ipv4:{there}:{number}"
        name, named, role = read(link.getpeercert())
        return Server(place, name, named, role, ssl.DER_cert_to_PEM_cert(link.getpeercert(True)).encode())
    finally:
        writer.transport.abort()


def _context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])  # gRPC ends a handshake without it
    context.load_verify_locations(tls.ca)
    with contextlib.suppress(ssl.SSLError):  # a pair in the middle of its replacement: whoever wants it refuses
        context.load_cert_chain(tls.cert, tls.key)
    return context


def read(certificate: Mapping[str, Any]) -> tuple[str, bool, str]:
    """Common name, whether `COORDINATOR_NAME` is in it, and the role; from `ssl.SSLSocket.getpeercert`. Pure."""
    names = certificate.get("subjectAltName", ())
    roles = [value.removeprefix(ROLE_URI) for kind, value in names if kind == "URI" and value.startswith(ROLE_URI)]
    common = [value for part in certificate.get("subject", ()) for kind, value in part if kind == "commonName"]
    return (
        common[0] if common else "",
        ("DNS", COORDINATOR_NAME) in names,
        roles[0] if len(roles) == 1 else "",
    )
