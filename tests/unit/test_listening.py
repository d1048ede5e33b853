"""A server that cannot listen says why in one line."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from moorage import listening, rpc, trust
from moorage.errors import Conflict, MoorageError, NotFound, UsageError
from moorage.tls import TlsFiles


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    trust.create_authority(folder / "authority", "test")
    return trust.issue(folder / "authority", folder / "one", "coordinator")


def attempt(listen: str, tls: TlsFiles) -> int:
    async def go() -> int:
        server = rpc.aio_server()
        try:
            return listening.bind(server, listen, tls, "coordinator")
        finally:
            await server.stop(None)

    return asyncio.run(go())


def test_a_free_port_is_taken(tls: TlsFiles) -> None:
    assert attempt("127.0.0.1:0", tls) > 0


def test_a_second_server_gets_no_part_of_a_port(tls: TlsFiles) -> None:
    """gRPC would share it, and half of the clients would meet the wrong server."""

    async def go() -> None:
        first, second = rpc.aio_server(), rpc.aio_server()
        port = listening.bind(first, "127.0.0.1:0", tls, "coordinator")
        await first.start()
        try:
            with pytest.raises(Conflict, match=f"127.0.0.1:{port}: another process does") as raised:
                listening.bind(second, f"127.0.0.1:{port}", tls, "worker")
            assert raised.value.hint == "is another worker running there?"
        finally:
            await first.stop(None)
            await second.stop(None)
        third = rpc.aio_server()
        try:
            assert listening.bind(third, f"127.0.0.1:{port}", tls, "worker") == port, "free again at once"
        finally:
            await third.stop(None)

    asyncio.run(go())


def test_neither_does_another_program(tls: TlsFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(Conflict, match="another process"):
        attempt(f"127.0.0.1:{other.getsockname()[1]}", tls)


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("192.0.2.1:7000", "no such address"),
        ("127.0.0.1", "not HOST:PORT"),
        ("127.0.0.1:http-x", "not HOST:PORT"),
        ("127.0.0.1:70000", "not HOST:PORT"),
        ("no-such-host.invalid:7000", "cannot listen on no-such-host.invalid:7000"),
    ],
)
def test_an_address_that_cannot_be(tls: TlsFiles, listen: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        attempt(listen, tls)
    assert "`listen`" in raised.value.hint


def _missing(tls: TlsFiles, folder: Path) -> TlsFiles:
    return TlsFiles(tls.ca, str(folder / "cert.pem"), tls.key)


def _garbage(tls: TlsFiles, folder: Path) -> TlsFiles:
    (folder / "cert.pem").write_text("garbage")
    return _missing(tls, folder)


def _no_authority(tls: TlsFiles, folder: Path) -> TlsFiles:
    (folder / "cert.pem").write_text("garbage")
    return TlsFiles(str(folder / "cert.pem"), tls.cert, tls.key)


def _others_key(tls: TlsFiles, folder: Path) -> TlsFiles:
    trust.create_authority(folder / "authority", "other")
    other = trust.issue(folder / "authority", folder / "other", "coordinator")
    return TlsFiles(tls.ca, tls.cert, other.key)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_missing, NotFound, "cert.pem does not exist"),
        (_garbage, UsageError, "not a certificate and its key"),
        (_no_authority, UsageError, "no certificate of an authority"),
        (_others_key, UsageError, "not a certificate and its key"),
    ],
)
def test_certificates_that_are_none_are_named(
    tls: TlsFiles,
    tmp_path: Path,
    change: Callable[[TlsFiles, Path], TlsFiles],
    error: type[MoorageError],
    words: str,
) -> None:
    with pytest.raises(error, match=words) as raised:
        attempt("127.0.0.1:0", change(tls, tmp_path))
    assert "moorage certs issue" in raised.value.hint
