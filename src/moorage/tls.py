"""Where the files of a TLS identity lie. Apart from `trust`, which makes them, so that the guard need not load that."""

from __future__ import annotations

from pathlib import Path

import msgspec

#: The name in every server's certificate: nodes come and go with addresses of their own.
SERVER_NAME = "moorage"
#: The name that a coordinator's certificate has besides: nobody else can be taken for one.
COORDINATOR_NAME = "coordinator.moorage"
#: With the role behind it, a URI in every certificate of moorage's.
ROLE_URI = "moorage://role/"
#: Beside ``ca.pem``: what the authority has revoked. Servers read it anew whenever it changes.
CRL_FILE = "crl.pem"


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: the authority to trust, and this process's certificate chain and private key."""

    ca: str
    cert: str
    key: str

    @classmethod
    def in_folder(cls, folder: Path) -> TlsFiles:
        """The files as `trust.issue` lays them: ``ca.pem``, ``cert.pem``, ``key.pem``."""
        return cls(str(folder / "ca.pem"), str(folder / "cert.pem"), str(folder / "key.pem"))

    @property
    def crl(self) -> Path:
        """The revocation list that goes with the authority; it need not exist."""
        return Path(self.ca).with_name(CRL_FILE)

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Contents of ``(ca, cert, key)``. Raises `OSError`."""
        return Path(self.ca).read_bytes(), Path(self.cert).read_bytes(), Path(self.key).read_bytes()

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Something that differs once one of the files was replaced (zeros for one that is not there)."""
        return tuple(stamp(path) for path in (self.ca, self.cert, self.key))


def stamp(path: Path | str) -> tuple[int, int, int]:
    """Inode, time and size of a file; zeros when it is not there."""
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0, 0
    return status.st_ino, status.st_mtime_ns, status.st_size
