"""mTLS: the small private authority of a cluster, and the certificates that it issues, rotates and revokes.

Every connection of moorage (coordinator, worker, client) is mutual TLS. Server and client certificates are issued by
one cluster authority; the certificate's common name is the principal (``coordinator``, ``worker:node-1``, ``user:me``)
and a URI in it (``moorage://role/operate``) the role. Because nodes come and go with addresses of their own, servers
are verified by the fixed name ``moorage`` in their certificates, not by address, and coordinators by
``coordinator.moorage``. So certificates of people and of join tokens have neither name nor the use as a server, and a
worker's has only the first: whoever holds one cannot play the coordinator for others.

An authority is a folder (0700): ``ca.pem``, ``ca.key``, ``crl.pem`` (what was revoked) and ``index.json`` (what was
issued). All files are 0600 and replaced in one step, so that a reader never sees half of one.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moorage.errors import Conflict, Forbidden, NotFound, UsageError
from moorage.roles import PERSONS, ROLES
from moorage.tls import COORDINATOR_NAME, CRL_FILE, ROLE_URI, SERVER_NAME, TlsFiles

__all__ = ["ROLE_URI", "SERVER_NAME", "TlsFiles", "create_authority", "issue"]

_BACKDATED = datetime.timedelta(hours=1)  # clocks differ
_LONGEST_NAME = 64  # of a common name, by X.509


class Issued(msgspec.Struct, kw_only=True):
    """One certificate in the authority's index. Times in seconds since the epoch; ``revoked`` 0: it is good."""

    serial: str  # hexadecimal
    principal: str
    role: str
    issued: float
    expires: float
    addresses: list[str] = []
    revoked: float = 0.0


def write_private(path: Path, data: bytes) -> None:
    """Replace a file (0600; its folder is made, 0700) in one step."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    new.rename(path)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as a file holds it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh private key."""
    return ec.generate_private_key(ec.SECP256R1())


def default_role(principal: str) -> str:
    """The role that a certificate gets when none is named; empty for programs that are not moorage's."""
    kind = principal.partition(":")[0]
    return {"coordinator": "coordinator", "worker": "worker", "user": "operate", "join": "join"}.get(kind, "")


def _builder(subject: str, issuer: x509.Name, seconds: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(seconds=seconds))
    )


def create_authority(folder: Path, name: str, days: int = 3650) -> None:
    """Write a new authority into ``folder``. Raises `Conflict` if there is one."""
    if (folder / "ca.key").exists():
        raise Conflict(f"{folder} holds an authority already", "every certificate hangs on it: choose another folder")
    key = new_key()
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    certificate = (
        _builder(name, issuer, days * 86400.0)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_private(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM))
    write_private(folder / "ca.key", key_pem(key))
    with _index(folder) as issued:
        _write_crl(folder, issued)


def _load(authority: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        ca = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    except FileNotFoundError as error:
        raise NotFound(f"there is no authority in {authority}", "make one: moorage certs create") from error
    except OSError as error:
        raise Forbidden(f"the authority in {authority} cannot be read: {error.strerror}", "do this as root") from error
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return ca, key


@contextlib.contextmanager
def _index(authority: Path) -> Iterator[list[Issued]]:
    """What was issued, locked; written back at the end of the block."""
    authority.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(authority / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        path = authority / "index.json"
        issued = msgspec.json.decode(path.read_bytes(), type=list[Issued]) if path.exists() else []
        before = msgspec.json.encode(issued)
        yield issued
        if msgspec.json.encode(issued) != before or not path.exists():
            _write_index(authority, issued)
    finally:
        os.close(descriptor)


def _write_index(authority: Path, issued: list[Issued]) -> None:
    write_private(authority / "index.json", msgspec.json.encode(issued))


def _serves(principal: str, role: str) -> bool:
    """Whether a certificate is for a server too. Only those of processes are (etcd's has no role)."""
    return role not in PERSONS and role != "join" and not principal.startswith("user:")


def _names(addresses: tuple[str, ...], role: str, serves: bool) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName(SERVER_NAME)] if serves else []
    if role == "coordinator":
        names.append(x509.DNSName(COORDINATOR_NAME))
    for address in addresses:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(address))
    if role:
        names.append(x509.UniformResourceIdentifier(ROLE_URI + role))
    return names


def sign(
    authority: Path,
    public_key: ec.EllipticCurvePublicKey,
    principal: str,
    role: str,
    *,
    addresses: tuple[str, ...] = (),
    seconds: float,
) -> bytes:
    """A certificate (PEM) for somebody's public key, entered into the index. Raises `NotFound`, `UsageError`."""
    if not principal or len(principal) > _LONGEST_NAME or not principal.isprintable():
        raise UsageError(f"{principal!r} is no principal", f"such as user:ann, of at most {_LONGEST_NAME} characters")
    if role and role not in ROLES:
        raise UsageError(f"there is no role {role!r}", f"roles: {', '.join(ROLES)}")
    ca, ca_key = _load(authority)
    serves = _serves(principal, role)
    usage = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    names = _names(addresses, role, serves)
    builder = (
        _builder(principal, ca.subject, seconds)
        .public_key(public_key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(ca_key, hashes.SHA256())
    with _index(authority) as issued:
        issued.append(
            Issued(
                serial=f"{certificate.serial_number:x}",
                principal=principal,
                role=role,
                issued=time.time(),
                expires=certificate.not_valid_after_utc.timestamp(),
                addresses=list(addresses),
            )
        )
    return certificate.public_bytes(serialization.Encoding.PEM)


def issue(
    authority: Path,
    folder: Path,
    principal: str,
    *,
    role: str | None = None,
    addresses: tuple[str, ...] = (),
    days: float = 365,
) -> TlsFiles:
    """Issue a certificate for ``principal`` into ``folder``; returns its files. Only a process's may serve.

    ``role`` is one of `roles.ROLES` (default: by the kind of principal). ``addresses`` are IP addresses or host names
    to name in it beside `SERVER_NAME` (etcd's own client checks them). What lies in ``folder`` is replaced.
    """
    key = new_key()
    role = default_role(principal) if role is None else role
    certificate = sign(authority, key.public_key(), principal, role, addresses=addresses, seconds=days * 86400.0)
    lay(folder, (authority / "ca.pem").read_bytes(), certificate, key_pem(key), (authority / CRL_FILE).read_bytes())
    return TlsFiles.in_folder(folder)


def lay(folder: Path, ca: bytes, certificate: bytes, key: bytes, crl: bytes = b"") -> None:
    """Write the files of an identity; a process that uses the folder takes them up without a new start."""
    write_private(folder / "ca.pem", ca)
    # The key first: whoever reads between the two gets a pair that fails at once and is read again.
    write_private(folder / "key.pem", key)
    write_private(folder / "cert.pem", certificate)
    if crl:
        write_private(folder / CRL_FILE, crl)


def rotate(authority: Path, folder: Path, *, days: float = 365) -> TlsFiles:
    """A new key and certificate in the place of those in ``folder``, for the same principal, role and addresses.

    The old certificate stays good until it expires or is revoked. Raises `NotFound`, `Forbidden` for one that was
    revoked.
    """
    files = TlsFiles.in_folder(folder)
    try:
        old = x509.load_pem_x509_certificate(Path(files.cert).read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"{folder} holds no certificate", "issue one: moorage certs issue") from error
    serial = f"{old.serial_number:x}"
    found = next((entry for entry in listing(authority) if entry.serial == serial), None)
    if found is None:
        raise NotFound(f"the certificate in {folder} was not issued by the authority in {authority}")
    if found.revoked:
        raise Forbidden(
            f"the certificate of {found.principal} in {folder} was revoked", "issue a new one, if it may be"
        )
    return issue(authority, folder, found.principal, role=found.role, addresses=tuple(found.addresses), days=days)


def serial_of(certificate: bytes) -> str:
    """The serial number of a certificate (PEM), hexadecimal as in the index."""
    return f"{x509.load_pem_x509_certificate(certificate).serial_number:x}"


def expiry_of(certificate: bytes) -> float:
    """When a certificate (PEM) runs out, in seconds since the epoch."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def listing(authority: Path) -> list[Issued]:
    """All that was issued, oldest first. Raises `NotFound`."""
    _load(authority)
    with _index(authority) as issued:
        return list(issued)


def revoke(authority: Path, which: str) -> list[Issued]:
    """Revoke the certificate with this serial number, or all of this principal; returns them. Raises `NotFound`.

    The index is written before the list. Whoever died between the two, or in the other order as once was, has left one
    of them behind: each call brings what either says into both, and returns what was not in both for newly revoked.
    """
    with _index(authority) as issued:
        listed = _listed(authority)
        doomed = []
        for entry in issued:
            when = listed.get(int(entry.serial, 16))
            if which in (entry.serial, entry.principal) and not (entry.revoked and when):
                doomed.append(entry)
                entry.revoked = entry.revoked or when or time.time()
            elif when:
                entry.revoked = entry.revoked or when
        _write_index(authority, issued)
        _write_crl(authority, issued)
    if not doomed:
        raise NotFound(f"no good certificate {which!r} was issued here", "moorage certs list shows all of them")
    return doomed


def _listed(authority: Path) -> dict[int, float]:
    """Serial numbers on the revocation list, and when each was revoked in seconds since the epoch."""
    try:
        crl = x509.load_pem_x509_crl((authority / CRL_FILE).read_bytes())
    except FileNotFoundError:
        return {}
    return {entry.serial_number: entry.revocation_date_utc.timestamp() for entry in crl}


def _write_crl(authority: Path, issued: list[Issued]) -> None:
    ca, key = _load(authority)
    now = datetime.datetime.now(datetime.UTC)
    revoked = [entry for entry in issued if entry.revoked]
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now - _BACKDATED)
        .next_update(now + datetime.timedelta(days=3650))
        .add_extension(x509.CRLNumber(len(revoked)), critical=False)
    )
    for entry in revoked:
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder()
            .serial_number(int(entry.serial, 16))
            .revocation_date(datetime.datetime.fromtimestamp(entry.revoked, datetime.UTC))
            .build()
        )
    write_private(authority / CRL_FILE, builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def read_crl(data: bytes, ca: bytes) -> tuple[int, frozenset[int]]:
    """Number and revoked serial numbers of a revocation list. Raises `Forbidden` unless the authority signed it."""
    try:
        crl = x509.load_pem_x509_crl(data)
        for authority in x509.load_pem_x509_certificates(ca):
            key = authority.public_key()
            if isinstance(key, ec.EllipticCurvePublicKey) and crl.is_signature_valid(key):
                number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
                return number, frozenset(entry.serial_number for entry in crl)
    except (ValueError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise Forbidden(f"this revocation list cannot be read: {error}") from error
    raise Forbidden("this revocation list was not signed by the cluster's authority")
