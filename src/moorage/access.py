"""The gate of a gRPC server: whose certificate it is, whether it is still good, and whether its role may call this.

The handshake has refused everything without a certificate of the authority. What a handshake cannot see is looked at
with every call, and again while a stream lasts: whether the certificate was revoked or has run out since.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from cryptography import x509
from cryptography.x509.oid import NameOID

from moorage import roles
from moorage.errors import Forbidden
from moorage.roles import Attempt, Identity, Rule
from moorage.tls import TlsFiles, stamp
from moorage.trust import ROLE_URI, read_crl

log = structlog.get_logger(__name__)

_LOOK_SECONDS = 1.0


class _Seen(NamedTuple):
    identity: Identity
    expires: float


@functools.lru_cache(maxsize=4096)
def _read(pem: bytes) -> _Seen:
    certificate = x509.load_pem_x509_certificate(pem)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    try:
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = alternatives.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    found = [uri.removeprefix(ROLE_URI) for uri in uris if uri.startswith(ROLE_URI)]
    identity = Identity(
        principal=str(names[0].value) if names else "",
        role=found[0] if len(found) == 1 else "",
        serial=certificate.serial_number,
    )
    return _Seen(identity, certificate.not_valid_after_utc.timestamp())


class Revocations:
    """The revocation list beside an authority's certificate, read anew when it changes."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._stamp: object = None
        self._looked = 0.0
        self._serials: frozenset[int] = frozenset()

    def revoked(self, serial: int) -> bool:
        """Whether that certificate was revoked. A list that cannot be read changes nothing of what is known."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look()
        return serial in self._serials

    def _look(self) -> None:
        found = (stamp(self._tls.crl), stamp(self._tls.ca))
        if found == self._stamp:
            return
        if found[0] == (0, 0, 0):
            self._stamp = found
            return
        try:
            self._serials = read_crl(self._tls.crl.read_bytes(), Path(self._tls.ca).read_bytes())[1]
            self._stamp = found
        except (OSError, Forbidden) as error:
            log.error("the revocation list is left alone", path=str(self._tls.crl), error=str(error))


class Gate:
    """Decides on every call of one server. ``audit`` is told of what was refused, and of what the rules name."""

    def __init__(self, tls: TlsFiles, audit: Callable[[Attempt], None] | None = None) -> None:
        self._revocations = Revocations(tls)
        self.audit = audit

    @staticmethod
    def identify(auth: Mapping[str, Sequence[bytes]]) -> Identity:
        """Who calls, by gRPC's account of the connection; nobody if it has no certificate."""
        pems = auth.get("x509_pem_cert") or ()
        return _read(bytes(pems[0])).identity if pems else Identity()

    def check(self, auth: Mapping[str, Sequence[bytes]]) -> None:
        """Raise `Forbidden` for a certificate that was revoked or has run out."""
        pems = auth.get("x509_pem_cert") or ()
        if not pems:
            raise Forbidden("a call without a certificate", "use one of the cluster's authority")
        identity, expires = _read(bytes(pems[0]))
        if expires < time.time():
            raise Forbidden(f"the certificate of {identity.principal} has run out", "moorage certs rotate")
        if self._revocations.revoked(identity.serial):
            raise Forbidden(f"this certificate of {identity.principal} was revoked", "ask for a new one")

    def admit(self, auth: Mapping[str, Sequence[bytes]], method: str) -> Rule:
        """The method's rule. Raises `Forbidden` when this caller may not call it."""
        self.check(auth)
        return roles.check(self.identify(auth), method)
