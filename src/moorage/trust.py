"""mTLS: which certificate files a process presents and trusts, and the small private authority of a dev cluster.

Every connection of moorage (coordinator, worker, client) is mutual TLS. Server and client certificates are issued by
one cluster authority; the certificate's common name is the principal (``coordinator``, ``worker:node-1``, ``user:me``).
Because nodes come and go with addresses of their own, servers are verified by the fixed name ``moorage`` in their
certificates, not by address; who the peer is follows from the principal.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moorage.tls import SERVER_NAME, TlsFiles

__all__ = ["SERVER_NAME", "TlsFiles", "create_authority", "issue"]


def _write_private(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _builder(subject: str, issuer: x509.Name, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def create_authority(folder: Path, name: str, days: int = 3650) -> None:
    """Write a new authority: ``ca.pem`` and ``ca.key`` (0600) in ``folder`` (0700)."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, issuer, days)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_private(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "ca.key", _pem(key))


def issue(
    authority: Path, folder: Path, principal: str, *, addresses: tuple[str, ...] = (), days: int = 365
) -> TlsFiles:
    """Issue a certificate for ``principal``, for client and server use, into ``folder``; returns its files.

    ``addresses`` are IP addresses or host names to name in it beside `SERVER_NAME` (etcd's own client checks them).
    """
    ca = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.DNSName(SERVER_NAME)]
    for address in addresses:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(address))
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _builder(principal, ca.subject, days)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    _write_private(folder / "ca.pem", ca.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "cert.pem", certificate.public_bytes(serialization.Encoding.PEM))
    _write_private(folder / "key.pem", _pem(key))
    return TlsFiles.in_folder(folder)
